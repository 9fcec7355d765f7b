"""The runs that tables are made of, at a scale, and the cells that they fill."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from bertjax.data.corpus.store import MANIFEST
from bertjax.model.config import LSTM, ModelConfig, size_fields
from bertjax.model.feature_head import CONCAT_LAST_FOUR, FeatureHead
from bertjax.model.flops import flops_per_token
from bertjax.reproduce.scales import FineTuning, Scale
from bertjax.reproduce.table import Cell, Run

LEFT_TO_RIGHT = ("--config.data.objective=lm", "--config.model.attention_direction=left")
LSTMS = ("--config.data.objective=lm", f"--config.model.encoder={LSTM}")
# On rows of BERT's own. From those of running text (`none`), which begin in the middle of sentences, a small model
# learns much more slowly: RESULTS.md.
WITHOUT_NSP = ("--config.data.objective=pairs",)
# Pre-trainings whose checkpoints along the way Figure 5 takes.
_TAKEN_ALONG = ("bert", "ltr")
# Of features, for which the paper gives none.
_FEATURES_RATE = "--config.optimizer.learning_rate=1e-3"

# What a task is measured by, unless a cell says otherwise, and the factor that makes percent of it.
_METRICS = {
    **dict.fromkeys(("mnli", "qnli", "sst2", "rte", "swag"), ("accuracy", 100.0)),
    **dict.fromkeys(("qqp", "mrpc"), ("f1", 100.0)),
    **dict.fromkeys(("squad", "squad2", "triviaqa", "ner"), ("f1", 1.0)),
    "cola": ("matthews", 100.0),
    "stsb": ("spearman", 100.0),
}


def measured(row: str, column: str, task: str, *runs: Run, metric: str = "") -> Cell:
    """The cell of fine-tunings on one task."""
    usual, factor = _METRICS[task]
    return Cell(row, column, runs, metric or usual, factor)


# For the notes of a table that has such a column.
OF_PERPLEXITY = "perplexity is of held-out text, in rows as long as those of the first phase of pre-training"


def perplexity(row: str, *runs: Run) -> Cell:
    """The cell of what pre-trainings come to on held-out text, in the column that Table 6 calls so."""
    return Cell(row, "LM perplexity", runs, "perplexity", 1.0)


def bert(scale: Scale, data: Mapping[str, Any], size: str = "", seed: int = 1) -> Run:
    """The pre-training of a BERT with nothing left out; BASE unless a size is named."""
    size = size or scale.base
    return pretraining(scale, data, "bert" if size == scale.base else size, size=size, seed=seed)


def pretraining(
    scale: Scale, data: Mapping[str, Any], name: str, *overrides: str, size: str = "", seed: int = 1
) -> Run:
    """A pre-training.

    Args:
      scale: of it.
      data: paths, by the names of the table's arguments.
      name: what it is called in all tables; `bert` and `ltr` keep checkpoints along the way.
      *overrides: of the config, besides the scale's.
      size: of the model; "" is BASE.
      seed: of everything.
    """
    size = size or scale.base
    kept = scale.kept if name in _TAKEN_ALONG else ()
    model = _model(scale, size, overrides)
    every = "--config.data.objective=lm" in overrides
    pairs = () if every else scale.of_pairs
    flops = sum(
        tokens * flops_per_token(model, length, length - 2 if every else round(0.15 * length))
        for tokens, length in scale.phases
    )
    return Run(
        name=f"pretrain/{name}-{seed}",
        config=f"{scale.pretraining},size={size},corpus={data['corpus'] or 'CORPUS'}",
        overrides=(f"--config.seed={seed}", *scale.overrides, *pairs, *kept, *overrides),
        flops=flops,
        lacks=_lacking_corpus(data["corpus"]),
    )


def _lacking_corpus(corpus: str) -> str:
    if not corpus:
        return "a corpus of `bertjax prepare`, given with corpus="
    manifest = epath.Path(os.path.expanduser(corpus)) / MANIFEST
    return "" if manifest.exists() else f"{manifest}, which is not there"


def fine_tuning(
    scale: Scale,
    data: Mapping[str, Any],
    task: str,
    start: Run,
    *overrides: str,
    variant: str = "",
    step: int = 0,
    feature_head: FeatureHead | None = None,
    seed: int | None = None,
) -> Run:
    """A fine-tuning, with all restarts of the scale or of one seed.

    Args:
      scale: of it.
      data: paths, by the names of the table's arguments.
      task: a name of `scale.tasks`.
      start: pre-training that it starts from.
      *overrides: of the config, besides the scale's.
      variant: what distinguishes it from the usual one, in its name.
      step: of the start's checkpoints; 0 is the last.
      feature_head: what is between encoder and output, where there is anything.
      seed: of a single one; None is all of the scale.
    """
    tuning, feature_head = scale.tasks[task], feature_head or FeatureHead()
    path = data[tuning.data]
    first = start
    while first.start:
        first = first.start
    model = _model(scale, _argument(first.config, "size"), first.overrides)
    # Features have settings of their own, and a single seed is for one setting.
    grid, settings = ("one", 1) if feature_head.features or seed is not None else (tuning.grid, tuning.settings)
    epochs = scale.feature_epochs if feature_head.features else tuning.epochs
    single = () if seed is None else (f"--config.seed={seed}",)
    parts = (start.name.rpartition("/")[2], variant, f"{step}" if step else "", "" if seed is None else f"seed{seed}")
    return Run(
        name=f"{task}/{'-'.join(filter(None, parts))}",
        config=_with_arguments(tuning.config, f"grid={grid}", f"path={path or tuning.data.upper()}"),
        overrides=_merged(*tuning.overrides, *_upper(scale, feature_head), *overrides, *single),
        start=start,
        start_step=step,
        seeds=scale.seeds if seed is None else 0,
        flops=(scale.seeds if seed is None else 1)
        * settings
        * epochs
        * tuning.tokens
        * flops_per_token(model, 128, feature_head=feature_head),
        lacks=_lacking(tuning, path),
    )


def ensemble(task: str, name: str, members: Sequence[Run]) -> Run:
    """An ensemble of fine-tunings of single seeds."""
    return Run(f"{task}/{name}", members=tuple(members))


def features(scale: Scale, which: str = CONCAT_LAST_FOUR, lstm_layers: int = 2) -> FeatureHead:
    """The feature-based approach of section 5.3."""
    return FeatureHead(which, lstm_layers, scale.lstm_size)


def _upper(scale: Scale, feature_head: FeatureHead) -> tuple[str, ...]:
    if not feature_head.is_used:
        return ()
    layers = (
        f"--config.feature_head.lstm_layers={feature_head.lstm_layers}",
        f"--config.feature_head.lstm_size={feature_head.lstm_size}",
    )
    if not feature_head.features:
        return layers
    frozen = (
        f"--config.feature_head.features={feature_head.features}",
        "--config.optimizer.freeze=encoder",
        _FEATURES_RATE,
    )
    return (*layers, *frozen, f"--config.epochs={scale.feature_epochs}")


def _merged(*overrides: str) -> tuple[str, ...]:
    """Each field once, with its last value."""
    return tuple({override.partition("=")[0]: override for override in overrides}.values())


def _lacking(tuning: FineTuning, path: str) -> str:
    if not path:
        return f"{tuning.needs or tuning.config}, in a folder given with {tuning.data}="
    folder = epath.Path(os.path.expanduser(path))
    if tuning.needs and ":" not in path.partition("/")[0] and not (folder / tuning.needs).exists():
        return f"{path}/{tuning.needs}, which is not there"
    return ""


def _model(scale: Scale, size: str, overrides: tuple[str, ...]) -> ModelConfig:
    """Near enough for an estimate."""
    encoder = {"encoder": LSTM} if f"--config.model.encoder={LSTM}" in overrides else {}
    return ModelConfig(vocab_size=scale.vocab_size, **size_fields(size), **encoder)


def _with_arguments(config: str, *arguments: str) -> str:
    return f"{config}{',' if ':' in config else ':'}{','.join(arguments)}"


def _argument(config: str, name: str) -> str:
    return dict(item.split("=", 1) for item in config.partition(":")[2].split(","))[name]
