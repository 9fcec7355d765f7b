"""Model sizes and settings of the reproduction: `paper` as in the paper, `small` and `medium` for a single machine."""

import dataclasses
from collections.abc import Mapping

from bertjax.errors import UsageError
from bertjax.tasks.glue import SPECS

PAPER, SMALL, MEDIUM = "paper", "small", "medium"
_FLOAT32 = "--config.model.dtype=float32"


@dataclasses.dataclass(frozen=True)
class FineTuning:
    """Settings of fine-tuning on one task.

    Attributes:
      config: `FILE:ARGUMENTS` of the experiment, without `grid` and `path`.
      data: name of the table argument that sets the path of the data, such as `glue`.
      required_file: file or folder that must exist in the data folder ("": no check).
      tokens: approximate tokens per epoch, including padding.
      epochs: number of epochs.
      overrides: `--config.FIELD=VALUE` flags (default: none).
      grid: name of the hyperparameter grid of the sweep (default: `one`, a single setting).
    """

    config: str
    data: str
    required_file: str
    tokens: float
    epochs: int
    overrides: tuple[str, ...] = ()
    grid: str = "one"


@dataclasses.dataclass(frozen=True)
class Scale:
    """Model sizes, row lengths and settings of all runs.

    Attributes:
      name: `paper`, `small` or `medium`.
      description: description for the notes of a table.
      base, large: model sizes of BASE and LARGE.
      pretraining: `FILE:ARGUMENTS` of pre-training, without size and corpus.
      pretraining_overrides: overrides of all pre-training runs.
      sentence_pair_overrides: overrides of pre-training runs on sentence pairs.
      vocab_size: approximate vocabulary size, for FLOP estimates.
      figure5_steps: steps of the pre-training checkpoints that Figure 5 fine-tunes.
      figure5_overrides: overrides that keep the checkpoints at `figure5_steps`.
      ensemble_size: number of models in an ensemble.
      pretraining_seeds: number of pre-training runs per row of Table 5.
      finetuning_seeds: number of seeds of a fine-tuning run.
      lstm_size: number of units of a BiLSTM per direction.
      equal_flops: size of a left-to-right Transformer, and size of an LSTM encoder, each with as many FLOPs as BASE.
      table6_sizes: model size of each row of Table 6, by row label.
      tasks: settings of each task by name.
      feature_epochs: number of epochs of the feature-based approach.
    """

    name: str
    description: str
    base: str
    large: str
    pretraining: str
    pretraining_overrides: tuple[str, ...]
    sentence_pair_overrides: tuple[str, ...]
    vocab_size: int
    figure5_steps: tuple[int, ...]
    figure5_overrides: tuple[str, ...]
    ensemble_size: int
    pretraining_seeds: int
    finetuning_seeds: int
    lstm_size: int
    equal_flops: tuple[str, str]
    table6_sizes: Mapping[str, str]
    tasks: Mapping[str, FineTuning]
    feature_epochs: int


def _glue(task: str, rows: int, length: int, epochs: int, *overrides: str) -> FineTuning:
    return FineTuning(f"glue:task={task}", "glue", f"{SPECS[task].folder}/train.tsv", rows * length, epochs, overrides)


