"""Metrics of classification and regression. They are computed over the entire evaluation set, not per batch."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bertjax.data.finetuning.examples import known_labels


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the fraction of positions at which two integer arrays [N] are equal."""
    return float(np.mean(predictions == labels))


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the F1 score of class 1, or 0 if class 1 is neither predicted nor a label.

    For 0/1 arrays [N, K], this is micro F1: it counts all K labels together.
    """
    true_positives = np.sum((predictions == 1) & (labels == 1))
    total = np.sum(predictions == 1) + np.sum(labels == 1)
    return float(2 * true_positives / total) if total else 0.0


def macro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the mean F1 over the classes that occur in predictions or labels, or over all K labels of [N, K] arrays.

    The result equals scikit-learn's `f1_score(average="macro")`.
    """
    if labels.ndim > 1:
        return float(np.mean([f1(*columns) for columns in zip(predictions.T, labels.T, strict=True)]))
    return float(np.mean([f1(predictions == c, labels == c) for c in np.union1d(predictions, labels)]))


def matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the multi-class Matthews correlation, or 0 if predictions or labels contain only one class."""
    classes = int(max(predictions.max(), labels.max())) + 1
    confusion = np.zeros((classes, classes))
    np.add.at(confusion, (labels, predictions), 1)
    label_counts, prediction_counts, total = confusion.sum(1), confusion.sum(0), confusion.sum()
    covariance = np.trace(confusion) * total - label_counts @ prediction_counts
    spread = (total**2 - label_counts @ label_counts) * (total**2 - prediction_counts @ prediction_counts)
    return float(covariance / np.sqrt(spread)) if spread else 0.0


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the mean cross-entropy in nats of logits [N, C] and integer labels [N]."""
    from scipy.special import logsumexp

    logits = logits.astype(np.float64)
    return float(np.mean(logsumexp(logits, axis=-1) - np.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]))


def subset_accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the fraction of rows in 0/1 arrays [N, K] whose K labels are all correct."""
    return float((predictions == labels).all(axis=1).mean())


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the Pearson correlation, or 0 if predictions or labels are constant."""
    from scipy.stats import pearsonr

    return float(pearsonr(predictions, labels).statistic) if _vary(predictions, labels) else 0.0


def spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the Spearman rank correlation, or 0 if predictions or labels are constant."""
    from scipy.stats import spearmanr

    return float(spearmanr(predictions, labels).statistic) if _vary(predictions, labels) else 0.0


def squared_error(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the mean squared error."""
    return float(np.mean((predictions.astype(np.float64) - labels) ** 2))


def _vary(*arrays: np.ndarray) -> bool:
    return all(np.ptp(array) > 0 for array in arrays)


METRICS: Mapping[str, Callable[[np.ndarray, np.ndarray], float]] = {
    **{"accuracy": accuracy, "f1": f1, "macro_f1": macro_f1, "matthews": matthews, "micro_f1": f1},
    **{"pearson": pearson, "spearman": spearman, "squared_error": squared_error, "subset_accuracy": subset_accuracy},
}

# Metric names for `--config text`, keyed by `data.kind`. The first one selects the best checkpoint.
METRICS_OF_KIND: Mapping[str, tuple[str, ...]] = {
    "classes": ("accuracy", "macro_f1", "matthews"),
    "number": ("pearson", "spearman"),
    "multilabel": ("micro_f1", "macro_f1", "subset_accuracy"),
}


def scores(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Computes the named `METRICS` on the rows with a known label. Returns {} if there are no such rows."""
    known = known_labels(labels)
    return {name: METRICS[name](predictions[known], labels[known]) for name in names} if known.any() else {}
