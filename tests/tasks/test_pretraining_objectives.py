"""Tests of sentence pairs without next-sentence prediction, and of the consistency of every pre-training objective."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.command_runs import load_task

from bertjax.data.corpus.prepare import prepare
from bertjax.data.schema import synthetic_batch
from bertjax.data.shard import SINGLE_SHARD
from bertjax.errors import UsageError
from bertjax.model.flops import flops_per_position
from bertjax.model.models import build_model, model_description
from bertjax.tasks.pretraining.config import OBJECTIVES
from bertjax.training.checkpoint_config import experiment_config
from bertjax.training.optimizer import bert_schedule, make_optimizer
from bertjax.training.sharding import make_mesh, put_batch
from bertjax.training.step import make_init_state, make_train_step

# Flags that select the model, for objectives that the default model does not support.
MODELS = dict.fromkeys(OBJECTIVES, ()) | {"lm": ("--config.model.attention_direction=left",)}


def experiment_of(corpus, objective):
    return f"pretrain.py:seq_len=16,objective={objective},corpus={corpus}"


@pytest.mark.ci
@pytest.mark.parametrize("packing", [False, True])
def test_pairs_objective_reads_nsp_batches_without_next_sentence_labels(packing, corpus):
    nsp_task, pairs_task = (
        load_task(experiment_of(corpus, objective), None, data__packing=packing) for objective in ("nsp", "pairs")
    )
    for read_batch in (
        lambda task: next(task.train_batches(3, SINGLE_SHARD)),
        lambda task: next(task.eval_batches(SINGLE_SHARD)),
    ):
        nsp_batch, pairs_batch = read_batch(nsp_task), read_batch(pairs_task)
        assert (nsp_batch.pop("next_sentence_labels") >= 0).any()
        assert (pairs_batch.pop("next_sentence_labels") == -1).all()
        np.testing.assert_equal(pairs_batch, nsp_batch)
    assert not [name for name in pairs_task.baseline() if "nsp" in name]


def test_pairs_that_are_all_not_next_are_a_warning(letters, corpus, tmp_path, log_lines):
    (tmp_path / "a.txt").write_text("".join(f"zu {number}\n\n" for number in range(40)))
    prepare([f"text:{tmp_path}/a.txt"], tmp_path / "corpus", vocabulary=letters, workers=1)
    for path, objective in ((corpus, "nsp"), (tmp_path / "corpus", "none")):
        load_task(experiment_of(path, objective), None)
        assert not [line for line in log_lines if "NotNext" in line]
    task, _ = (load_task(experiment_of(tmp_path / "corpus", objective), None) for objective in ("nsp", "pairs"))
    (warning, _) = [line for line in log_lines if "NotNext" in line]
    assert "with blank lines only between documents, or set --config.data.objective=none" in warning
    labels = next(task.train_batches(0, SINGLE_SHARD))["next_sentence_labels"]
    assert (labels == 1).all()


def test_masks_of_words_are_rejected_for_languages_without_spaces(letters, tmp_path):
    (tmp_path / "a.txt").write_text(f"{'abcdefghijklmnop' * 4}\nb\n\n" * 40)
    prepare([f"text:{tmp_path}/a.txt"], tmp_path / "corpus", vocabulary=letters, workers=1)
    experiment = experiment_of(tmp_path / "corpus", "nsp")
    load_task(experiment, None)
    for option in {"data__masking__whole_word": True}, {"data__masking__max_span": 3}:
        with pytest.raises(UsageError, match="have 32 tokens on average, as in languages without spaces"):
            load_task(experiment, None, **option)


def test_predictions_per_row_are_rounded_up_without_rounding_errors():
    configs = [experiment_config("pretrain:seq_len=100", [f"--config.data.masking.rate={r}"]) for r in (0.07, 0.071)]
    assert [config.resolved_phases[0].max_predictions for config in configs] == [7, 8]


def test_flops_include_all_predictions_of_a_packed_row(corpus):
    task = load_task(experiment_of(corpus, "nsp"), None, data__packing=True)
    (phase,), model = task.phases, task.objective.model.config
    predictions = task.synthetic_sizes()["predictions"]
    assert predictions > phase.max_predictions
    assert task.unfrozen_cost_before(1).flops == phase.batch_size * 16 * flops_per_position(model, 16, predictions)


def test_eval_rows_limits_the_rows_of_an_evaluation(corpus):
    task = load_task(experiment_of(corpus, "nsp"), None, data__eval_rows=3)
    assert sum(batch["input_mask"].any(axis=1).sum() for batch in task.eval_batches(SINGLE_SHARD)) == 3


def test_objectives_with_the_same_kind_of_model_have_the_same_metrics(corpus):
    # Conversion selects heads by the kind of the model, so the same head must predict the same thing.
    metrics = {}
    for objective, overrides in MODELS.items():
        made = load_task(experiment_of(corpus, objective), None, *overrides).objective
        # The next-sentence head also predicts the sentence order.
        names = tuple(metric.name.replace(objective, "nsp") for metric in made.metrics)
        assert metrics.setdefault((type(made.model), overrides), names) == names


@pytest.mark.parametrize(
    ("objective", "packing"), [*((name, False) for name in OBJECTIVES), ("pairs", True), ("none", True)]
)
def test_each_objective_has_consistent_batches_model_and_metric_names(objective, packing, corpus):
    task = load_task(experiment_of(corpus, objective), None, *MODELS[objective], data__packing=packing)
    real, synthetic = (
        next(task.train_batches(0, SINGLE_SHARD)),
        synthetic_batch(task.objective.schema, task.synthetic_sizes()),
    )
    assert {name: (rows.shape, rows.dtype) for name, rows in real.items()} == {
        name: (rows.shape, rows.dtype) for name, rows in synthetic.items()
    }
    # `bertjax.load` finds the model of a checkpoint by its kind.
    model = task.objective.model
    assert type(build_model(model_description(model), model.config)) is type(model)
    baseline = task.baseline()
    assert baseline.keys() - {"heldout_entropy"} <= {metric.name for metric in task.objective.metrics}
    assert baseline and all(np.isfinite(value) for value in baseline.values())
    assert all(metric.lower_is_better for metric in task.objective.metrics if metric.is_loss)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_only_untrained_modules_keep_their_parameters_in_a_step(objective, corpus):
    task = load_task(experiment_of(corpus, objective), None, *MODELS[objective])
    mesh = make_mesh(task.config.mesh)
    optimizer = make_optimizer(task.config.optimizer, task.objective.untrained_modules)
    state = make_init_state(task.objective, optimizer, mesh)(jax.random.key(0))
    before = jax.tree.map(np.array, state.params)
    batch = put_batch(next(task.train_batches(0, SINGLE_SHARD)), mesh)
    schedule = bert_schedule(0.1, 1, 10)
    for step in range(2):  # The learning rate of the first step is 0.
        state = make_train_step(task.objective, optimizer, mesh, 1)(state, batch, jax.random.key(step), schedule)
    unchanged = {
        name
        for name, params in before.items()
        if jax.tree.all(jax.tree.map(jnp.array_equal, params, state.params[name]))
    }
    assert unchanged == set(task.objective.untrained_modules)
