"""Evaluation of text embedders: correlation with scores, ranks of positives, and retrieval."""

import dataclasses
import hashlib
from typing import ClassVar, Protocol

import numpy as np

from bertjax.data.finetuning.labeled_text import Target
from bertjax.data.finetuning.tables import ReadStats
from bertjax.errors import UsageError
from bertjax.metrics.classification import scores
from bertjax.tasks.embedding.config import EmbedData
from bertjax.tasks.finetuning.config import NO_SPLIT


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


class EvalSet(Protocol):
    """Set of texts with something to compare their vectors with. Indices are those of `EvalTexts`.

    Attributes:
      name: file or folder of the set.
      metrics: names of the metrics; the first one selects the best checkpoint.
    """

    metrics: ClassVar[tuple[str, ...]]

    @property
    def name(self) -> str: ...

    def score(self, vectors: np.ndarray) -> dict[str, float]:
        """Returns the metrics of the vectors of all texts, float32 [N, D]."""
        ...

    def baseline(self, texts: EvalTexts) -> dict[str, float]:
        """Returns the metrics of a baseline without vectors."""
        ...

    def fingerprint(self) -> str:
        """Returns a hash of the expected results."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class ScoredPairs:
    """Pairs of texts with scores: their correlation with the cosines of the vectors.

    Attributes:
      pairs: indices of the two texts of each pair, int64 [N, 2].
      labels: scores, float32 [N].
    """

    metrics: ClassVar[tuple[str, ...]] = ("spearman", "pearson")

    name: str
    pairs: np.ndarray
    labels: np.ndarray

    def cosines(self, vectors: np.ndarray) -> np.ndarray:
        """Returns the cosine of each pair, float64 [N]."""
        return np.sum(np.prod(unit(vectors)[self.pairs], axis=1), axis=-1)

    def score(self, vectors: np.ndarray) -> dict[str, float]:
        return scores(self.metrics, self.cosines(vectors), self.labels)

    def baseline(self, texts: EvalTexts) -> dict[str, float]:
        """Scores each pair by the share of words that the texts have in common (Jaccard index)."""
        words = [{*text.lower().split()} for text, _ in texts.texts]
        shared = [len(words[a] & words[b]) / max(1, len(words[a] | words[b])) for a, b in self.pairs]
        return scores(self.metrics, np.array(shared), self.labels)

    def fingerprint(self) -> str:
        return hashlib.sha256(self.pairs.tobytes() + self.labels.tobytes()).hexdigest()


def unit(vectors: np.ndarray) -> np.ndarray:
    """Scales vectors [N, D] to length 1, float64. Vectors of zeros stay zeros."""
    vectors = vectors.astype(np.float64)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def read_eval_sets(data: EmbedData, read_stats: list[ReadStats]) -> tuple[list[EvalSet], EvalTexts]:
    """Reads the dev or test file and the retrieval folder. Appends row counts to `read_stats`."""
    sets: list[EvalSet] = []
    texts = EvalTexts()
    file = "" if data.eval_split == NO_SPLIT else getattr(data, f"{data.eval_split}_file")
    if file:
        read = _read_scored if data.has_columns(file, data.scored_columns) else _read_positives
        sets.append(read(data, file, texts, read_stats))
    return sets, texts


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
    return ScoredPairs(stats.file, np.array(pairs), np.array(labels, np.float32))


def _read_positives(data: EmbedData, file: str, texts: EvalTexts, read_stats: list[ReadStats]) -> EvalSet:
    raise NotImplementedError
