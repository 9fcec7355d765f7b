"""Evaluation of text embedders: correlation with scores, ranks of positives, and retrieval.

Methods of an evaluation set: `score` computes metrics from vectors, and `baseline` computes metrics without a model.
`records` returns prediction records, and `hash_content` a JSON value that identifies the data. All sets share a list of
N texts, and contain indices into this list. `vectors`, float32 [N, D], are the unit vectors of these texts.
"""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bertjax.data.finetuning.labeled_text import Target
from bertjax.data.finetuning.retrieval import Judgments, read_retrieval
from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.finetuning.text_columns import read_pairs, split_positives, text_cell
from bertjax.errors import UsageError
from bertjax.metrics.classification import scores
from bertjax.metrics.nearest import nearest
from bertjax.metrics.retrieval import Rankings, bm25, retrieval_scores
from bertjax.tasks.embedding.config import EmbedData
from bertjax.tasks.finetuning.config import NO_SPLIT

logger = logging.getLogger(__name__)

PAIR_METRICS = ("accuracy_at_1", "accuracy_at_10")
RETRIEVAL_METRICS = ("ndcg_at_10", "mrr_at_10", "recall_at_10", "recall_at_100")
# Number of ranked documents per query for the metrics, and for the prediction records.
_DEPTH, _NEIGHBORS = 100, 5

# Index of each distinct text. Keys are the text, and whether it is a query or anchor (None: part of a scored pair).
EvalTexts = dict[tuple[str, bool | None], int]


