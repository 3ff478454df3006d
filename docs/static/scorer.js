// What the search shows first: guides, then the reference, then programs. Sphinx takes the scores from here.
var Scorer = {
  score: ([page, title, anchor, said, score]) =>
    score + (page.startsWith("programs/") ? -5 : page.includes("/") ? 0 : 10),
  objNameMatch: 11,
  objPartialMatch: 2, // "checkpoint" is a part of thirty names
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
