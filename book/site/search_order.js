// The search: lessons come before the package's reference, and each page found shows an excerpt.
"use strict";

// What a place of the course adds to the points that Sphinx gives for a match.
const PLACES = [[/^chapters.\d\d_/, 20], [/^chapters/, 16], [/^manual/, 8], [/^guide/, 5], [/^claims/, 5],
                [/^api/, -10], [/^_modules/, -30]];

var Scorer = {  // "var": the search looks for the name
  score: ([page, title, , , score]) => {
    const [, more] = PLACES.find(([place]) => place.test(page)) ?? [null, 0];
    return score + more;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

// Excerpts are read from the pages, which a browser allows on a server but not in a folder.
if (typeof Search !== "undefined") {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = location.protocol !== "file:";
  const read = Search.htmlToText;
  Search.htmlToText = (page, anchor) => {
    const parsed = new DOMParser().parseFromString(page, "text/html");
    // Formulas are TeX there, and code is no excerpt.
    parsed.querySelectorAll(".math, .cell_input, .cell_output, details").forEach(part => part.remove());
    const found = anchor && parsed.querySelector(anchor);
    return found ? found.textContent : read(parsed.documentElement.outerHTML, "");
  };
}
