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


def matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Matthews correlation of any number of classes; 0 where one side has a single class."""
    classes = int(max(predictions.max(), labels.max())) + 1
    confusion = np.zeros((classes, classes))
    np.add.at(confusion, (labels, predictions), 1)
    of_labels, of_predictions, total = confusion.sum(1), confusion.sum(0), confusion.sum()
    covariance = np.trace(confusion) * total - of_labels @ of_predictions
    spread = (total**2 - of_labels @ of_labels) * (total**2 - of_predictions @ of_predictions)
    return float(covariance / np.sqrt(spread)) if spread else 0.0


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
