"""`bertjax prepare`: creation of a tokenized corpus from text."""

import argparse
from pathlib import Path

from bertjax.cli.parser import case_options, command, count, flag, number, option
from bertjax.errors import UsageError
from bertjax.utils.hub import is_hub
from bertjax.utils.terminal import show

# Default size of a new vocabulary: the size of google-research/bert's uncased vocabulary.
_VOCAB_SIZE = 30522


@command(
    "bertjax prepare --input 'prose:books/*.txt' --vocab_size 8000 --output runs/corpus\n"
    "  bertjax prepare --input 'wiki:wikipedia/**' --output runs/wikipedia --runner beam",
    option(
        "--input SPEC",
        "one or more of text:GLOB (one sentence per line), prose:GLOB (running text), lines:GLOB (one document per "
        "line), wiki:GLOB (WikiExtractor), tfds:NAME/CONFIG:SPLIT (TensorFlow Datasets) and "
        "hf:ORG/NAME/CONFIG:SPLIT#COLUMN (Hugging Face Hub)",
        nargs="+",
        required=True,
    ),
    option("--output DIR", "folder of the corpus; must not exist unless --overwrite is set", required=True),
    option(
        "--vocab FILE",
        "vocab.txt, SentencePiece .model, tokenizer.json or a checkpoint such as hf:google-bert/bert-base-uncased "
        "(default: train a vocabulary)",
    ),
    option(
        "--vocab_kind",
        "vocabulary to train (bpe: byte-level, cased unless --uncased)",
        choices=("wordpiece", "sentencepiece", "bpe"),
        default="wordpiece",
    ),
    count("--vocab_size", f"size of the vocabulary to train (default: {_VOCAB_SIZE})"),
    count(
        "--add_pieces", "pieces to learn and append to a WordPiece or BPE --vocab (default: 0)", default=0, at_least=0
    ),
    case_options(
        "keep case and accents (default: detected from --vocab; a new WordPiece or SentencePiece vocabulary is "
        "uncased, but WordPiece is cased if many letters have accents or vowel signs)",
        "convert to lower case; WordPiece also strips accents",
    ),
    option(
        "--heldout",
        "fraction of documents to hold out for evaluation, in [0, 1)",
        type=number(float, at_least=0, below=1),
        default=0.01,
    ),
    option("--workers", "number of processes (default: one per core)", type=number(int, at_least=1, at_most=1024)),
    option("--runner", "processes on this machine, or Apache Beam", choices=("local", "beam"), default="local"),
    option(
        "--runner_options NAME=VALUE",
        "Beam pipeline options, such as runner=DataflowRunner project=P region=R temp_location=gs://...",
        nargs="+",
        default=[],
    ),
    option("--data_dir DIR", "data folder of TensorFlow Datasets"),
    flag("--overwrite", "replace an existing corpus"),
)
def prepare(args: argparse.Namespace) -> None:
    """Creates a tokenized corpus from text, and trains a vocabulary unless --vocab is set."""
    from bertjax.data.corpus import prepare

    vocabulary = args.vocab
    if vocabulary and args.vocab_size is not None:
        raise UsageError("--vocab_size has no effect with --vocab; omit one of them")
    if vocabulary and (is_hub(vocabulary) or Path(vocabulary).expanduser().is_dir()):
        from bertjax.convert.convert import read_vocabulary

        vocabulary = read_vocabulary(vocabulary, args.lower_case)
    manifest = prepare.prepare(
        args.input,
        args.output,
        vocabulary=vocabulary,
        vocabulary_kind=args.vocab_kind,
        vocabulary_size=_VOCAB_SIZE if args.vocab_size is None else args.vocab_size,
        add_pieces=args.add_pieces,
        lower_case=args.lower_case,
        heldout_fraction=args.heldout,
        workers=args.workers,
        runner=args.runner,
        runner_options=args.runner_options,
        data_dir=args.data_dir,
        overwrite=args.overwrite,
    )
    show(prepare.summary(args.output, manifest))
