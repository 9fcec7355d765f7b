"""The paper's pre-training: masked language model and next-sentence prediction (section 3.1)."""

import math
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from bertjax.corpus.store import Corpus, open_corpus
from bertjax.corpus.vocabulary_files import vocabulary_files
from bertjax.data.pretraining.settings import Masking, Phase
from bertjax.data.share import WHOLE, Share
from bertjax.errors import UsageError
from bertjax.fields import check_pretraining, model_config, phases
from bertjax.model.config import ModelConfig
from bertjax.model.flops import flops_per_token
from bertjax.model.heads import PretrainingModel
from bertjax.tasks.task import Batch, NumpyBatch, Objective, Outputs, Schedule, Sums, Task, Work

METRICS = ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")
LOSSES = ("mlm_loss", "nsp_loss")
# Of the released uncased models; taken where a config names no corpus, to describe or time a model.
_DEFAULT_VOCAB_SIZE = 30522

check = check_pretraining


def has_data(config: ConfigDict) -> bool:
    """Whether a config names a corpus."""
    return bool(config.data.corpus)


def build(config: ConfigDict, train: bool = True) -> Task:
    """The task of a config, on its corpus; without one, a task that has synthetic batches only.

    Args:
      train: whether it is to be trained, which needs a corpus.

    Raises:
      UsageError: no corpus or no such corpus, or it does not fit the config.
    """
    corpus = open_corpus(config.data.corpus) if config.data.corpus else None
    if train:
        # Before a workdir is made: one with another corpus in its config would refuse the right command.
        _needed(corpus)
    vocabulary = corpus.vocabulary() if corpus else None
    size = vocabulary.size if vocabulary else config.model.vocab_size or _DEFAULT_VOCAB_SIZE
    model = model_config(config, size)
    return Task(
        objective=objective(model),
        schedule=Schedule(
            steps=config.steps,
            warmup_steps=config.optimizer.warmup_steps,
            eval_every=config.eval_every,
            checkpoint_every=config.checkpoint_every,
            eval_first=True,
        ),
        batch_sizes=tuple(phase.batch_size for phase in phases(config)),
        train_batches=partial(_train_batches, config, corpus),
        eval_batches=partial(_eval_batches, config, corpus),
        eval_steps=-(-config.data.eval_rows // phases(config)[0].batch_size),
        work=partial(_work, phases(config), model),
        synthetic_batch=partial(synthetic_batch, phases(config)[0], model),
        score=lambda means, outputs: _with_perplexity(means),
        baseline=partial(_baseline, config, corpus),
        check_data=partial(_check_data, config, corpus),
        notes=tuple(_note(phase, model) for phase in phases(config)),
        files=vocabulary_files(vocabulary) if vocabulary else {},
        data_hash=corpus.fingerprint if corpus else "",
    )


def objective(model: ModelConfig) -> Objective:
    """Masked LM and next sentence, the loss being the sum of both means (section A.2 of the paper)."""
    return Objective(
        model=PretrainingModel(model),
        metrics=METRICS,
        losses=LOSSES,
        denominators=denominators,
        compute=compute,
        abstract_row=abstract_row,
    )


def _needed(corpus: Corpus | None) -> Corpus:
    if corpus is None:
        raise UsageError(
            "no corpus: give one with --config FILE:corpus=DIR or --config.data.corpus=DIR; "
            "`bertjax prepare --input docs: --output DIR` makes one"
        )
    return corpus


def _baseline(config: ConfigDict, corpus: Corpus | None) -> dict[str, float]:
    from bertjax.data.pretraining.baseline import context_free_baseline

    # It counts the tokens of the whole corpus.
    _needed(corpus).verification.verify_all()
    return context_free_baseline(_needed(corpus), _eval_batches(config, corpus, WHOLE))


def _train_batches(config: ConfigDict, corpus: Corpus | None, start_step: int, share: Share) -> Iterator[NumpyBatch]:
    # Imported here, so that models are described and timed where TensorFlow is not installed.
    from bertjax.data.pretraining.batches import train_dataset
    from bertjax.data.pretraining.verified import watched

    for phase in phases(config):
        if start_step < phase.stop_step:
            first = max(start_step, phase.start_step)
            dataset = train_dataset(
                _needed(corpus),
                phase,
                objective=config.data.objective,
                masking=Masking(**config.data.masking),
                seed=config.seed,
                pair_passes=config.data.pair_passes,
                start_step=first,
                share=share,
            )
            yield from watched(dataset, corpus, lambda made, first=first: _check_data(config, corpus, first + made))


def _check_data(config: ConfigDict, corpus: Corpus | None, steps: int | None) -> None:
    corpus = _needed(corpus)
    corpus.verification.check()
    if steps is not None:
        from bertjax.data.pretraining.verified import verify_evaluation, verify_training

        verify_evaluation(corpus, phases(config)[0].seq_len, config.data.objective)
        verify_training(
            corpus,
            phases(config),
            steps,
            objective=config.data.objective,
            seed=config.seed,
            pair_passes=config.data.pair_passes,
        )


def _eval_batches(config: ConfigDict, corpus: Corpus | None, share: Share) -> Iterator[NumpyBatch]:
    from bertjax.data.pretraining.batches import eval_dataset
    from bertjax.data.pretraining.verified import verify_evaluation, watched

    phase = phases(config)[0]
    dataset = eval_dataset(
        _needed(corpus),
        seq_len=phase.seq_len,
        batch_size=phase.batch_size,
        max_predictions=phase.max_predictions,
        objective=config.data.objective,
        masking=Masking(**config.data.masking),
        max_rows=config.data.eval_rows or None,
        share=share,
    )
    return watched(dataset, corpus, lambda made: verify_evaluation(corpus, phase.seq_len, config.data.objective))


def denominators(batch: Batch) -> dict[str, jax.Array]:
    """Weights of both losses; the masked-LM one has google-research/bert's 1e-5 added (`run_pretraining.py`)."""
    labelled = jnp.sum(batch["next_sentence_labels"] >= 0).astype(jnp.float32)
    return {
        "mlm_loss": jnp.sum(batch["masked_lm_weights"]) + 1e-5,
        "nsp_loss": jnp.maximum(labelled, 1.0),
    }


def compute(model: PretrainingModel, params: dict, batch: Batch, dropout_key: jax.Array | None) -> tuple[Sums, Outputs]:
    """Sum and weight of masked-LM and next-sentence loss and accuracy. Rows labelled -1 have no next sentence."""
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    masked_lm_logits, next_sentence_logits = model.apply(
        {"params": params}, batch, deterministic=dropout_key is None, rngs=rngs
    )
    mlm = _loss_and_accuracy(masked_lm_logits, batch["masked_lm_ids"], batch["masked_lm_weights"])
    labels = batch["next_sentence_labels"]
    nsp = _loss_and_accuracy(next_sentence_logits, jnp.maximum(labels, 0), (labels >= 0).astype(jnp.float32))
    return dict(zip(METRICS, (*mlm, *nsp), strict=True)), {}


def _loss_and_accuracy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., C] float32 logits, [...] labels and weights to two [2] pairs of sum and weight."""
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    correct = jnp.argmax(logits, axis=-1) == labels
    weight = jnp.sum(weights)
    return jnp.stack([jnp.sum(losses * weights), weight]), jnp.stack([jnp.sum(correct * weights), weight])


def _with_perplexity(means: dict[str, float]) -> dict[str, float]:
    # Beyond e^700 a float64 overflows.
    return {**means, "perplexity": math.exp(min(means["mlm_loss"], 700.0))} if "mlm_loss" in means else means


def _note(phase: Phase, model: ModelConfig) -> str:
    batch = phase.batch_size * phase.seq_len
    flops = flops_per_token(model, phase.seq_len, phase.max_predictions)
    return (
        f"steps {phase.start_step:,} to {phase.stop_step:,}: {phase.batch_size:,} rows of {phase.seq_len} = {batch:,} "
        f"tokens a batch, {phase.max_predictions} predictions a row, {flops / 1e6:,.1f} MFLOPs a token, "
        f"{(phase.stop_step - phase.start_step) * batch:,} tokens"
    )


def _work(phases_: tuple[Phase, ...], model: ModelConfig, step: int) -> Work:
    rows = tokens = 0
    flops = 0.0
    for phase in phases_:
        done = max(0, min(step, phase.stop_step) - phase.start_step) * phase.batch_size
        rows += done
        tokens += done * phase.seq_len
        flops += done * phase.seq_len * flops_per_token(model, phase.seq_len, phase.max_predictions)
    return Work(rows, tokens, flops)


def abstract_row() -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the smallest batch the model takes."""
    return abstract_batch(Phase(seq_len=8, batch_size=1, max_predictions=1, start_step=0, stop_step=1))


