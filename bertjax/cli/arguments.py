"""The parser of the command line: each command with its options and an example."""

import argparse
import sys
from typing import Any, NoReturn

from bertjax.cli import commands
from bertjax.cli import predict as asking
from bertjax.errors import UsageError, shortened

_ANY_CHECKPOINT = "a workdir, a step in it, a folder of Hugging Face, or a checkpoint of TensorFlow 1"
# What options that name a file or a folder are shown with.
PATHS = ("DIR", "FILE", "CKPT", "SRC", "DST")
# Of a whole number on the command line.
_MOST = 2**31 - 1
_CONFIG_HELP = "experiment, typed arguments after a colon: pretrain:size=base,seq_len=128, or a FILE.py:..."


def _path(text: str) -> str:
    if not text.strip():
        # It would be the current folder, or no file at all.
        raise argparse.ArgumentTypeError("the path is empty; name one, or leave the option out")
    return text


def _whole_number(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shortened(repr(text))} is no whole number") from None
    if abs(number) > _MOST:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is beyond {_MOST:,}")
    return number


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in the one line that every error of the program is; refuses empty paths, absurd numbers."""

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """What is shown as one of `PATHS` names a file or a folder."""
        if settings.get("metavar", "").partition("[")[0] in PATHS:
            settings.setdefault("type", _path)
        if settings.get("type") is int:
            settings["type"] = _whole_number
        return super().add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


class _Version(argparse.Action):
    """Prints the version, which takes as long to find out as all else before a command begins."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        import importlib.metadata

        print(f"bertjax {importlib.metadata.version('bertjax')}")
        sys.exit()


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and examples as they are typed."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in (None, False) else action.help


def _add_distributed(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--distributed",
        action="store_true",
        help="refuse to train alone; where processes are told of each other they join without it",
    )


