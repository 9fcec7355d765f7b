"""Functions that build the runs and cells of the paper's tables, from pre-training or from released checkpoints."""

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from etils import epath

from bertjax.config.load import load_config
from bertjax.convert.convert import bertjax_checkpoint, local_checkpoint
from bertjax.data.corpus.store import MANIFEST
from bertjax.model.config import LSTM, Architecture, ModelConfig
from bertjax.model.feature_head import CONCAT_LAST_FOUR, FeatureHead
from bertjax.model.flops import flops_per_position
from bertjax.presets import named_grid
from bertjax.reproduce.scales import PAPER, SMALL, Scale, get_scale
from bertjax.reproduce.table import Cell, Run
from bertjax.tasks.glue import SPECS
from bertjax.training.checkpoint import find_checkpoint, saved_fingerprint
from bertjax.training.checkpoint_config import experiment_config
from bertjax.training.checkpoint_metadata import saved_architecture
from bertjax.utils import hub
from bertjax.utils.io import cache_dir

# Names of the table arguments whose value is a released checkpoint.
RELEASED = ("base", "large")
_LM = "--config.data.objective=lm"
# Overrides for pre-training a left-to-right Transformer or LSTMs instead of BERT.
LEFT_TO_RIGHT = (_LM, "--config.model.attention_direction=left")
LSTMS = (_LM, f"--config.model.encoder={LSTM}")
# Overrides for pre-training on sentence pairs, as in BERT, but without the next-sentence loss. With `objective=none`,
# rows would start in the middle of sentences, and a small model would learn much more slowly
# (docs/results/tables.md).
WITHOUT_NSP = ("--config.data.objective=pairs",)
# Our choice, because the paper states no learning rate for the feature-based approach.
_FEATURE_LEARNING_RATE = "1e-3"
_FINE_TUNED = FeatureHead()
# Names of runs that save intermediate checkpoints for Figure 5.
_FIGURE5_RUNS = ("bert", "ltr")

# Experiment of each task, the table argument that sets the path of its data, and a file or folder that this path must
# contain ("": no check).
_DATA = {
    **{task: (f"glue:task={task}", "glue", f"{spec.folder}/train.tsv") for task, spec in SPECS.items()},
    "squad": ("squad:version=1.1", "squad", ""),
    "squad2": ("squad:version=2.0", "squad2", ""),
    "triviaqa": ("squad:version=triviaqa", "triviaqa", "qa"),
    "swag": ("swag", "swag", "train.csv"),
    "ner": ("ner", "ner", "eng.train"),
}
# Default metric of each task, and the factor that converts it to percent.
_METRICS = {
    **{task: (spec.metrics[0], 100.0) for task, spec in SPECS.items()},
    **dict.fromkeys(("squad", "squad2", "triviaqa", "ner"), ("f1", 1.0)),
    "swag": ("accuracy", 100.0),
}
PERPLEXITY_NOTE = "perplexity is measured on held-out rows of the same length as in the first pre-training phase"


class Released(NamedTuple):
    """Local path of a released checkpoint in bertjax's format, fingerprint of its parameters, and architecture."""

    path: str
    fingerprint: str
    architecture: Architecture


@functools.cache
def load_released(checkpoint: str) -> Released:
    """Opens a checkpoint of any format, by path or Hub address. Caches the converted checkpoint."""
    key = hashlib.sha256(checkpoint.encode()).hexdigest()[:16]
    with bertjax_checkpoint(checkpoint, cache_dir() / "released" / key) as path:
        converted = find_checkpoint(path)
        return Released(path, saved_fingerprint(converted), saved_architecture(converted))


def metric_cell(row: str, column: str, task: str, *runs: Run, metric: str = "") -> Cell:
    """Returns the table cell of fine-tuning runs on `task`. An empty `metric` selects the task's default metric."""
    default, factor = _METRICS[task]
    return Cell(row, column, runs, metric or default, factor)


def perplexity_cell(row: str, *runs: Run) -> Cell:
    """Returns the table cell with the held-out perplexity of pre-training runs."""
    return Cell(row, "LM perplexity", runs, "perplexity", 1.0)


def scale_of(args: Mapping[str, Any]) -> Scale:
    """Returns a table's scale: the argument `scale` or, if empty, `paper` for released checkpoints, else `small`."""
    is_released = any(args.get(name) for name in RELEASED)
    return get_scale(args["scale"] or (PAPER if is_released else SMALL))


def start(scale: Scale, args: Mapping[str, Any], model: str, seed: int = 1) -> Run:
    """Returns the run whose checkpoint initializes fine-tuning of `model`, which is `base` or `large`.

    If `args[model]` names a released checkpoint, the run represents it. Otherwise, it is a pre-training run.
    """
    if checkpoint := args[model]:
        released = load_released(checkpoint)
        name, config = f"released/{model}-{released.fingerprint[:8]}", ModelConfig(**vars(released.architecture))
        return Run(name, released=checkpoint, fingerprint=released.fingerprint, model=config)
    return pretraining(scale, args, size=getattr(scale, model), seed=seed)


def scale_note(scale: Scale, args: Mapping[str, Any]) -> str:
    """Returns the scale's description or, if a released checkpoint replaces its BASE, a note that says so."""
    if scale.name != PAPER and args.get("base"):
        return f"the settings of scale={scale.name}, with a released BASE"
    return scale.description


def model_notes(scale: Scale, args: Mapping[str, Any]) -> list[str]:
    """Returns the notes of a table that describe its models BASE and LARGE."""
    notes = []
    for model in RELEASED:
        text = getattr(scale, model)
        if checkpoint := args.get(model):
            released = load_released(checkpoint)
            size = f"{released.architecture.num_hidden_layers} layers, hidden size {released.architecture.hidden_size}"
            text = f"{checkpoint}: {size}, fingerprint {released.fingerprint[:8]}"
        notes.append(f"{model.upper()} is {text}")
    return notes


