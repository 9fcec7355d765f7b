"""Evaluation of text embedders: correlation with scores, ranks of positives, and retrieval."""

import abc
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bertjax.data.finetuning.labeled_text import Target
from bertjax.data.finetuning.retrieval import read_retrieval
from bertjax.data.finetuning.tables import ReadStats
from bertjax.errors import UsageError
from bertjax.metrics.classification import scores
from bertjax.metrics.nearest import nearest
from bertjax.metrics.retrieval import Rankings, bm25, retrieval_scores
from bertjax.tasks.embedding.config import EmbedData
from bertjax.tasks.finetuning.config import NO_SPLIT

logger = logging.getLogger(__name__)

SCORE_METRICS = ("spearman", "pearson")
PAIR_METRICS = ("accuracy_at_1", "accuracy_at_10")
RETRIEVAL_METRICS = ("ndcg_at_10", "mrr_at_10", "recall_at_10", "recall_at_100")
# Documents to rank for the metrics, and neighbors in the records of a query.
_DEPTH, _NEIGHBORS = 100, 5


class EvalTexts:
    """Distinct texts to evaluate. `texts` contains each text, and whether it is an anchor or query."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, bool]] = []
        self._indices: dict[tuple[str, bool], int] = {}

    def __len__(self) -> int:
        return len(self.texts)

    def add(self, text: str, is_query: bool) -> int:
        """Adds a text if it is new. Returns its index."""
        index = self._indices.setdefault((text, is_query), len(self.texts))
        if index == len(self.texts):
            self.texts.append((text, is_query))
        return index


@dataclasses.dataclass(frozen=True, eq=False)
class EvalSet(abc.ABC):
    """Set of texts with something to compare their vectors with. Indices are those of `EvalTexts`.

    Attributes:
      name: file or folder of the set.
      metrics: names of the metrics; the first one selects the best checkpoint.
      records_file: name of the file for `records`.
    """

    name: str
    metrics: tuple[str, ...]
    records_file: str

    @abc.abstractmethod
    def score(self, vectors: np.ndarray) -> dict[str, float]:
        """Returns the metrics of the unit vectors of all texts, float32 [N, D]."""

    @abc.abstractmethod
    def baseline(self, texts: EvalTexts) -> dict[str, float]:
        """Returns the metrics of a baseline without vectors."""

    @abc.abstractmethod
    def records(self, vectors: np.ndarray, texts: EvalTexts) -> Iterator[dict[str, Any]]:
        """Yields a JSON object for each pair or query: texts, and cosines of unit vectors."""

    @property
    @abc.abstractmethod
    def answers(self) -> Any:
        """What the vectors are compared with, as a JSON value, to notice changes of the data."""


@dataclasses.dataclass(frozen=True, eq=False)
class ScoredPairs(EvalSet):
    """Pairs of texts with scores: their correlation with the cosines of the vectors.

    Attributes:
      pairs: indices of the two texts of each pair, int64 [N, 2].
      labels: scores, float32 [N].
    """

    pairs: np.ndarray
    labels: np.ndarray

    def cosines(self, vectors: np.ndarray) -> np.ndarray:
        """Returns the cosine of each pair, float32 [N]."""
        return np.sum(np.prod(vectors[self.pairs], axis=1), axis=-1)

    def score(self, vectors: np.ndarray) -> dict[str, float]:
        return scores(self.metrics, self.cosines(vectors), self.labels)

    def baseline(self, texts: EvalTexts) -> dict[str, float]:
        """Scores each pair by the share of words that the texts have in common (Jaccard index)."""
        words = [{*text.lower().split()} for text, _ in texts.texts]
        shared = [len(words[a] & words[b]) / max(1, len(words[a] | words[b])) for a, b in self.pairs]
        return scores(self.metrics, np.array(shared), self.labels)

    def records(self, vectors: np.ndarray, texts: EvalTexts) -> Iterator[dict[str, Any]]:
        for pair, label, cosine in zip(self.pairs, self.labels, self.cosines(vectors), strict=True):
            first, second = (texts.texts[index][0] for index in pair)
            yield {"text": first, "second_text": second, "score": float(label), "cosine": float(cosine)}

    @property
    def answers(self) -> Any:
        return [self.pairs.tolist(), self.labels.tolist()]


@dataclasses.dataclass(frozen=True, eq=False)
class RankedDocuments(EvalSet):
    """Queries and the documents among which each finds its own: pairs, or retrieval data with judgments.

    Attributes:
      queries, documents: indices of the texts.
      judgments: for each query, the grades of documents by their position in `documents`, or by an id that is not in
        the corpus.
      ids: ids of the documents, which order documents of equal similarity.
    """

    queries: Sequence[int]
    documents: Sequence[int]
    judgments: Sequence[Mapping[str, int]]
    ids: Sequence[str]

    def score(self, vectors: np.ndarray) -> dict[str, float]:
        found, indices = nearest(vectors[self.queries], vectors[self.documents], _DEPTH)
        rankings = {
            str(query): {self.ids[index]: float(score) for index, score in zip(*row, strict=True)}
            for query, row in enumerate(zip(indices, found, strict=True))
        }
        return self._scores(rankings)

    def _scores(self, rankings: Rankings) -> dict[str, float]:
        judgments = {str(query): grades for query, grades in enumerate(self.judgments)}
        values = retrieval_scores(rankings, judgments)
        return {name: values[name] for name in self.metrics}

    def baseline(self, texts: EvalTexts) -> dict[str, float]:
        """Ranks documents by BM25. Logs how to install bm25s and returns {} if it is missing."""
        documents = {key: texts.texts[index][0] for key, index in zip(self.ids, self.documents, strict=True)}
        queries = {str(query): texts.texts[index][0] for query, index in enumerate(self.queries)}
        try:
            return self._scores(bm25(documents, queries, _DEPTH))
        except UsageError as error:
            logger.warning(f"no BM25 baseline: {error}")
            return {}

    def records(self, vectors: np.ndarray, texts: EvalTexts) -> Iterator[dict[str, Any]]:
        found, indices = nearest(vectors[self.queries], vectors[self.documents], _NEIGHBORS)
        for query, grades, cosines, row in zip(self.queries, self.judgments, found, indices, strict=True):
            neighbors = [
                {"id": self.ids[index], "cosine": float(cosine), "grade": grades.get(self.ids[index], 0)}
                | {"text": texts.texts[self.documents[index]][0]}
                for index, cosine in zip(row, cosines, strict=True)
            ]
            yield {"text": texts.texts[query][0], "nearest": neighbors}

    @property
    def answers(self) -> Any:
        return [[*self.queries], [*self.documents], [*self.judgments], [*self.ids]]


def read_eval_sets(data: EmbedData, read_stats: list[ReadStats]) -> tuple[list[EvalSet], EvalTexts, list[str]]:
    """Reads the dev or test file and the retrieval folder. Appends row counts to `read_stats`.

    Returns the sets, their texts, and notes about the retrieval folder.
    """
    sets: list[EvalSet] = []
    texts, notes = EvalTexts(), []
    if data.eval_split == NO_SPLIT:
        return sets, texts, notes
    if file := getattr(data, f"{data.eval_split}_file"):
        read = _read_scored if data.has_columns(file, data.scored_columns) else _read_pairs
        sets.append(read(data, file, texts, read_stats))
    if data.retrieval:
        retrieval = read_retrieval(data.retrieval, data.retrieval_split)
        notes += retrieval.notes
        queries = [texts.add(text, True) for text in retrieval.queries.values()]
        documents = [texts.add(text, False) for text in retrieval.documents.values()]
        judgments, ids = [*retrieval.judgments.values()], [*retrieval.documents]
        kind = (data.retrieval, RETRIEVAL_METRICS, "retrieval.jsonl")
        sets.append(RankedDocuments(*kind, queries, documents, judgments, ids))
    return sets, texts, notes


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
        pairs.append((texts.add(row.fields[first], True), texts.add(row.fields[second], False)))
        labels.append(score)
    stats.used = len(pairs)
    if not pairs:
        raise UsageError(f"{stats.file} has no rows with a score; use a file with numbers in {label!r}")
    kind = (stats.file, SCORE_METRICS, "cosines.jsonl")
    return ScoredPairs(*kind, np.array(pairs), np.array(labels, np.float32))


def _read_pairs(data: EmbedData, file: str, texts: EvalTexts, read_stats: list[ReadStats]) -> RankedDocuments:
    columns = data.columns[:2]
    rows, stats = data.read_rows(file, columns)
    read_stats.append(stats)
    positives: dict[int, dict[int, None]] = {}
    for row in rows:
        anchor, positive = (row.fields[column] for column in columns)
        if not (isinstance(anchor, str) and isinstance(positive, str) and anchor.strip() and positive.strip()):
            stats.skip("with an empty text or a list", row.line)
            continue
        positives.setdefault(texts.add(anchor, True), {})[texts.add(positive, False)] = None
        stats.used += 1
    if not positives:
        raise UsageError(f"{stats.file} has no usable rows; use a file with nonempty {' and '.join(columns)}")
    documents = [*dict.fromkeys(document for own in positives.values() for document in own)]
    judgments = [{str(document): 1 for document in own} for own in positives.values()]
    ids = [*map(str, documents)]
    return RankedDocuments(stats.file, PAIR_METRICS, "pairs.jsonl", [*positives], documents, judgments, ids)
