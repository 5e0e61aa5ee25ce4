// Starts the deck, then sets its formulas: those of the slide that is shown first.

const deck = new Reveal({
  width: 1280,
  height: 720,
  margin: 0,
  center: false,
  controls: false,
  hash: true,
  slideNumber: "c/t",
  transition: "none",
  pdfSeparateFragments: false,
  plugins: [RevealNotes],
});

deck.initialize().then(() => {
  const shown = deck.getCurrentSlide();
  const columns = [...document.querySelectorAll(".slides > section")];
  for (const element of [shown, ...columns]) {
    MathJax.Hub.Queue(["Typeset", MathJax.Hub, element]);
  }
  MathJax.Hub.Queue(() => {
    document.documentElement.dataset.maths = "set"; // for those who wait, such as the tests
  });
});
