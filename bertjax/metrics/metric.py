"""Description of a metric: its name, which values are better, and its panel in plots."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Metric:
    """Metric that training or evaluation reports."""

    name: str  # key in `metrics.jsonl` and in the results of an evaluation
    # Whether the metric is a part of the training loss. `Objective.loss_weights` contains its weight.
    is_loss: bool = False
    lower_is_better: bool = False  # whether lower values are better
    panel: str = ""  # title of the metric's panel in the pre-training curves (default: "", not plotted)

    def score(self, value: object) -> float | None:
        """Returns a metric value, negated if lower is better, for comparisons. Returns None if it is not a number."""
        if not isinstance(value, (int, float)) or value != value:
            return None
        return -float(value) if self.lower_is_better else float(value)


def loss_metric(name: str, panel: str = "") -> Metric:
    """Returns a metric that is a part of the training loss."""
    return Metric(name, is_loss=True, lower_is_better=True, panel=panel)


# Weighted sum of all losses.
TOTAL_LOSS = Metric("loss", lower_is_better=True)
