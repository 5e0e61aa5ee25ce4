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

// A button on each listing copies its text; what a cell printed has none.
function copyButtons() {
  for (const pre of document.querySelectorAll("div.highlight > pre")) {
    if (pre.closest(".cell_output")) continue;
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy this code");
    button.addEventListener("click", async () => {
      const done = await copied(pre);
      button.textContent = done ? "Copied" : "Not copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    pre.parentElement.append(button);
  }
}

// Without https a browser has no clipboard to write to; there, what is selected can be copied.
async function copied(pre) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(pre.textContent).then(() => true, () => false);
  }
  getSelection().selectAllChildren(pre);
  return document.execCommand("copy");
}

window.addEventListener("load", () => {
  copyButtons();
  reachable();
  window.MathJax?.startup?.promise.then(reachable);
});
window.addEventListener("resize", reachable);
