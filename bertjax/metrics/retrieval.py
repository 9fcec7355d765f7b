"""Retrieval metrics as in trec_eval, and the BM25 baseline."""

import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np

from bertjax.data.finetuning.retrieval import Judgments
from bertjax.errors import UsageError
from bertjax.utils.terminal import progress_bar

# Scores of the retrieved documents, keyed by query id and document id.
Rankings = Mapping[str, Mapping[str, float]]
_DEPTH = 100


def retrieval_scores(rankings: Rankings, judgments: Judgments) -> dict[str, float]:
    """Returns metrics as in trec_eval, averaged over the queries that have a ranking and judgments.

    Documents with equal float32 scores are ordered by id, descending. Documents with grade 1 or more are relevant.
    Recall and the ideal ranking also count relevant documents that the corpus lacks.
    """
    rows = [_query_scores(rankings[query], grades) for query, grades in judgments.items() if query in rankings]
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def _query_scores(ranking: Mapping[str, float], grades: Mapping[str, int]) -> dict[str, float]:
    order = sorted(ranking, key=lambda document: (np.float32(ranking[document]), document), reverse=True)
    gains = [max(0, grades.get(document, 0)) for document in order[:_DEPTH]]
    ideal = sorted((grade for grade in grades.values() if grade > 0), reverse=True)
    num_relevant = max(1, len(ideal))
    return {
        "accuracy_at_1": float(any(gains[:1])),
        "accuracy_at_10": float(any(gains[:10])),
        "ndcg_at_10": _discounted(gains[:10]) / (_discounted(ideal[:10]) or 1),
        "mrr_at_10": next((1 / rank for rank, gain in enumerate(gains[:10], 1) if gain), 0.0),
        "recall_at_10": np.count_nonzero(gains[:10]) / num_relevant,
        "recall_at_100": np.count_nonzero(gains) / num_relevant,
    }


def _discounted(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, 1))


def bm25(documents: Mapping[str, str], queries: Mapping[str, str], count: int) -> Rankings:
    """Ranks at most `count` documents per query by BM25. `documents` and `queries` map ids to texts.

    A ranking lists only documents that share a word with the query. BM25 uses the defaults of bm25s: Lucene's formula
    with k1 = 1.5 and b = 0.75, English stop words, no stemming.
    """
    try:
        import bm25s
    except ImportError as error:
        raise UsageError("bm25s is not installed; pip install 'bertjax[retrieval]'") from error
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # bm25s logs debug messages.
    ids, rankings = list(documents), {}
    words = bm25s.tokenize(list(documents.values()), return_ids=False, show_progress=False)
    if not any(words):
        return {query: {} for query in queries}
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    with progress_bar("BM25", len(queries), " queries", after_seconds=2) as bar:
        for query, text in queries.items():
            words = bm25s.tokenize([text], return_ids=False, show_progress=False)
            (indices,), (scores,) = index.retrieve(words, k=min(count, len(ids)), show_progress=False)
            rankings[query] = {ids[i]: float(score) for i, score in zip(indices, scores, strict=True) if score > 0}
            bar.update()
    return rankings