def parser() -> argparse.ArgumentParser:
    """Parses to `run`, which does what the command is for, and what it takes."""
    whole = _Parser(
        prog="bertjax",
        description="BERT pre-training in JAX and Flax, built for TPUs.",
        epilog="`bertjax COMMAND --help` shows each command with an example. --debug shows tracebacks.",
        allow_abbrev=False,
    )
    whole.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    top = whole.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(
        name: str, run: Any, does: str, example: str, config: bool = False, group: Any = top
    ) -> argparse.ArgumentParser:
        sub = group.add_parser(
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
        commands.prepare,
        "Turns text into a tokenised corpus, and trains a vocabulary where none is given.",
        "bertjax prepare --input docs: --vocab_size 8000 --output runs/corpus\n"
        "  bertjax prepare --input 'wiki:wikipedia/**' --output runs/wikipedia --runner beam",
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
    sub.add_argument(
        "--runner", default="local", help="local: this machine's cores; beam: Apache Beam, here or on a cluster"
    )
    sub.add_argument(
        "--runner_options",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="of Beam's pipeline: runner=DataflowRunner project=P region=R temp_location=gs://...",
    )
    sub.add_argument("--data_dir", metavar="DIR", help="where TensorFlow Datasets keeps its data")
    sub.add_argument("--overwrite", action="store_true", help="replace an existing output when the new one is complete")

    sub = command(
        "inspect",
        commands.inspect,
        "Shows what the model will see in training, as text.",
        "bertjax inspect --config experiments/pretrain.py:corpus=runs/corpus --rows 2",
        config=True,
    )
    sub.add_argument("--steps", type=int, default=1, help="batches of steps 0 to STEPS - 1")
    sub.add_argument("--rows", type=int, default=3, help="examples printed of each batch")
    sub.add_argument("--npz", metavar="FILE", help="write the whole batches there")

    sub = command(
        "describe",
        commands.describe,
        "Prints parameters by module, FLOPs per token, batch and schedule.",
        "bertjax describe --config experiments/pretrain.py:size=large,phases=2",
        config=True,
    )
    sub.add_argument("--fields", action="store_true", help="every field of the config instead, and what it means")

    sub = command(
        "train",
        commands.train,
        "Trains, or goes on where the workdir stopped.",
        "bertjax train --config experiments/pretrain.py:size=mini,corpus=runs/corpus --workdir runs/mini",
        config=True,
    )
    sub.add_argument(
        "--workdir", required=True, metavar="DIR", help="checkpoints, metrics, curves; resumed if it exists"
    )
    sub.add_argument("--init_from", metavar="CKPT", help=f"start with the parameters of {_ANY_CHECKPOINT}")
    _add_distributed(sub)

    sub = command(
        "sweep",
        commands.sweep,
        "Runs the trials of a grid, each with several seeds, and selects on dev.",
        "bertjax sweep --config experiments/glue.py:task=rte,path=glue_data --init_from runs/base --workdir runs/rte "
        "--grid optimizer.learning_rate=1e-4,3e-4 --grid data.batch_size=16,32",
        config=True,
    )
    sub.add_argument("--workdir", required=True, metavar="DIR", help="of the sweep; goes on where it stopped")
    sub.add_argument("--init_from", metavar="CKPT", help=f"start each trial with the parameters of {_ANY_CHECKPOINT}")
    _add_distributed(sub)
    sub.add_argument("--seeds", type=int, default=1, help="random restarts of each setting")
    sub.add_argument(
        "--grid",
        action="append",
        metavar="FIELD=VALUE,VALUE",
        help="values of a field of the config, once a field: every combination is run, in place of what the "
        "experiment's sweep() yields; no value can have a comma in it",
    )

    sub = command(
        "reproduce",
        commands.reproduce,
        "Runs what a table of the paper needs: prints the plan with its time, skips what is done, goes on where it "
        "was stopped.",
        "bertjax reproduce --config experiments/tables/table5.py:scale=small,corpus=runs/corpus,glue=glue_data "
        "--results runs/tables --plan",
    )
    sub.add_argument("--config", metavar="FILE[:ARGS]", help="of experiments/tables, such as tables/table5")
    sub.add_argument(
        "--results", required=True, metavar="DIR", help="of all runs; tables share what they have in common"
    )
    sub.add_argument("--plan", action="store_true", help="print the plan only")
    _add_distributed(sub)

    sub = command(
        "table",
        commands.table,
        "Prints tables of the paper beside our results, and the commands that fill what is missing.",
        "bertjax table 5 --results runs/tables",
    )
    sub.add_argument("number", nargs="+", help="1 to 8, figure3, figure5, or a name of your own")
    sub.add_argument(
        "--results",
        action="append",
        required=True,
        metavar="DIR",
        help="folder of `bertjax reproduce`, or a file that --keep wrote; give it again to look up runs that the first "
        "lacks",
    )
    sub.add_argument("--markdown", action="store_true", help="instead of columns for a terminal")
    sub.add_argument("--plot", metavar="FILE", help="draw figure5 there, as PNG")
    sub.add_argument("--keep", metavar="FILE", help="write the results behind these tables into one JSON file")

    sub = command(
        "evaluate",
        commands.evaluate,
        "Prints a checkpoint's metrics on held-out data.",
        "bertjax evaluate --checkpoint runs/mini",
        config=True,
    )
    sub.add_argument("--checkpoint", required=True, metavar="CKPT", help=_ANY_CHECKPOINT)

    sub = command(
        "predict",
        asking.predict,
        "Predicts texts, or the task's data, which is written in its official format.",
        'bertjax predict --checkpoint runs/sst2 "a good film" "a film"\n'
        '  bertjax predict --checkpoint runs/squad --context_file passage.txt "who wrote it?"\n'
        "  bertjax predict --checkpoint runs/mrpc --output runs/glue --columns index",
        config=True,
    )
    sub.add_argument(
        "texts",
        nargs="*",
        metavar="text",
        help="a sentence, words to tag, a question, or, with ||| between, a pair, or a beginning and its endings",
    )
    sub.add_argument("--checkpoint", required=True, metavar="CKPT", help=_ANY_CHECKPOINT)
    sub.add_argument("--text", metavar="FILE", help="a text on each line; - reads standard input")
    sub.add_argument("--context", metavar="TEXT", help="the passage that questions are on")
    sub.add_argument("--context_file", metavar="FILE", help="a file with the passage")
    sub.add_argument("--seq_len", type=int, help="cut texts to so many tokens (default: as in training)")
    sub.add_argument("--json", action="store_true", help="print an object of JSON a text")
    sub.add_argument("--logits", action="store_true", help="beside the probabilities")
    sub.add_argument(
        "--output",
        metavar="DIR",
        help="gets the files of the task's data, replacing those of the same name: the official ones, and beside each "
        "a .jsonl with line, prediction and probabilities of every row",
    )
    sub.add_argument("--split", help="of the task's data: test (the default) or dev")
    sub.add_argument("--columns", metavar="NAME,NAME", help="of the task's file, to stand in the .jsonl")

    sub = command(
        "ensemble",
        asking.ensemble,
        "Predicts with several fine-tuned checkpoints as one, by the mean of their logits, and tells its metrics.",
        "bertjax ensemble --checkpoint runs/squad1 --checkpoint runs/squad2 --output runs/ensemble",
        config=True,
    )
    sub.add_argument("--checkpoint", required=True, action="append", metavar="CKPT", help="of a member; once for each")
    sub.add_argument("--split", default="dev", help="of the task's data: dev (the default) or test")
    sub.add_argument("--output", required=True, metavar="DIR", help="for the predictions and results.json")

    sub = command(
        "submission",
        asking.submission,
        "Packs GLUE predictions into the archive that its server takes.",
        "bertjax submission --predictions runs/submission --output runs/submission.zip",
    )
    sub.add_argument("--predictions", required=True, metavar="DIR", help="what predict wrote, all tasks together")
    sub.add_argument("--output", required=True, metavar="FILE", help="the archive")
    sub.add_argument("--own_wnli", action="store_true", help="take the folder's WNLI.tsv, not the majority class")
    sub.add_argument(
        "--partial", action="store_true", help="pack what there is, although the server takes whole ones only"
    )

    sub = command(
        "fill_mask",
        asking.fill_mask,
        "Fills each [MASK] of a text with the most probable pieces.",
        'bertjax fill_mask --checkpoint runs/mini "Paris is the [MASK] of France."',
    )
    sub.add_argument("texts", nargs="+", metavar="text")
    sub.add_argument("--checkpoint", required=True, metavar="CKPT", help=_ANY_CHECKPOINT)
    sub.add_argument("--top", type=int, default=5, help="pieces a mask")

    sub = command(
        "features",
        asking.features,
        "Shows contextual embeddings of texts, and writes them.",
        'bertjax features --checkpoint runs/mini "A river bank." "A bank account." --layers=-1,-2 --output banks',
    )
    sub.add_argument("texts", nargs="*", metavar="text", help="a text, or a pair with ||| between")
    sub.add_argument("--checkpoint", required=True, metavar="CKPT", help=_ANY_CHECKPOINT)
    sub.add_argument("--input", metavar="FILE", help="more texts, one a line; - reads standard input")
    sub.add_argument("--layers", default="-1", help="0 is the embeddings, -1 the last layer: --layers=-1,-2")
    sub.add_argument("--seq_len", type=int, help="cut texts to so many tokens (default: the model's)")
    sub.add_argument(
        "--output",
        metavar="DIR",
        help="gets 00000.npz, 00001.npz, ... of some 64 MB: hidden_states [token, layer, width] and, for each token, "
        "tokens, input_ids, segment_ids, words and characters; text i is tokens offsets[i] to offsets[i + 1]. The same "
        "command goes on after the last one that is there",
    )
    sub.add_argument("--show", type=int, default=5, help="how many of the first texts to print")

    sub = command(
        "convert",
        commands.convert,
        "Turns a checkpoint of bertjax, Hugging Face or TensorFlow 1 into another of these.",
        "bertjax convert uncased_L-12_H-768_A-12 runs/base_uncased",
    )
    sub.add_argument("source", metavar="SRC", help=_ANY_CHECKPOINT)
    sub.add_argument("destination", metavar="DST", help="a folder, which must not exist yet")
    sub.add_argument("--format", default="bertjax", help="of DST: bertjax, huggingface or tensorflow")
    sub.add_argument("--overwrite", action="store_true", help="replace a checkpoint at DST when the new one is whole")

    sub = command(
        "plan",
        commands.plan,
        "Compiles the train step for a TPU that is not here: whether it fits, how fast it can be, what it costs.",
        "bertjax plan --config pretrain:size=large,seq_len=512 --config.model.remat=full --topology v5e:16x16",
        config=True,
    )
    sub.add_argument(
        "--topology", metavar="GENERATION:SIZE", help="chips of one slice: v3:4x4, v4:4x4x4, v5e:16x16, ..."
    )
    sub.add_argument("--slices", type=int, default=1, help="of that topology, with a slower network between them")
    sub.add_argument("--price_per_chip_hour", type=float, help="in any currency; tells the cost of the run")
    sub.add_argument("--search", action="store_true", help="find the largest batch and the best remat policy first")
    sub.add_argument("--output", metavar="FILE", help="keep the plan there, as JSON")
    sub.add_argument("--compare", nargs=2, metavar="FILE", help="show two kept plans side by side instead")

    bench = top.add_parser(
        "bench",
        help="Measures the train step or the input pipeline.",
        epilog="example:\n  bertjax bench step --config experiments/pretrain.py:size=tiny,quick=true",
        formatter_class=_Help,
        allow_abbrev=False,
    ).add_subparsers(dest="what", metavar="step|input", required=True)
    sub = command(
        "step",
        commands.bench_step,
        "Times train steps of the first phase on synthetic batches; ends with one JSON line.",
        "bertjax bench step --config experiments/pretrain.py:size=base,batch=sequences --config.data.batch_size=8",
        config=True,
        group=bench,
    )
    sub.add_argument("--steps", type=int, default=10, help="timed steps, after one that compiles")
    sub = command(
        "input",
        commands.bench_input,
        "Times the input pipeline of the first phase; ends with one JSON line.",
        "bertjax bench input --config experiments/pretrain.py:corpus=runs/corpus --seconds 10",
        config=True,
        group=bench,
    )
    sub.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    return whole
