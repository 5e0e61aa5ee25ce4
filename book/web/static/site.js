// What scrolls sideways by itself can be reached with the keyboard, and scrolled with the arrows.
function reachable() {
  for (const box of document.querySelectorAll("pre, .table-wrapper, .math-wrapper, div.math")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

window.addEventListener("load", () => {
  reachable();
  window.MathJax?.startup?.promise.then(reachable);
});
window.addEventListener("resize", reachable);

// The search shows lines of the pages that it found, for which it reads them. A page that was
// opened from a folder may not read others.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
