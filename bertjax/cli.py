"""The command line: one function a command, which parses, validates and dispatches.

Everything heavy is imported inside the commands, so that `--help` and wrong flags answer at once.
"""

import argparse
import importlib.metadata
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from bertjax.errors import BertjaxError, UsageError

_CONFIG_HELP = "experiment file, typed arguments after a colon: experiments/pretrain.py:size=base,seq_len=128"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command and exits: 0 done, 1 failed, 2 wrong use. A traceback is shown with --debug alone."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    # Before TensorFlow is imported anywhere: it has nothing to say to a user of bertjax.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Orbax warns there of what is as it should be.
    logging.getLogger("absl").setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows its code instead.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if argv is None:
        _with_huge_pages()
    try:
        args, overrides = _parser().parse_known_args([item for item in arguments if item != "--debug"])
        if not hasattr(args, "config") and overrides:
            raise UsageError(f"unknown argument {overrides[0]}; see `bertjax {args.command} --help`")
        args.overrides = overrides
        args.run(args)
    except BertjaxError as error:
        if debug:
            raise
        _die(str(error), error.exit_code)
    except KeyboardInterrupt:
        _die("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if debug:
            raise
        _die(f"{error.filename or 'reading or writing'}: {error.strerror or error}", 1)
    except MemoryError as error:
        _die(f"not enough memory: {error}", 1)
    except Exception as error:
        if debug:
            raise
        text = str(error).strip().splitlines()
        detail = f": {text[0][:300]}" if text else ""
        _die(f"{type(error).__name__}{detail} (unexpected; run again with --debug for the traceback)", 1)


def _with_huge_pages() -> None:
    """Starts the process over with glibc asking for huge pages, which it reads from the environment at start alone.

    A train step takes and frees gigabytes of buffers; with pages of 4 KiB a step on two CPU cores had 8 % (BASE)
    to 25 % (Mini) fewer tokens/s.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _die(message: str, code: int) -> None:
    print(f"bertjax: {' '.join(message.splitlines())}", file=sys.stderr)
    sys.exit(code)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in the one line that every error of the program is."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and examples as they are typed."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in (None, False) else action.help


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="bertjax",
        description="BERT pre-training in JAX and Flax, built for TPUs.",
        epilog="`bertjax COMMAND --help` shows each command with an example. --debug shows tracebacks.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"bertjax {importlib.metadata.version('bertjax')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, run: Any, does: str, example: str, config: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=does,
            description=does,
            epilog=f"example:\n  {example}",
            formatter_class=_Help,
            allow_abbrev=False,
        )
        sub.set_defaults(run=run)
        if config:
            sub.add_argument("--config", metavar="FILE[:ARGS]", help=_CONFIG_HELP)
            sub.epilog += "\n\n--config.FIELD=VALUE overrides any field, such as --config.optimizer.learning_rate=1e-3"
        return sub

    sub = command(
        "prepare",
        prepare,
        "Turns text into a tokenised corpus, and trains a vocabulary where none is given.",
        "bertjax prepare --input docs: --vocab_size 8000 --output runs/corpus",
    )
    sub.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="SPEC",
        help="text:GLOB, prose:GLOB, wiki:GLOB, tfds:NAME/CONFIG:SPLIT or docs:, mixed freely",
    )
    sub.add_argument("--output", required=True, metavar="DIR", help="the corpus; must not exist yet")
    sub.add_argument("--vocab", metavar="FILE", help="vocab.txt or SentencePiece .model; trained here if left out")
    sub.add_argument(
        "--vocab_kind", default="wordpiece", help="of a vocabulary trained here: wordpiece or sentencepiece"
    )
    sub.add_argument("--vocab_size", type=int, default=30522, help="of a vocabulary trained here")
    sub.add_argument("--cased", action="store_true", help="keep case and accents (default: as the vocabulary tells)")
    sub.add_argument("--uncased", action="store_true", help="lower-case, and strip accents")
    sub.add_argument("--heldout", type=float, default=0.01, help="share of documents kept out of training, in [0, 1)")
    sub.add_argument("--workers", type=int, help="processes (default: one a core)")
    sub.add_argument("--data_dir", help="where TensorFlow Datasets keeps its data")
    sub.add_argument("--overwrite", action="store_true", help="replace an existing output when the new one is complete")

    sub = command(
        "inspect",
        inspect,
        "Shows what the model will see in training, as text.",
        "bertjax inspect --config experiments/pretrain.py:corpus=runs/corpus --rows 2",
        config=True,
    )
    sub.add_argument("--steps", type=int, default=1, help="batches of steps 0 to STEPS - 1")
    sub.add_argument("--rows", type=int, default=3, help="examples printed of each batch")
    sub.add_argument("--npz", metavar="FILE", help="write the whole batches there")

    command(
        "describe",
        describe,
        "Prints parameters by module, FLOPs per token, batch and schedule.",
        "bertjax describe --config experiments/pretrain.py:size=large,phases=2",
        config=True,
    )

    sub = command(
        "train",
        train,
        "Trains, or goes on where the workdir stopped.",
        "bertjax train --config experiments/pretrain.py:size=mini,corpus=runs/corpus --workdir runs/mini",
        config=True,
    )
    sub.add_argument(
        "--workdir", required=True, metavar="DIR", help="checkpoints, metrics, curves; resumed if it exists"
    )
    sub.add_argument("--init_from", metavar="CKPT", help="start a new run with the parameters of this checkpoint")
    sub.add_argument(
        "--distributed", action="store_true", help="one process of several: the same command on every host"
    )

    sub = command(
        "sweep",
        sweep,
        "Runs the trials of the config's sweep(), each with several seeds, and selects on dev.",
        "bertjax sweep --config experiments/glue.py:task=rte,path=glue_data --init_from runs/base --workdir runs/rte",
        config=True,
    )
    sub.add_argument("--workdir", required=True, metavar="DIR", help="of the sweep; goes on where it stopped")
    sub.add_argument("--init_from", metavar="CKPT", help="start each trial with the parameters of this checkpoint")
    sub.add_argument("--seeds", type=int, default=1, help="random restarts of each setting")

    sub = command(
        "evaluate",
        evaluate,
        "Prints a checkpoint's metrics on held-out data.",
        "bertjax evaluate --checkpoint runs/mini",
        config=True,
    )
    sub.add_argument("--checkpoint", required=True, metavar="CKPT", help="a workdir, or WORKDIR/checkpoints/STEP")

    sub = command(
        "predict",
        predict,
        "Writes a checkpoint's predictions in the task's official format.",
        "bertjax predict --checkpoint runs/mrpc --output runs/glue",
        config=True,
    )
    sub.add_argument("--checkpoint", required=True, metavar="CKPT", help="a workdir, or WORKDIR/checkpoints/STEP")
    sub.add_argument("--output", required=True, metavar="DIR", help="gets the files, replacing those of the same name")
    sub.add_argument("--split", default="test", help="test (the default) or dev")

    sub = command(
        "submission",
        submission,
        "Packs GLUE predictions into the archive that its server takes.",
        "bertjax submission --predictions runs/submission --output runs/submission.zip",
    )
    sub.add_argument("--predictions", required=True, metavar="DIR", help="what predict wrote, all tasks together")
    sub.add_argument("--output", required=True, metavar="FILE", help="the archive")
    sub.add_argument("--own_wnli", action="store_true", help="take the folder's WNLI.tsv, not the majority class")

    sub = command(
        "fill",
        fill,
        "Fills each [MASK] of a text with the most probable pieces.",
        'bertjax fill --checkpoint runs/mini "Paris is the [MASK] of France."',
    )
    sub.add_argument("text", nargs="+")
    sub.add_argument("--checkpoint", required=True, metavar="CKPT", help="a workdir, or WORKDIR/checkpoints/STEP")
    sub.add_argument("--top", type=int, default=5, help="pieces a mask")

    bench = commands.add_parser(
        "bench",
        help="Measures the train step or the input pipeline.",
        epilog="example:\n  bertjax bench step --config experiments/pretrain.py:size=tiny,quick=true",
        formatter_class=_Help,
        allow_abbrev=False,
    ).add_subparsers(dest="what", metavar="step|input", required=True)
    commands_before, commands = commands, bench
    sub = command(
        "step",
        bench_step,
        "Times train steps on synthetic batches; ends with one JSON line.",
        "bertjax bench step --config experiments/pretrain.py:size=base,batch=sequences --config.data.batch_size=8",
        config=True,
    )
    sub.add_argument("--steps", type=int, default=10, help="timed steps, after one that compiles")
    sub = command(
        "input",
        bench_input,
        "Times the input pipeline; ends with one JSON line.",
        "bertjax bench input --config experiments/pretrain.py:corpus=runs/corpus --seconds 10",
        config=True,
    )
    sub.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    commands = commands_before
    return parser


def prepare(args: argparse.Namespace) -> None:
    from bertjax.corpus.prepare import prepare as run
    from bertjax.corpus.prepare import summary

    # As Ctrl-C, which cleans up; the default would leave a part of the output behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if args.cased and args.uncased:
        raise UsageError("--cased and --uncased exclude each other")
    manifest = run(
        args.input,
        args.output,
        vocabulary=args.vocab,
        vocabulary_kind=args.vocab_kind,
        vocabulary_size=args.vocab_size,
        lower_case=False if args.cased else True if args.uncased else None,
        heldout_share=args.heldout,
        workers=args.workers,
        data_dir=args.data_dir,
        overwrite=args.overwrite,
    )
    print(summary(args.output, manifest))


def inspect(args: argparse.Namespace) -> None:
    from bertjax.corpus.store import open_corpus
    from bertjax.data.inspect import format_example, format_row, write_batches
    from bertjax.tasks.vocabulary_files import open_vocabulary

    config, task = _config_and_task(args, train=True)
    if args.steps < 1 or args.steps > task.schedule.steps:
        raise UsageError(f"--steps is {args.steps}; it must be between 1 and the config's {task.schedule.steps}")
    if args.rows < 1:
        raise UsageError(f"--rows is {args.rows}; it must be at least 1")
    batches = _first_batches(task, args.steps)
    if "corpus" in config.data:
        vocabulary, show = open_corpus(config.data.corpus).vocabulary(), format_example
    else:
        vocabulary, show = open_vocabulary(config.data.vocabulary), format_row
    for step, batch in enumerate(batches):
        for row in range(min(args.rows, len(batch["input_ids"]))):
            print(f"step {step}, row {row}\n{show(batch, row, vocabulary)}\n")
    if args.npz:
        write_batches(batches, args.npz)
        print(f"wrote the batches of {args.steps} step(s) to {args.npz}")


def _first_batches(task: Any, count: int) -> list[dict[str, Any]]:
    from itertools import islice

    return list(islice(task.train_batches(0), count))


def describe(args: argparse.Namespace) -> None:
    from bertjax.report.describe import describe_task

    config, task = _config_and_task(args)
    print(describe_task(config, task))


def train(args: argparse.Namespace) -> None:
    from bertjax.training.loop import train as run

    if args.distributed:
        _join_the_others()
    config, task = _config_and_task(args, train=True, start=args.init_from)
    print(json.dumps(run(config, task, args.workdir, args.init_from)))


def sweep(args: argparse.Namespace) -> None:
    from bertjax.config import load_trials
    from bertjax.training.sweep import run_sweep

    if args.seeds < 1:
        raise UsageError(f"--seeds is {args.seeds}; it must be at least 1")
    # Refuses a wrong config before any trial.
    first, _ = _config_and_task(args, train=True, start=args.init_from)
    given = [item for item in args.overrides if not item.startswith("--config.seed=")]

    def build(trial: dict[str, Any]) -> tuple[Any, Any]:
        # What is given on the command line holds for every trial.
        args.overrides = [*(f"--config.{field}={value}" for field, value in trial.items()), *given]
        return _config_and_task(args, train=True, start=args.init_from)

    trials = [{**trial, "seed": first.seed + seed} for trial in load_trials(args.config) for seed in range(args.seeds)]
    print(json.dumps(run_sweep(build, trials, args.workdir, args.init_from)))


def _join_the_others() -> None:
    """Connects the processes of a run; TPU pods and Slurm tell JAX all it needs, elsewhere three variables do."""
    import jax

    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = {name: os.environ[name] for name in names if name in os.environ}
    try:
        if len(given) == len(names):
            address, count, index = given.values()
            jax.distributed.initialize(address, int(count), int(index))
        else:
            jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        raise BertjaxError(
            f"--distributed found no cluster ({error}); off TPU pods and Slurm, set {', '.join(names)}"
        ) from error


def evaluate(args: argparse.Namespace) -> None:
    from bertjax.training.checkpoint import find_checkpoint
    from bertjax.training.evaluation import evaluate_checkpoint
    from bertjax.training.writers import say

    checkpoint = find_checkpoint(args.checkpoint)
    if args.config:
        config, task = _config_and_task(args, start=checkpoint)
    else:
        config, task = _saved_config_and_task(checkpoint, args.overrides)
    values = evaluate_checkpoint(config, task, checkpoint)
    say(f"of checkpoint {checkpoint}")
    print(json.dumps(values))


def predict(args: argparse.Namespace) -> None:
    from bertjax.tasks.finetuning import SPLITS
    from bertjax.training.checkpoint import find_checkpoint
    from bertjax.training.evaluation import write_predictions

    if args.split not in SPLITS:
        raise UsageError(f"--split is {args.split!r}; known: {', '.join(SPLITS)}")
    checkpoint = find_checkpoint(args.checkpoint)
    if args.config:
        config, task = _config_and_task(args, start=checkpoint, split=args.split)
    else:
        config, task = _saved_config_and_task(checkpoint, args.overrides, split=args.split)
    for path in write_predictions(config, task, checkpoint, args.output):
        print(path)


def submission(args: argparse.Namespace) -> None:
    from bertjax.tasks.glue_submission import collect

    for problem in collect(Path(args.predictions), Path(args.output), not args.own_wnli):
        print(f"incomplete: {problem}", file=sys.stderr)
    print(args.output)


def fill(args: argparse.Namespace) -> None:
    from bertjax.tasks.fill import fill as run
    from bertjax.tasks.vocabulary_files import workdir_vocabulary
    from bertjax.training.checkpoint import find_checkpoint, load_params, workdir_of
    from bertjax.training.evaluation import abstract_params

    checkpoint = find_checkpoint(args.checkpoint)
    vocabulary = workdir_vocabulary(workdir_of(checkpoint))
    _, task = _saved_config_and_task(checkpoint, [], corpus_wanted=False)
    params = load_params(checkpoint, abstract_params(task.objective), print)
    for text in args.text:
        print(text)
        for pieces in run(task.objective.model, params, vocabulary, text, args.top):
            print("  " + "   ".join(f"{piece} {100 * probability:.1f} %" for piece, probability in pieces))


def bench_step(args: argparse.Namespace) -> None:
    from bertjax.training.bench import bench_step as run

    if args.steps < 1:
        raise UsageError(f"--steps is {args.steps}; it must be at least 1")
    config, task = _config_and_task(args)
    print(json.dumps(run(config, task, args.steps)))


def bench_input(args: argparse.Namespace) -> None:
    from bertjax.corpus.store import open_corpus
    from bertjax.data.bench import bench_input as run
    from bertjax.data.settings import Masking
    from bertjax.fields import phases

    config, _ = _config_and_task(args)
    if not config.data.corpus:
        raise UsageError("`bench input` needs a corpus: --config FILE:corpus=DIR")
    print(
        json.dumps(
            run(
                open_corpus(config.data.corpus),
                phases(config)[0],
                objective=config.data.objective,
                masking=Masking(**config.data.masking),
                seed=config.seed,
                pair_passes=config.data.pair_passes,
                seconds=args.seconds,
            )
        )
    )


def _config_and_task(
    args: argparse.Namespace, train: bool = False, start: Any = None, split: str = ""
) -> tuple[Any, Any]:
    from bertjax.config import load_config

    if not args.config:
        raise UsageError(f"`bertjax {args.command}` needs --config, such as experiments/pretrain.py:size=base")
    config = load_config(args.config, args.overrides)
    for name in ("corpus", "path", "vocabulary"):
        # Whole, so that the config a run saves means the same from any folder.
        if name in config.data and config.data[name] and ":" not in config.data[name]:
            config.data[name] = os.path.abspath(os.path.expanduser(config.data[name]))
    if start is not None:
        from bertjax.training.checkpoint import find_checkpoint
        from bertjax.training.starting_point import adopt

        config = adopt(config, find_checkpoint(start))
    return _checked(config, train, split)


def _saved_config_and_task(
    checkpoint: Any, overrides: list[str], corpus_wanted: bool = True, split: str = ""
) -> tuple[Any, Any]:
    from bertjax.config import load_saved_config
    from bertjax.tasks.finetuning import LABELS
    from bertjax.tasks.vocabulary_files import ENTRY, workdir_vocabulary
    from bertjax.training.checkpoint import workdir_of
    from bertjax.training.workdir import CONFIG

    workdir = workdir_of(checkpoint)
    config = load_saved_config(workdir / CONFIG, overrides)
    if "vocabulary" in config.data:
        # The one it started with may be gone.
        config.data.vocabulary = str(workdir / ENTRY)
        if (workdir / LABELS).exists():
            config.data.labels = str(workdir / LABELS)
    elif not corpus_wanted:
        config.data.corpus, config.model.vocab_size = "", workdir_vocabulary(workdir).size
    return _checked(config, split=split)


def _checked(config: Any, train: bool = False, split: str = "") -> tuple[Any, Any]:
    import importlib

    if split:
        if "eval_split" not in config.data:
            raise UsageError(f"the task {config.task} has no predictions to write")
        config.data.eval_split = split
    # Not a registry: the name is that of the one file that knows the task.
    if not config.task.isidentifier() or not (Path(__file__).parent / "tasks" / f"{config.task}.py").is_file():
        raise UsageError(f"config.task is {config.task!r}; there is no bertjax/tasks/{config.task}.py")
    module = importlib.import_module(f"bertjax.tasks.{config.task}")
    if not hasattr(module, "build"):
        raise UsageError(f"config.task is {config.task!r}, which is no task")
    module.check(config)
    return config, module.build(config, train)
