"""Plots of training and evaluation curves and of confusion matrices."""

from types import SimpleNamespace

import numpy as np
import pytest
from etils import epath
from matplotlib.figure import Figure

from bertjax.metrics.metric import Metric
from bertjax.metrics.report import class_report
from bertjax.tasks.finetuning.tagging import TagObjective
from bertjax.tasks.objectives.masked_lm import MaskedLm
from bertjax.training.plots import plot_confusion, plot_curves

PRETRAINING = [
    {"step": 1, "tokens": 10, "loss": 9.0, "mlm_loss": 8.0, "mlm_accuracy": 0.1, "nsp_loss": 1.0, "nsp_accuracy": 0.5},
    {"step": 1, "tokens": 10, "eval_loss": 9.5, "eval_mlm_loss": 8.5, "eval_mlm_accuracy": 0.1, "eval_perplexity": 4.0},
]
TAGGING = [
    {"step": 1, "tokens": 10, "loss": 0.5, "word_accuracy": 0.9, "learning_rate": 0.1},
    {"step": 1, "tokens": 10, "eval_loss": 0.6, "eval_f1": 63.0, "eval_precision": 60.0, "eval_f1_PER": 70.0},
]


@pytest.fixture
def figures(monkeypatch):
    """Returns the list of saved figures."""
    saved, save = [], Figure.savefig

    def savefig(self, *args, **options):
        saved.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def labels(figure: Figure) -> list[tuple[str, list[str]]]:
    """Returns the title and the curves of each panel."""
    return [(axes.get_title(), [line.get_label() for line in axes.lines]) for axes in figure.axes]


BOTH = ["training", "held out"]


def test_each_pretraining_objective_and_other_corpus_has_its_own_axes(tmp_path, figures):
    damaged = {"step": 1, "tokenr": 10, "mlm_loss": 0.5}
    other = {"step": 1, "tokens": 10, "eval_general_mlm_loss": 2.0}
    path = epath.Path(tmp_path / "curves.png")
    task = SimpleNamespace(
        objective=MaskedLm, steps_per_epoch=0, other_tasks={"general": None}, phase_schedule=[(9, 1)]
    )
    plot_curves(task, [*PRETRAINING, damaged, other], path, {})
    assert labels(figures[0]) == [
        ("masked LM: loss", BOTH),
        ("next sentence: loss", ["training"]),
        ("masked LM: loss, general", ["held out"]),
        ("next sentence: loss, general", []),
        ("masked LM: accuracy", BOTH),
        ("next sentence: accuracy", ["training"]),
        ("masked LM: accuracy, general", []),
        ("next sentence: accuracy, general", []),
    ]
    assert all(len(line.get_xdata()) == 1 for axes in figures[0].axes for line in axes.lines)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("metric", "panel"),
    [(Metric("f1"), ("f1", ["held out", "baseline 50"])), (None, ("word accuracy", ["training"]))],
    ids=["selection metric", "without dev set"],
)
def test_finetuning_curves_show_epochs_and_the_baseline(metric, panel, tmp_path, figures):
    task = SimpleNamespace(objective=TagObjective, steps_per_epoch=4, best_metric=metric)
    plot_curves(task, TAGGING, epath.Path(tmp_path / "curves.png"), baseline={"f1": 50.0})
    assert labels(figures[0]) == [("loss", BOTH), panel]
    loss, _ = figures[0].axes
    assert loss.get_xlabel() == "epochs" and [line.get_xdata().tolist() for line in loss.lines] == [[0.25], [0.25]]
    assert [line.get_marker() for line in loss.lines] == ["None", "o"]


def test_confusion_plot_states_its_source_and_the_meaning_of_its_colors(tmp_path, figures):
    report = class_report(["a", "b$"], np.array([0, 1, 1]), np.array([0, 0, 1]))
    plot_confusion({"": report}, epath.Path(tmp_path / "confusion.png"), "text, dev.csv, accuracy 0.67")
    matrix, colors = figures[0].axes
    assert figures[0].get_suptitle() == "text, dev.csv, accuracy 0.67"
    assert (matrix.get_xlabel(), matrix.get_ylabel()) == ("predicted label", "true label")
    assert colors.get_ylabel() == "share of the true label's total"
    np.testing.assert_array_equal(matrix.images[0].get_array(), [[0.5, 0.5], [0, 1]])
