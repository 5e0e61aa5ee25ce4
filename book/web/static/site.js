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
