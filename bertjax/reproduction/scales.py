"""The runs that tables are made of, at the paper's scale and at one that a small machine finishes."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from bertjax.corpus.store import MANIFEST
from bertjax.errors import UsageError
from bertjax.model.architecture import LSTM, size_fields
from bertjax.model.config import ModelConfig
from bertjax.model.flops import flops_per_token
from bertjax.model.upper import CONCAT_LAST_FOUR, Upper
from bertjax.reproduction.table import Cell, Run

LEFT_TO_RIGHT = ("--config.data.objective=lm", "--config.model.attention_direction=left")
LSTMS = ("--config.data.objective=lm", f"--config.model.encoder={LSTM}")
# On rows of BERT's own. From those of running text (`none`), which begin in the middle of sentences, a small model
# learns much more slowly: RESULTS.md.
WITHOUT_NSP = ("--config.data.objective=pairs",)
PAPER, SMALL = "paper", "small"
# Pre-trainings whose checkpoints along the way Figure 5 takes.
_TAKEN_ALONG = ("bert", "ltr")
_FLOAT32 = "--config.model.dtype=float32"
# Of features, for which the paper gives none.
_FEATURES_RATE = "--config.optimizer.learning_rate=1e-3"


@dataclasses.dataclass(frozen=True)
class FineTuning:
    """How a scale fine-tunes on one task.

    Attributes:
      config: of the experiment: `FILE:ARGUMENTS`, to which the grid and the path of the data are added.
      data: name of the argument that gives that path.
      needs: a file or folder in it.
      tokens: of an epoch, padding included, about.
      epochs: passes over them.
      overrides: of the config.
      grid: that a sweep runs.
      settings: of the grid.
    """

    config: str
    data: str
    needs: str
    tokens: float
    epochs: int
    overrides: tuple[str, ...] = ()
    grid: str = "one"
    settings: int = 1


@dataclasses.dataclass(frozen=True)
class Scale:
    """A size of everything.

    Attributes:
      name: `paper` or `small`.
      told: what it is, for the notes of a table.
      base, large: sizes of models.
      pretraining: `FILE:ARGUMENTS` without size and corpus.
      overrides: of pre-training.
      of_pairs: overrides of those that have sentence pairs; rows without are full anyway.
      phases: tokens of each phase, and the length of its rows.
      vocab_size: pieces, about, for estimates.
      steps_along: of pre-training, whose checkpoints Figure 5 takes.
      kept: overrides that keep them.
      members: of an ensemble.
      pretrainings: of different seeds, of the rows of Table 5 that matter most.
      seeds: random restarts of a fine-tuning.
      lstm_size: of BiLSTMs on top, in each direction.
      equal_flops: sizes whose FLOPs are those of BASE: of a left-to-right Transformer, and of LSTMs both ways.
      sizes: of Table 6, the paper's row to the size here.
      tasks: names to fine-tunings.
      feature_epochs: of a feature-based task.
    """

    name: str
    told: str
    base: str
    large: str
    pretraining: str
    overrides: tuple[str, ...]
    of_pairs: tuple[str, ...]
    phases: tuple[tuple[float, int], ...]
    vocab_size: int
    steps_along: tuple[int, ...]
    kept: tuple[str, ...]
    members: int
    pretrainings: int
    seeds: int
    lstm_size: int
    equal_flops: tuple[str, str]
    sizes: Mapping[str, str]
    tasks: Mapping[str, FineTuning]
    feature_epochs: int


def _glue(task: str, folder: str, rows: int, length: int, epochs: int, *given: str) -> FineTuning:
    return FineTuning(f"glue:task={task}", "glue", f"{folder}/train.tsv", rows * length, epochs, given)


# Rows as in section 4.1 and as released; four learning rates, three epochs each.
_PAPER_GLUE = {
    "mnli": ("MNLI", 392_702, 64),
    "qqp": ("QQP", 363_846, 64),
    "qnli": ("QNLI", 104_743, 96),
    "sst2": ("SST-2", 67_349, 32),
    "cola": ("CoLA", 8_551, 32),
    "stsb": ("STS-B", 5_749, 64),
    "mrpc": ("MRPC", 3_668, 96),
    "rte": ("RTE", 2_490, 128),
}
_A_TENTH_ONCE = ("--config.epochs=1", "--config.data.train_share=0.1")
_RATE, _LOW_RATE = "--config.optimizer.learning_rate=3e-4", "--config.optimizer.learning_rate=1e-4"

_SQUAD = (
    *(_RATE, _FLOAT32, "--config.data.train_share=0.03", "--config.epochs=2"),
    *("--config.data.seq_len=128", "--config.data.doc_stride=64", "--config.data.max_query_len=32"),
    "--config.eval_every=1000000",
)

_SCALES = {
    PAPER: Scale(
        name=PAPER,
        told="at the paper's scale, on dev; the mean of five restarts, the settings selected on dev",
        base="base",
        large="large",
        pretraining="pretrain:phases=2",
        overrides=(),
        of_pairs=(),
        phases=((900_000 * 131_072, 128), (100_000 * 131_072, 512)),
        vocab_size=30_522,
        steps_along=(30_000, 50_000, 100_000, 200_000, 400_000, 600_000, 800_000, 1_000_000),
        kept=("--config.checkpoint_every=10000", "--config.keep_checkpoints=100"),
        members=7,
        pretrainings=1,
        seeds=5,
        lstm_size=768,
        equal_flops=("L12_H684_A12", "L2_H1920"),
        sizes={
            "3/768/12": "L3_H768_A12",
            "6/768/3": "L6_H768_A3",
            "6/768/12": "L6_H768_A12",
            "12/768/12": "base",
            "12/1024/16": "L12_H1024_A16",
            "24/1024/16": "large",
        },
        tasks={
            **{
                name: dataclasses.replace(_glue(name, *of_task, 3), grid="glue", settings=4)
                for name, of_task in _PAPER_GLUE.items()
            },
            "squad": FineTuning("squad:version=1.1", "squad", "", 88_000 * 384, 3),
            "squad2": FineTuning("squad:version=2.0", "squad2", "", 132_000 * 384, 2),
            "triviaqa": FineTuning("squad:version=triviaqa", "triviaqa", "qa", 90_000 * 512, 3),
            "swag": FineTuning("swag", "swag", "train.csv", 73_546 * 4 * 128, 3),
            "ner": FineTuning("ner", "ner", "eng.train", 300_000, 3, grid="a3", settings=18),
        },
        feature_epochs=10,
    ),
    SMALL: Scale(
        name=SMALL,
        told="BASE is 2 layers of 128 and 2 heads, pre-trained in float32 on 12.3 million tokens in rows of 32 and 128",
        base="L2_H128",
        large="L4_H192",
        pretraining="pretrain_cpu:steps=12000",
        # Masked LM is as right in rows of 32 after 3,400 steps (0.169) as in rows of 64 after 7,000 (0.166); but of
        # pairs so short 15 % are sentences that follow each other, which asks for longer rows.
        overrides=(
            *("--config.optimizer.learning_rate=1e-3", "--config.data.seq_len=32", "--config.data.batch_size=32"),
            *("--config.long_phase.share=0.5", "--config.long_phase.seq_len=128"),
        ),
        # So that models with and without pairs see as many tokens.
        of_pairs=("--config.data.packing=true",),
        phases=((6_000 * 1024, 32), (6_000 * 1024, 128)),
        vocab_size=4096,
        steps_along=tuple(range(1500, 12_001, 1500)),
        kept=("--config.checkpoint_every=1500", "--config.keep_checkpoints=8"),
        members=3,
        pretrainings=2,
        seeds=3,
        lstm_size=128,
        equal_flops=("L2_H80_A2", "L2_H104_A2"),
        sizes={
            "3/768/12": "L1_H64",
            "6/768/3": "L1_H128_A1",
            "6/768/12": "L1_H128",
            "12/768/12": "L2_H128",
            "12/1024/16": "L2_H192",
            "24/1024/16": "L4_H192",
        },
        tasks={
            "mnli": _glue("mnli", "MNLI", 39_000, 64, 1, _RATE, _FLOAT32, *_A_TENTH_ONCE),
            "qnli": _glue("qnli", "QNLI", 104_743, 96, 3, _RATE, _FLOAT32),
            "sst2": _glue(
                "sst2", "SST-2", 20_205, 32, 1, _RATE, _FLOAT32, "--config.epochs=1", "--config.data.train_share=0.3"
            ),
            "mrpc": _glue("mrpc", "MRPC", 3_668, 64, 3, _LOW_RATE, _FLOAT32),
            "cola": _glue("cola", "CoLA", 8_551, 32, 3, _LOW_RATE, _FLOAT32),
            "rte": _glue("rte", "RTE", 2_490, 128, 3, _LOW_RATE, _FLOAT32),
            "qqp": _glue("qqp", "QQP", 36_000, 64, 1, _RATE, _FLOAT32, *_A_TENTH_ONCE),
            "stsb": _glue("stsb", "STS-B", 5_749, 64, 3, _LOW_RATE, _FLOAT32),
            "squad": FineTuning(
                "squad:version=1.1",
                "squad",
                "",
                # And a third of those that are evaluated.
                2_600 * 450 + 10_570 * 450 / 3 / 2,
                2,
                _SQUAD,
            ),
            "squad2": FineTuning("squad:version=2.0", "squad2", "", 3_900 * 256, 2, (_SQUAD)),
            "triviaqa": FineTuning("squad:version=triviaqa", "triviaqa", "qa", 2_700 * 256, 2, _SQUAD),
            "swag": FineTuning("swag", "swag", "train.csv", 7_300 * 4 * 64, 1, (_RATE, _FLOAT32, *_A_TENTH_ONCE)),
            "ner": FineTuning("ner", "ner", "eng.train", 350_000, 3, (_RATE, _FLOAT32, "--config.data.seq_len=128")),
        },
        feature_epochs=3,
    ),
}


def scale_of(name: str) -> Scale:
    """A scale by its name.

    Raises:
      UsageError: there is none of that name.
    """
    if name not in _SCALES:
        raise UsageError(f"scale={name}; known: {', '.join(_SCALES)}")
    return _SCALES[name]


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
    upper: Upper | None = None,
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
      upper: what is between encoder and output, where there is anything.
      seed: of a single one; None is all of the scale.
    """
    tuning, upper = scale.tasks[task], upper or Upper()
    path = data[tuning.data]
    first = start
    while first.start:
        first = first.start
    model = _model(scale, _argument(first.config, "size"), first.overrides)
    # Features have settings of their own, and a single seed is for one setting.
    grid, settings = ("one", 1) if upper.features or seed is not None else (tuning.grid, tuning.settings)
    epochs = scale.feature_epochs if upper.features else tuning.epochs
    single = () if seed is None else (f"--config.seed={seed}",)
    parts = (start.name.rpartition("/")[2], variant, f"{step}" if step else "", "" if seed is None else f"seed{seed}")
    return Run(
        name=f"{task}/{'-'.join(filter(None, parts))}",
        config=_with_arguments(tuning.config, f"grid={grid}", f"path={path or tuning.data.upper()}"),
        overrides=_merged(*tuning.overrides, *_upper(scale, upper), *overrides, *single),
        start=start,
        start_step=step,
        seeds=scale.seeds if seed is None else 0,
        flops=(scale.seeds if seed is None else 1)
        * settings
        * epochs
        * tuning.tokens
        * flops_per_token(model, 128, upper=upper),
        lacks=_lacking(tuning, path),
    )


def ensemble(task: str, name: str, members: Sequence[Run]) -> Run:
    """An ensemble of fine-tunings of single seeds."""
    return Run(f"{task}/{name}", members=tuple(members))


def features(scale: Scale, which: str = CONCAT_LAST_FOUR, lstm_layers: int = 2) -> Upper:
    """The feature-based approach of section 5.3."""
    return Upper(which, lstm_layers, scale.lstm_size)


def _upper(scale: Scale, upper: Upper) -> tuple[str, ...]:
    if not upper.is_there:
        return ()
    layers = (f"--config.upper.lstm_layers={upper.lstm_layers}", f"--config.upper.lstm_size={upper.lstm_size}")
    if not upper.features:
        return layers
    frozen = (f"--config.upper.features={upper.features}", "--config.optimizer.freeze=encoder", _FEATURES_RATE)
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