def abstract_batch(phase: Phase) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one global batch."""
    rows, length, predictions = phase.batch_size, phase.seq_len, phase.max_predictions
    row, masked = (rows, length), (rows, predictions)
    integers = {
        "input_ids": row,
        "input_mask": row,
        "segment_ids": row,
        "masked_lm_positions": masked,
        "masked_lm_ids": masked,
        "next_sentence_labels": (rows,),
    }
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in integers.items()}
    return shapes | {"masked_lm_weights": jax.ShapeDtypeStruct(masked, jnp.float32)}


def synthetic_batch(phase: Phase, model: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Full rows of random tokens, all predictions used: the most work a batch of this shape can be."""
    rng = np.random.default_rng(seed)
    rows, length, predictions = phase.batch_size, phase.seq_len, phase.max_predictions
    boundary = rng.integers(1, length, (rows, 1))
    order = rng.permuted(np.tile(np.arange(1, length), (rows, 1)), axis=1)[:, :predictions]
    return {
        "input_ids": rng.integers(0, model.vocab_size, (rows, length), np.int32),
        "input_mask": np.ones((rows, length), np.int32),
        "segment_ids": (np.arange(length) >= boundary).astype(np.int32),
        "masked_lm_positions": np.sort(order, axis=1).astype(np.int32),
        "masked_lm_ids": rng.integers(0, model.vocab_size, (rows, predictions), np.int32),
        "masked_lm_weights": np.ones((rows, predictions), np.float32),
        "next_sentence_labels": rng.integers(0, 2, rows, np.int32),
    }
