// Sphinx's scores, with benchmarks and internals behind guides and reference.
var Scorer = {
  score: function (result) {
    const [page, , , , score] = result;
    if (/^(benchmarks\/|CHANGELOG|CONTRIBUTING)/.test(page)) return score - 20;
    if (/^docs\/(choosing|errors|is_it_for_me)/.test(page)) return score + 15;
    if (/^(README|docs\/|notebooks\/)/.test(page)) return score + 5;
    return score;
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
