"""Retrieval metrics beside trec_eval, exact search beside NumPy, and BM25."""

import sys

import numpy as np
import pytest

from bertjax.errors import UsageError
from bertjax.metrics import nearest as search
from bertjax.metrics.nearest import nearest
from bertjax.metrics.retrieval import bm25, retrieval_scores


def made_up_rankings(seed):
    """Returns rankings with ties and graded judgments, some of them negative, zero or of unknown documents."""
    rng = np.random.default_rng(seed)
    names = [f"d{index}" for index in range(150)] + ["Ä", "ä", "北"]
    rankings, judgments = {}, {}
    for query in range(40):
        found = rng.permutation(names)[: rng.integers(0, len(names))]
        scores = rng.integers(0, 30, len(found)) / 7 + rng.choice([0, 1e-9], len(found))
        rankings[f"q{query}"] = dict(zip(found.tolist(), scores.tolist(), strict=True))
        judged = rng.permutation([*names, "unknown1", "unknown2"])[: rng.integers(1, 40)]
        judgments[f"q{query}"] = {name: int(rng.integers(-1, 4)) for name in judged.tolist()}
    # Queries without judgments, without a ranking, and without relevant documents.
    del judgments["q1"], rankings["q2"]
    judgments["q3"] = dict.fromkeys(judgments["q3"], 0)
    return rankings, judgments


@pytest.mark.parametrize("seed", range(5))
def test_scores_equal_those_of_trec_eval(seed):
    pytrec_eval = pytest.importorskip("pytrec_eval", reason="needs pytrec_eval: pip install -e '.[dev]'")
    rankings, judgments = made_up_rankings(seed)

    def means(rankings, *measures):
        rows = pytrec_eval.RelevanceEvaluator(judgments, {*measures}).evaluate(rankings).values()
        return {name: np.mean([row[name] for row in rows]) for name in next(iter(rows))}

    expected = means(rankings, "ndcg_cut.10", "recall.10,100", "success.1,10")
    # trec_eval compares scores as float32, and sorts equal scores by descending id.
    first10 = {
        query: dict(sorted(row.items(), key=lambda item: (np.float32(item[1]), item[0]))[-10:])
        for query, row in rankings.items()
    }
    expected["recip_rank"] = means(first10, "recip_rank")["recip_rank"]
    names = {"ndcg_cut_10": "ndcg_at_10", "recip_rank": "mrr_at_10"}
    names |= {"success_1": "accuracy_at_1", "success_10": "accuracy_at_10"}
    names |= {"recall_10": "recall_at_10", "recall_100": "recall_at_100"}
    expected = {names[name]: value for name, value in expected.items()}
    assert expected["ndcg_at_10"] > 0.01
    assert retrieval_scores(rankings, judgments) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("count", [1, 7, 40])
def test_nearest_in_blocks_equals_a_full_sort_with_ties_by_lowest_index(count, monkeypatch):
    shapes, merge = [], search._merge
    monkeypatch.setattr(search, "_QUERIES", 8)
    monkeypatch.setattr(search, "_DOCUMENTS", 16)
    monkeypatch.setattr(search, "_merge", lambda *args: shapes.append((len(args[2]), len(args[3]))) or merge(*args))
    rng = np.random.default_rng(0)
    # Products of small integers are exact, and many are equal.
    queries, documents = (rng.integers(-2, 3, (rows, 4)).astype(np.float32) for rows in (21, 37))
    scores, indices = nearest(queries, documents, count)
    order = np.argsort(-(queries @ documents.T), axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(scores, np.take_along_axis(queries @ documents.T, order, axis=1))
    assert shapes == [(rows, columns) for rows in (8, 8, 5) for columns in (16, 16, 5)]
    assert nearest(queries[:0], documents, count)[0].shape == (0, min(count, 37))


def test_bm25_retrieves_documents_that_share_a_word(monkeypatch):
    pytest.importorskip("bm25s", reason="needs bm25s: pip install -e '.[retrieval]'")
    documents = {"d1": "cats and dogs", "d2": "a cat sat", "d3": "birds", "empty": ""}
    queries = {"q1": "the cat", "q2": "zebra", "q3": "birds", "q4": "birds and a cat"}
    rankings = bm25(documents, queries, 2)
    assert [[*row] for row in rankings.values()] == [["d2"], [], ["d3"], ["d3", "d2"]]
    assert [*bm25(documents, queries, 1)["q4"]] == ["d3"]
    # Stop words only.
    assert bm25({"d1": "the", "d2": ""}, queries, 2) == {query: {} for query in queries}
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(UsageError, match=r"bm25s is not installed; pip install 'bertjax\[retrieval\]'"):
        bm25(documents, queries, 2)
