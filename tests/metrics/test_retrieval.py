"""Retrieval metrics beside trec_eval, exact search beside NumPy, BM25, and the accuracy of pairs."""

import sys

import numpy as np
import pytest

from bertjax.data.finetuning.retrieval import RetrievalData
from bertjax.errors import UsageError
from bertjax.metrics import nearest as search
from bertjax.metrics.nearest import nearest
from bertjax.metrics.retrieval import accuracy_at, bm25, evaluate_bm25, evaluate_retrieval, retrieval_scores


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

    expected = means(rankings, "ndcg_cut.10", "recall.10,100")
    # The ids of equal scores are ordered descending. Scores are float32 numbers.
    first10 = {
        query: dict(sorted(row.items(), key=lambda item: (np.float32(item[1]), item[0]))[-10:])
        for query, row in rankings.items()
    }
    expected["recip_rank"] = means(first10, "recip_rank")["recip_rank"]
    names = {"ndcg_cut_10": "ndcg_at_10", "recip_rank": "mrr_at_10"}
    names |= {"recall_10": "recall_at_10", "recall_100": "recall_at_100"}
    expected = {names[name]: value for name, value in expected.items()}
    assert min(expected.values()) > 0.01
    assert retrieval_scores(rankings, judgments) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("count", [1, 7, 40])
def test_nearest_equals_a_full_sort_with_ties_by_lowest_index(count, monkeypatch):
    monkeypatch.setattr(search, "_QUERIES", 8)
    monkeypatch.setattr(search, "_DOCUMENTS", 16)
    rng = np.random.default_rng(0)
    # Products of small integers are exact, and many are equal.
    queries, documents = (rng.integers(-2, 3, (rows, 4)).astype(np.float32) for rows in (21, 37))
    scores, indices = nearest(queries, documents, count)
    order = np.argsort(-(queries @ documents.T), axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(scores, np.take_along_axis(queries @ documents.T, order, axis=1))
    assert nearest(queries[:0], documents, count)[0].shape == (0, min(count, 37))


def test_search_holds_one_block_of_products(monkeypatch):
    shapes = []
    merge = search._merge
    monkeypatch.setattr(search, "_merge", lambda *args: shapes.append((len(args[2]), len(args[3]))) or merge(*args))
    nearest(np.ones((1500, 1), np.float32), np.ones((33000, 1), np.float32), 2)
    assert shapes == [(1024, 32768), (1024, 232), (476, 32768), (476, 232)]


def test_accuracy_counts_equal_texts_as_one_document():
    eye = np.eye(4, dtype=np.float32)
    # The second anchor is nearer to another positive than to its own.
    anchors, positives = eye[[0, 1, 2, 2]], eye[[0, 3, 2, 2]]
    assert accuracy_at(anchors, positives, ["a", "b", "c", "c"]) == {"accuracy_at_1": 0.75, "accuracy_at_10": 1.0}
    # Distinct texts with equal vectors: the first one in the order of texts ranks first.
    assert accuracy_at(anchors, positives, ["a", "b", "c", "d"], (1, 2))["accuracy_at_1"] == 0.5


DATA = RetrievalData(
    {"d1": "cats and dogs", "d2": "a cat sat", "d3": "birds", "empty": ""},
    {"q1": "the cat", "q2": "zebra", "q3": "birds"},
    {"q1": {"d2": 1}, "q2": {"d3": 1}, "q3": {"d3": 2, "d1": 1}},
)


def test_vectors_and_words_rank_the_documents_of_retrieval_data(monkeypatch, log_lines):
    queries, documents = np.eye(3, dtype=np.float32)[[0, 1, 2]], np.eye(3, dtype=np.float32)[[1, 0, 2, 1]]
    # The second query finds d1 and "empty" first; of the documents with equal scores, "empty" has the higher id.
    scores = evaluate_retrieval(DATA, queries, documents)
    assert scores["mrr_at_10"] == pytest.approx((1 + 1 / 3 + 1) / 3) and scores["recall_at_100"] == 1
    pytest.importorskip("bm25s", reason="needs bm25s: pip install -e '.[retrieval]'")
    rankings = bm25(DATA.documents, DATA.queries, 2)
    assert [list(row) for row in rankings.values()] == [["d2"], [], ["d3"]]
    assert evaluate_bm25(DATA)["bm25_mrr_at_10"] == pytest.approx(2 / 3)
    # Stop words only.
    assert bm25({"d1": "the", "d2": ""}, DATA.queries, 2) == {"q1": {}, "q2": {}, "q3": {}}
    monkeypatch.setitem(sys.modules, "bm25s", None)
    assert evaluate_bm25(DATA) == {}
    assert log_lines == ["no BM25 baseline: bm25s is not installed; pip install 'bertjax[retrieval]'"]
    with pytest.raises(UsageError, match="pip install"):
        bm25(DATA.documents, DATA.queries, 2)
