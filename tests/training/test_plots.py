"""Plot of a run's training and evaluation curves."""

import pytest
from etils import epath
from matplotlib.figure import Figure

from bertjax.training.plots import plot_curves

PRETRAINING = [
    {
        "step": 1,
        "tokens": 10,
        "loss": 9.0,
        "mlm_loss": 8.0,
        "mlm_accuracy": 0.1,
        "learning_rate": 0.1,
        "token_fraction": 0.9,
    },
    {"step": 1, "tokens": 10, "eval_loss": 9.5, "eval_mlm_loss": 8.5, "eval_mlm_accuracy": 0.1, "eval_perplexity": 4.0},
]
TAGGING = [
    {"step": 1, "tokens": 10, "loss": 0.5, "word_accuracy": 0.9, "learning_rate": 0.1},
    {"step": 1, "tokens": 10, "eval_loss": 0.6, "eval_f1": 63.0, "eval_precision": 60.0, "eval_f1_PER": 70.0},
]


@pytest.mark.parametrize(
    ("lines", "best_metric", "labels"),
    [
        (
            PRETRAINING,
            "",
            [
                ["loss, training", "loss, held out", "mlm_loss, training", "mlm_loss, held out"],
                ["mlm_accuracy, training", "mlm_accuracy, held out"],
            ],
        ),
        (TAGGING, "f1", [["loss, training", "loss, held out"], ["f1, held out"]]),
        ([{"step": 0, "tokens": 0}], "", [[], []]),
        # A damaged line of `metrics.jsonl`.
        ([{"step": 1, "tokenr": 10, "loss": 0.5}], "", [[], []]),
    ],
    ids=["pre-training", "task with a selection metric", "no metrics", "damaged line"],
)
def test_curves_show_losses_and_the_selection_metric(lines, best_metric, labels, tmp_path, monkeypatch):
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kwargs: (figures.append(self), save(self, *args, **kwargs))
    )
    plot_curves(lines, epath.Path(tmp_path / "curves.png"), best_metric)
    assert [[line.get_label() for line in axes.lines] for axes in figures[0].axes] == labels
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
