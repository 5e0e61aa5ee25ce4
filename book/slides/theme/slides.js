// Sets the formulas of the first slide, starts the deck, then sets all others.

function start() {
  return Reveal.initialize({
    width: 1280,
    height: 720,
    margin: 0,
    center: false,
    navigationMode: "linear", // any arrow goes on to the next slide, whichever way a column runs
    controls: false,
    hash: true,
    slideNumber: "c/t",
    transition: "none",
    pdfSeparateFragments: false,
    plugins: [RevealNotes],
  });
}

// MathJax, loaded after this, reads its settings here and puts its own functions beside them.
window.MathJax = {
  tex: {inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]]},
  svg: {fontCache: "local", matchFontHeight: false}, // a formula can be copied to the notes' window
  options: {enableMenu: false, ignoreHtmlClass: "slides", processHtmlClass: "math"},
  startup: {
    typeset: false,
    async pageReady() {
      const columns = [...document.querySelectorAll(".slides > section")];
      await MathJax.typesetPromise([columns[0]]);
      await start();
      for (const column of columns.slice(1)) {
        await MathJax.typesetPromise([column]);
      }
    },
  },
};
