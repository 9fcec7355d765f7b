"""`bertjax prepare`: creation of a tokenized corpus from text."""

import argparse
from pathlib import Path
from typing import Any

from bertjax.cli.parser import add_command, chosen_case
from bertjax.errors import UsageError
from bertjax.utils.hub import is_hub
from bertjax.utils.terminal import show

# Default size of a new vocabulary: the size of google-research/bert's uncased vocabulary.
_VOCAB_SIZE = 30522


def add_parser(commands: Any) -> None:
    """Adds the parser of this command."""
    parser = add_command(
        commands,
        "prepare",
        prepare,
        "Creates a tokenized corpus from text, and trains a vocabulary unless --vocab is set.",
        "bertjax prepare --input 'prose:books/*.txt' --vocab_size 8000 --output runs/corpus\n"
        "  bertjax prepare --input 'wiki:wikipedia/**' --output runs/wikipedia --runner beam",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="SPEC",
        help="input texts, one or more of text:GLOB (one sentence per line), prose:GLOB (running text), wiki:GLOB "
        "(WikiExtractor files), tfds:NAME/CONFIG:SPLIT (TensorFlow Datasets) and hf:ORG/NAME/CONFIG:SPLIT#COLUMN "
        "(Hugging Face Hub)",
    )
    parser.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="folder of the corpus; must not exist unless --overwrite is set",
    )
    parser.add_argument(
        "--vocab",
        metavar="FILE",
        help="vocab.txt, SentencePiece .model, tokenizer.json or a checkpoint such as hf:google-bert/bert-base-uncased "
        "(default: train a vocabulary)",
    )
    parser.add_argument(
        "--vocab_kind", default="wordpiece", help="kind of vocabulary to train: wordpiece or sentencepiece"
    )
    parser.add_argument("--vocab_size", type=int, help=f"size of the vocabulary to train (default: {_VOCAB_SIZE})")
    parser.add_argument(
        "--add_pieces",
        type=int,
        default=0,
        metavar="N",
        help="number of pieces to learn from the text and append to the WordPiece vocabulary of --vocab (default: 0)",
    )
    parser.add_argument(
        "--cased",
        action="store_true",
        help="keep case and accents (default: detected from --vocab; uncased for a new vocabulary)",
    )
    parser.add_argument("--uncased", action="store_true", help="convert to lower case; WordPiece also strips accents")
    parser.add_argument(
        "--heldout", type=float, default=0.01, help="fraction of documents to hold out for evaluation, in [0, 1)"
    )
    parser.add_argument("--workers", type=int, help="number of processes (default: one per core)")
    parser.add_argument(
        "--runner",
        default="local",
        help="local (processes on this machine) or beam (Apache Beam, local or on a cluster)",
    )
    parser.add_argument(
        "--runner_options",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="Beam pipeline options, such as runner=DataflowRunner project=P region=R temp_location=gs://...",
    )
    parser.add_argument("--data_dir", metavar="DIR", help="data folder of TensorFlow Datasets")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing corpus")


def prepare(args: argparse.Namespace) -> None:
    """Runs `bertjax prepare`."""
    from bertjax.data.corpus.prepare import prepare as run
    from bertjax.data.corpus.prepare import summary

    lower_case = chosen_case(args)
    if args.vocab and args.vocab_size is not None:
        raise UsageError("--vocab_size has no effect with --vocab; omit one of them")
    manifest = run(
        args.input,
        args.output,
        vocabulary=_checkpoint_vocabulary(args.vocab, lower_case) if _is_checkpoint(args.vocab) else args.vocab,
        vocabulary_kind=args.vocab_kind,
        vocabulary_size=_VOCAB_SIZE if args.vocab_size is None else args.vocab_size,
        add_pieces=args.add_pieces,
        lower_case=lower_case,
        heldout_fraction=args.heldout,
        workers=args.workers,
        runner=args.runner,
        runner_options=args.runner_options,
        data_dir=args.data_dir,
        overwrite=args.overwrite,
    )
    show(summary(args.output, manifest))


def _is_checkpoint(vocabulary: str | None) -> bool:
    return bool(vocabulary) and (is_hub(vocabulary) or Path(vocabulary).expanduser().is_dir())


def _checkpoint_vocabulary(checkpoint: str, lower_case: bool | None) -> Any:
    """Returns the vocabulary of a checkpoint. `lower_case`, if not None, replaces the setting of its tokenizer."""
    from bertjax.convert.convert import read_vocabulary

    return read_vocabulary(checkpoint, lower_case)
