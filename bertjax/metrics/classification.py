"""GLUE's metrics. They are computed over the entire evaluation set, not averaged over batches."""

import numpy as np


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the fraction of positions at which two integer arrays [N] are equal."""
    return float(np.mean(predictions == labels))


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the F1 score of class 1, or 0 if class 1 is neither predicted nor a label."""
    true_positives = np.sum((predictions == 1) & (labels == 1))
    total = np.sum(predictions == 1) + np.sum(labels == 1)
    return float(2 * true_positives / total) if total else 0.0


def macro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the mean F1 over the classes that occur in predictions or labels.

    The result equals scikit-learn's `f1_score(average="macro")`.
    """
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


def multilabel_scores(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns micro F1, macro F1 and subset accuracy of 0/1 arrays [N, K], as scikit-learn defines them.

    A label that occurs in neither predictions nor labels has an F1 of 0, which is included in the macro average. Subset
    accuracy is the fraction of rows whose K labels are all correct.
    """
    true_positives = (predictions & labels).sum(axis=0)
    totals = predictions.sum(axis=0) + labels.sum(axis=0)
    f1_per_label = np.divide(2 * true_positives, totals, out=np.zeros(len(totals)), where=totals > 0)
    return {
        "micro_f1": float(2 * true_positives.sum() / totals.sum()) if totals.sum() else 0.0,
        "macro_f1": float(f1_per_label.mean()),
        "subset_accuracy": float((predictions == labels).all(axis=1).mean()),
    }


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the Pearson correlation, or 0 if predictions or labels are constant."""
    from scipy.stats import pearsonr

    return float(pearsonr(predictions, labels).statistic) if _vary(predictions, labels) else 0.0


def spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the Spearman rank correlation, or 0 if predictions or labels are constant."""
    from scipy.stats import spearmanr

    return float(spearmanr(predictions, labels).statistic) if _vary(predictions, labels) else 0.0


def _vary(*arrays: np.ndarray) -> bool:
    return all(np.ptp(array) > 0 for array in arrays)