# Number of training examples and average padded length of each GLUE task, for FLOP estimates. The paper trains for 3
# epochs (section 4.1).
_PAPER_GLUE = {
    "mnli": (392_702, 64),
    "qqp": (363_846, 64),
    "qnli": (104_743, 96),
    "sst2": (67_349, 32),
    "cola": (8_551, 32),
    "stsb": (5_749, 64),
    "mrpc": (3_668, 96),
    "rte": (2_490, 128),
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
        description="at the paper's scale; dev scores are means of five restarts, with hyperparameters selected on dev",
        base="base",
        large="large",
        pretraining="pretrain:phases=2",
        pretraining_overrides=(),
        sentence_pair_overrides=(),
        vocab_size=30_522,
        figure5_steps=(30_000, 50_000, 100_000, 200_000, 400_000, 600_000, 800_000, 1_000_000),
        figure5_overrides=("--config.checkpoint_every=10000", "--config.keep_checkpoints=100"),
        ensemble_size=7,
        pretraining_seeds=1,
        finetuning_seeds=5,
        lstm_size=768,
        equal_flops=("L12_H684_A12", "L2_H1920"),
        table6_sizes={
            "3/768/12": "L3_H768_A12",
            "6/768/3": "L6_H768_A3",
            "6/768/12": "L6_H768_A12",
            "12/768/12": "base",
            "12/1024/16": "L12_H1024_A16",
            "24/1024/16": "large",
        },
        tasks={
            **{
                name: dataclasses.replace(_glue(name, *rows_and_length, 3), grid="glue")
                for name, rows_and_length in _PAPER_GLUE.items()
            },
            "squad": FineTuning("squad:version=1.1", "squad", "", 88_000 * 384, 3),
            "squad2": FineTuning("squad:version=2.0", "squad2", "", 132_000 * 384, 2),
            "triviaqa": FineTuning("squad:version=triviaqa", "triviaqa", "qa", 90_000 * 512, 3),
            "swag": FineTuning("swag", "swag", "train.csv", 73_546 * 4 * 128, 3),
            "ner": FineTuning("ner", "ner", "eng.train", 300_000, 3, grid="a3"),
        },
        feature_epochs=10,
    ),
    SMALL: Scale(
        name=SMALL,
        description=(
            "BASE has 2 layers of width 128 and 2 heads; it is pre-trained in float32 on 12.3 million tokens, in rows "
            "of 32 and 128 tokens"
        ),
        base="L2_H128",
        large="L4_H192",
        pretraining="pretrain_cpu:steps=12000",
        # Phase 1 uses rows of 32 tokens: masked-LM accuracy reaches 0.169 after 3,400 steps, but with 64 tokens only
        # 0.166 after 7,000 steps. Phase 2 uses 128 tokens, because only 15 % of the pairs in rows of 32 tokens are
        # consecutive sentences.
        pretraining_overrides=(
            *("--config.optimizer.learning_rate=1e-3", "--config.data.seq_len=32", "--config.data.batch_size=32"),
            "--config.phases=({'share': 0.5}, {'share': 0.5, 'seq_len': 128})",
        ),
        # With packing, a step contains as many tokens as in runs without sentence pairs.
        sentence_pair_overrides=("--config.data.packing=true",),
        vocab_size=4096,
        figure5_steps=tuple(range(1500, 12_001, 1500)),
        figure5_overrides=("--config.checkpoint_every=1500", "--config.keep_checkpoints=8"),
        ensemble_size=3,
        pretraining_seeds=2,
        finetuning_seeds=3,
        lstm_size=128,
        equal_flops=("L2_H80_A2", "L2_H104_A2"),
        table6_sizes={
            "3/768/12": "L1_H64",
            "6/768/3": "L1_H128_A1",
            "6/768/12": "L1_H128",
            "12/768/12": "L2_H128",
            "12/1024/16": "L2_H192",
            "24/1024/16": "L4_H192",
        },
        tasks={
            "mnli": _glue("mnli", 39_000, 64, 1, _RATE, _FLOAT32, *_A_TENTH_ONCE),
            "qnli": _glue("qnli", 104_743, 96, 3, _RATE, _FLOAT32),
            "sst2": _glue("sst2", 20_205, 32, 1, _RATE, _FLOAT32, "--config.epochs=1", "--config.data.train_share=0.3"),
            "mrpc": _glue("mrpc", 3_668, 64, 3, _LOW_RATE, _FLOAT32),
            "cola": _glue("cola", 8_551, 32, 3, _LOW_RATE, _FLOAT32),
            "rte": _glue("rte", 2_490, 128, 3, _LOW_RATE, _FLOAT32),
            "qqp": _glue("qqp", 36_000, 64, 1, _RATE, _FLOAT32, *_A_TENTH_ONCE),
            "stsb": _glue("stsb", 5_749, 64, 3, _LOW_RATE, _FLOAT32),
            "squad": FineTuning(
                "squad:version=1.1",
                "squad",
                "",
                # Training tokens per epoch, plus evaluation tokens. The latter are divided by 3, because an evaluation
                # token costs a third of a training token, and by 2, because there is one evaluation in two epochs.
                2_600 * 450 + 10_570 * 450 / 3 / 2,
                2,
                _SQUAD,
            ),
            "squad2": FineTuning("squad:version=2.0", "squad2", "", 3_900 * 256, 2, _SQUAD),
            "triviaqa": FineTuning("squad:version=triviaqa", "triviaqa", "qa", 2_700 * 256, 2, _SQUAD),
            "swag": FineTuning("swag", "swag", "train.csv", 7_300 * 4 * 64, 1, (_RATE, _FLOAT32, *_A_TENTH_ONCE)),
            "ner": FineTuning("ner", "ner", "eng.train", 350_000, 3, (_RATE, _FLOAT32, "--config.data.seq_len=128")),
        },
        feature_epochs=3,
    ),
}
# 102 million pre-training tokens, so that the initial plateau of the masked-LM loss is only a small part of the run.
_SCALES[MEDIUM] = dataclasses.replace(
    _SCALES[SMALL],
    name=MEDIUM,
    description=_SCALES[SMALL].description.replace("12.3 million", "102.4 million"),
    pretraining="pretrain_cpu:steps=100000",
    figure5_steps=tuple(range(12_500, 100_001, 12_500)),
    figure5_overrides=("--config.checkpoint_every=12500", "--config.keep_checkpoints=8"),
)


def get_scale(name: str) -> Scale:
    """Returns a scale by name. Raises a UsageError for an unknown name."""
    if name not in _SCALES:
        raise UsageError(f"unknown scale={name}; use one of {', '.join(_SCALES)}")
    return _SCALES[name]