@dataclasses.dataclass(frozen=True, eq=False)
class ScoredPairs:
    """Pairs of texts with scores, evaluated by the correlation between scores and cosines."""

    metrics: ClassVar = ("spearman", "pearson")
    records_file: ClassVar = "cosines.jsonl"

    name: str  # file of the pairs
    pairs: np.ndarray  # indices of the two texts of each pair, int64 [P, 2]
    labels: np.ndarray  # scores, float32 [P]

    def cosines(self, vectors: np.ndarray) -> np.ndarray:
        """Returns the cosine of each pair, float32 [P]."""
        return np.sum(np.prod(vectors[self.pairs], axis=1), axis=-1)

    def score(self, vectors: np.ndarray) -> dict[str, float]:
        return scores(self.metrics, self.cosines(vectors), self.labels)

    def baseline(self, texts: Sequence[str]) -> dict[str, float]:
        """Returns the metrics of scoring each pair by the fraction of words that its texts share (Jaccard index)."""
        words = [{*text.lower().split()} for text in texts]
        shared = [len(words[a] & words[b]) / max(1, len(words[a] | words[b])) for a, b in self.pairs]
        return scores(self.metrics, np.array(shared), self.labels)

    def records(self, vectors: np.ndarray, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
        for (first, second), label, cosine in zip(self.pairs, self.labels, self.cosines(vectors), strict=True):
            pair = {"text": texts[first], "second_text": texts[second]}
            yield {**pair, "score": float(label), "cosine": float(cosine)}

    @property
    def hash_content(self) -> Any:
        return [self.pairs.tolist(), self.labels.tolist()]


@dataclasses.dataclass(frozen=True, eq=False)
class RankedDocuments:
    """Queries and documents from pairs or a retrieval folder, evaluated by ranking the documents for each query."""

    name: str  # file of the pairs, or folder of the retrieval data
    metrics: tuple[str, ...]  # metrics of `retrieval_scores` to report; the first one selects the best checkpoint
    records_file: str  # name of the file for `records`
    # `queries`, `documents`: index of each text, keyed by query id or document id.
    queries: Mapping[str, int]
    documents: Mapping[str, int]
    judgments: Judgments  # relevance grade of each judged document, keyed by query id and document id
    # Ids of queries that are also documents. A query's own document is left out of its ranking (see `RetrievalData`).
    copies: frozenset[str] = frozenset()

    def _rank(self, vectors: np.ndarray, count: int) -> Rankings:
        """Returns the cosines of each query's `count` nearest documents, keyed by query id and document id."""
        ids, queries, documents = [*self.documents], [*self.queries.values()], [*self.documents.values()]
        rows = zip(self.queries, *nearest(vectors[queries], vectors[documents], count + bool(self.copies)), strict=True)
        rankings = {
            query: {ids[index]: float(cosine) for cosine, index in zip(cosines, indices, strict=True)}
            for query, cosines, indices in rows
        }
        return self._without_copies(rankings, count)

    def _without_copies(self, rankings: Rankings, count: int) -> Rankings:
        """Returns the first `count` documents of each query. Omits the document that is a copy of the query."""
        return {
            query: dict([item for item in ranking.items() if item[0] != query or query not in self.copies][:count])
            for query, ranking in rankings.items()
        }

    def _scores(self, rankings: Rankings) -> dict[str, float]:
        values = retrieval_scores(rankings, self.judgments)
        return {name: values[name] for name in self.metrics}

    def score(self, vectors: np.ndarray) -> dict[str, float]:
        return self._scores(self._rank(vectors, _DEPTH))

    def baseline(self, texts: Sequence[str]) -> dict[str, float]:
        """Returns the metrics of ranking by BM25. If bm25s is missing, logs how to install it and returns {}."""
        documents, queries = (
            {key: texts[index] for key, index in indices.items()} for indices in (self.documents, self.queries)
        )
        try:
            return self._scores(self._without_copies(bm25(documents, queries, _DEPTH + bool(self.copies)), _DEPTH))
        except UsageError as error:
            logger.warning(f"no BM25 baseline: {error}")
            return {}

    def records(self, vectors: np.ndarray, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
        for query, cosines in self._rank(vectors, _NEIGHBORS).items():
            grades = self.judgments[query]
            neighbors = [
                {"id": key, "cosine": cosine, "grade": grades.get(key, 0), "text": texts[self.documents[key]]}
                for key, cosine in cosines.items()
            ]
            yield {"text": texts[self.queries[query]], "nearest": neighbors}

    @property
    def hash_content(self) -> Any:
        indices = [[*self.queries.values()], [*self.documents.values()]]
        return [*indices, [*self.judgments.values()], [*self.documents]]


EvalSet = ScoredPairs | RankedDocuments


def read_eval_sets(data: EmbedData, read_stats: list[ReadStats], notes: list[str]) -> tuple[list[EvalSet], EvalTexts]:
    """Reads the dev or test file and the retrieval folder. Returns the evaluation sets and their texts.

    Appends the row counts of the file to `read_stats`, and the row counts of the retrieval folder to `notes`.
    """
    sets: list[EvalSet] = []
    texts: EvalTexts = {}
    if data.eval_split == NO_SPLIT:
        return sets, texts
    if file := getattr(data, f"{data.eval_split}_file"):
        read = _read_scored if data.has_columns(file, data.scored_columns) else _read_pairs
        sets.append(read(data, file, texts, read_stats))
    if not data.retrieval:
        return sets, texts
    has_split = (Path(data.retrieval).expanduser() / "qrels" / f"{data.eval_split}.tsv").exists()
    split = data.retrieval_split or (data.eval_split if has_split else "test")
    retrieval = read_retrieval(data.retrieval, split)
    ranked = RankedDocuments(
        data.retrieval,
        RETRIEVAL_METRICS,
        "retrieval.jsonl",
        {key: _index(texts, text, True) for key, text in retrieval.queries.items()},
        {key: _index(texts, text, False) for key, text in retrieval.documents.items()},
        retrieval.judgments,
        retrieval.copies,
    )
    notes += retrieval.notes
    return [*sets, ranked], texts


def _index(texts: EvalTexts, text: str, is_query: bool | None) -> int:
    """Adds a text if it is new. Returns its index."""
    return texts.setdefault((text, is_query), len(texts))


def _read_scored(data: EmbedData, file: str, texts: EvalTexts, read_stats: list[ReadStats]) -> ScoredPairs:
    first, second, label = data.scored_columns
    rows, stats = data.read_rows(file, data.scored_columns)
    read_stats.append(stats)
    target, pairs, labels = Target(label, ()), [], []
    for row in rows:
        score = target.read(row, stats)
        if score is None:
            stats.skip("with an empty label", row.line)
            continue
        pair = text_cell(row, first, stats), text_cell(row, second, stats)
        if not all(map(str.strip, pair)):
            stats.count_irregular("with an empty text", row.line)
        pairs.append([_index(texts, text, None) for text in pair])
        labels.append(score)
    stats.used = len(pairs)
    if not pairs:
        raise UsageError(f"{stats.file} has no rows with a score; use a file with numbers in {label!r}")
    return ScoredPairs(stats.file, np.array(pairs), np.array(labels, np.float32))


def _read_pairs(data: EmbedData, file: str, texts: EvalTexts, read_stats: list[ReadStats]) -> RankedDocuments:
    rows, stats = data.read_rows(file, data.columns[:2])
    read_stats.append(stats)
    if len(data.columns) > 2:
        rows = split_positives(rows, data.columns[1], stats)
    positives = {
        _index(texts, anchor, True): [_index(texts, text, False) for text in positive_texts]
        for anchor, positive_texts in read_pairs(rows, data.columns[:2], stats).items()
    }
    queries = {str(anchor): anchor for anchor in positives}
    documents = {str(index): index for indices in positives.values() for index in indices}
    judgments = {str(anchor): dict.fromkeys(map(str, indices), 1) for anchor, indices in positives.items()}
    return RankedDocuments(stats.file, PAIR_METRICS, "pairs.jsonl", queries, documents, judgments)
