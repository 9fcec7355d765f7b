"""GLUE's metrics, over whole sets: never a mean of batch means."""

import numpy as np


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Share of equal entries; both [N] integers."""
    return float(np.mean(predictions == labels))


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """F1 of class 1 in two; 0 where class 1 is neither predicted nor there."""
    hits = np.sum((predictions == 1) & (labels == 1))
    total = np.sum(predictions == 1) + np.sum(labels == 1)
    return float(2 * hits / total) if total else 0.0


def macro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Mean F1 of the classes that are among the labels or predicted: as scikit-learn's `f1_score(average="macro")`.

    A class that neither has says nothing about the predictions, and does not count as one of F1 0.
    """
    return float(np.mean([f1(predictions == c, labels == c) for c in np.union1d(predictions, labels)]))


def matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Matthews correlation of any number of classes; 0 where one side has a single class."""
    classes = int(max(predictions.max(), labels.max())) + 1
    confusion = np.zeros((classes, classes))
    np.add.at(confusion, (labels, predictions), 1)
    of_labels, of_predictions, total = confusion.sum(1), confusion.sum(0), confusion.sum()
    covariance = np.trace(confusion) * total - of_labels @ of_predictions
    spread = (total**2 - of_labels @ of_labels) * (total**2 - of_predictions @ of_predictions)
    return float(covariance / np.sqrt(spread)) if spread else 0.0


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Mean cross-entropy in nats; logits [N, C], labels [N] integers."""
    from scipy.special import logsumexp

    logits = logits.astype(np.float64)
    return float(np.mean(logsumexp(logits, axis=-1) - np.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]))


def multilabel(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Micro and macro F1 and subset accuracy, as scikit-learn defines them; both [N, K] of 0 and 1.

    A label that is neither there nor predicted has F1 0, as in scikit-learn, which here counts all K; of subset
    accuracy a row is right with all its labels, and no other.
    """
    right, all_ = (predictions & labels).sum(axis=0), predictions.sum(axis=0) + labels.sum(axis=0)
    each = np.divide(2 * right, all_, out=np.zeros(len(right)), where=all_ > 0)
    return {
        "micro_f1": float(2 * right.sum() / all_.sum()) if all_.sum() else 0.0,
        "macro_f1": float(each.mean()),
        "subset_accuracy": float((predictions == labels).all(axis=1).mean()),
    }


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Linear correlation; 0 where one side is constant."""
    from scipy.stats import pearsonr

    return float(pearsonr(predictions, labels).statistic) if _vary(predictions, labels) else 0.0


def spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Rank correlation, ties ranked by their mean; 0 where one side is constant."""
    from scipy.stats import spearmanr

    return float(spearmanr(predictions, labels).statistic) if _vary(predictions, labels) else 0.0


def _vary(*arrays: np.ndarray) -> bool:
    return all(np.ptp(array) > 0 for array in arrays)
