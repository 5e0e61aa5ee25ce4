// What scrolls sideways by itself can be reached with the keyboard, and scrolled with the arrows.
const SCROLLS = "pre, .table-wrapper, .math-wrapper, div.math, span.math.wide";

function reachable() {
  for (const span of document.querySelectorAll("span.math")) {
    span.classList.remove("wide");
    const room = span.closest("p, li, td, dd, h1, h2, h3")?.clientWidth ?? Infinity;
    const set = span.querySelector("mjx-container");
    if (set && set.offsetWidth > room) span.classList.add("wide");
  }
  for (const box of document.querySelectorAll(SCROLLS)) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

window.addEventListener("load", () => {
  reachable();
  window.MathJax?.startup?.promise.then(reachable);
});
window.addEventListener("resize", reachable);