def pretraining(
    scale: Scale, data: Mapping[str, Any], name: str = "", *overrides: str, size: str = "", seed: int = 1
) -> Run:
    """Returns a pre-training run of the model `size` (default: the scale's BASE).

    `data` contains the arguments of the table, such as `corpus`. `overrides` are added to the overrides of `scale`.
    `name` is part of the run's name (default: `bert` for the size of BASE, else the size).
    """
    size, corpus = size or scale.base, data["corpus"]
    name = name or ("bert" if size == scale.base else size)
    if corpus:
        missing_data = _missing_file(f"{corpus}/{MANIFEST}")
    else:
        # Some tables accept a released checkpoint instead of a corpus.
        released = [model for model in RELEASED if model in data and size == getattr(scale, model)]
        instead = f", or a checkpoint, set with {released[0]}=" if released else ""
        missing_data = f"a corpus from `bertjax prepare`, set with corpus={instead}"
    config = f"{scale.pretraining},size={size},corpus={corpus or 'CORPUS'}"
    all_tokens = _LM in overrides
    flags = (
        f"--config.seed={seed}",
        *scale.pretraining_overrides,
        *(() if all_tokens else scale.sentence_pair_overrides),
        *(scale.figure5_overrides if name in _FIGURE5_RUNS else ()),
        *overrides,
    )
    flags = _last_of_each_field(flags)
    settings: Any = experiment_config(config, flags)
    model, flops = settings.model_config(scale.vocab_size), 0.0
    for phase in settings.resolved_phases:
        tokens = (phase.stop_step - phase.start_step) * phase.batch_size * phase.seq_len
        predictions = phase.seq_len - 2 if all_tokens else round(0.15 * phase.seq_len)
        flops += tokens * flops_per_position(model, phase.seq_len, predictions)
    return Run(f"pretrain/{name}-{seed}", config, flags, model=model, flops=flops, missing_data=missing_data)


def fine_tuning(
    scale: Scale,
    data: Mapping[str, Any],
    task: str,
    start: Run,
    *,
    variant: str = "",
    step: int = 0,
    feature_head: FeatureHead = _FINE_TUNED,
    seed: int | None = None,
) -> Run:
    """Returns a fine-tuning run of `scale.tasks[task]`, initialized from a checkpoint of the run `start`.

    Without a `seed`, the run is a sweep with `scale.finetuning_seeds` seeds per setting. The settings are the task's
    grid or, with frozen features, a single setting.

    Args:
      data: arguments of the table, such as paths of datasets.
      variant: suffix of the run's name.
      step: step of the checkpoint, see `Run.init_step`.
    """
    tuning, (experiment, argument, file) = scale.tasks[task], _DATA[task]
    path = data[argument]
    grid = "one" if feature_head.features or seed is not None else tuning.grid
    seeds = scale.finetuning_seeds if seed is None else 0
    fields: dict[str, Any] = {}
    if feature_head.is_used:
        fields |= {f"feature_head.{name}": getattr(feature_head, name) for name in ("lstm_layers", "lstm_size")}
    if feature_head.features:
        fields |= {"feature_head.features": feature_head.features, "optimizer.freeze": "encoder"}
        fields |= {"optimizer.learning_rate": _FEATURE_LEARNING_RATE, "epochs": scale.feature_epochs}
    if seed is not None:
        fields["seed"] = seed
    overrides = (*tuning.overrides, *(f"--config.{name}={value}" for name, value in fields.items()))
    config = f"{experiment}{',' if ':' in experiment else ':'}grid={grid},path={path or argument.upper()}"
    if not path:
        missing_data = f"{file or experiment}, in a folder set with {argument}="
    else:
        # TFDS names such as `tfds:glue` are not files.
        missing_data = _missing_file(f"{path}/{file}") if file and ":" not in path.partition("/")[0] else ""
    suffixes = (variant, str(step or ""), "" if seed is None else f"seed{seed}")
    tokens = load_config(config, overrides).epochs * tuning.tokens
    flops = tokens * flops_per_position(start.model, 128, feature_head=feature_head)
    return Run(
        name=f"{task}/{'-'.join([start.name.rpartition('/')[2], *filter(None, suffixes)])}",
        config=config,
        overrides=_last_of_each_field(overrides),
        init_from=start,
        init_step=step,
        seeds=seeds,
        model=start.model,
        flops=len(named_grid(grid)) * max(seeds, 1) * flops,
        missing_data=missing_data,
    )


def _last_of_each_field(overrides: Iterable[str]) -> tuple[str, ...]:
    return tuple({override.partition("=")[0]: override for override in overrides}.values())


def feature_based(scale: Scale, features: str = CONCAT_LAST_FOUR) -> FeatureHead:
    """Returns the feature head of section 5.3: a two-layer BiLSTM on features of the frozen encoder."""
    return FeatureHead(features, 2, scale.lstm_size)


def _missing_file(path: str) -> str:
    return "" if epath.Path(os.path.expanduser(path)).exists() else f"{path}, which does not exist"


def with_commits(config: str) -> str:
    """Adds the current commit to each Hub address in `FILE:ARGUMENTS`, so that all runs use the same commit."""
    return re.sub(rf"(?<==){hub.PREFIX}[^,]*", _with_commit, config)


def _with_commit(address: re.Match[str]) -> str:
    commit = local_checkpoint(address[0]).rstrip("/").rpartition("/")[2]
    return f"{hub.PREFIX}{hub.parse(address[0])[0]}@{commit}"
