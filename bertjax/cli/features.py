"""`bertjax fill_mask`, `features` and `encode`: predictions of masked tokens, and embeddings of tokens and texts."""

import argparse
from itertools import chain, islice
from pathlib import Path

from bertjax.cli.parser import CHECKPOINT, command, number, option
from bertjax.errors import UsageError
from bertjax.utils.terminal import show


@command(
    'bertjax fill_mask --checkpoint runs/mini "Paris is the [MASK] of France."',
    option(
        "texts", "text with [MASK], or the model's mask token, for each token to predict", nargs="+", metavar="text"
    ),
    CHECKPOINT,
    option("--top", "number of predicted tokens to print per [MASK]", type=number(int), default=5),
)
def fill_mask(args: argparse.Namespace) -> None:
    """Prints the most probable tokens for each [MASK] of a text."""
    from bertjax.inference.load import load_model
    from bertjax.inference.predict import fill_mask as run
    from bertjax.inference.predict import format_probabilities

    model = load_model(args.checkpoint)
    # Predict all texts before printing, so that a text without a mask token produces only an error message.
    predictions_of_texts = [run(model, text, args.top) for text in args.texts]
    for text, predictions in zip(args.texts, predictions_of_texts, strict=True):
        show(text)
        for tokens in predictions:
            show(f"  {format_probabilities(tokens)}")


def layer_indices(text: str) -> tuple[int, ...]:
    """Parses layer indices such as `-1,-2`."""
    return tuple(int(index) for index in text.split(","))


@command(
    'bertjax features --checkpoint runs/mini "A river bank." "A bank account." --layers=-1,-2 --output banks',
    option("texts", "text, or two texts separated by |||", nargs="*", metavar="text"),
    CHECKPOINT,
    option("--input", "file with one text per line (-: standard input)", metavar="FILE"),
    option(
        "--layers",
        "comma-separated layer indices, such as --layers=-1,-2; 0 is the embeddings, -1 is the last layer",
        type=layer_indices,
        default="-1",
    ),
    option("--seq_len", "maximum tokens per text (default: the model's maximum)", type=number(int)),
    option(
        "--output",
        "folder for .npz files of about 64 MB each, with the arrays that docs/finetuning.md describes; an interrupted "
        "command resumes after the last complete file",
        metavar="DIR",
    ),
    option("--show", "number of texts to print", type=number(int, at_least=0), default=5),
)
def features(args: argparse.Namespace) -> None:
    """Prints contextual embeddings of texts and writes them to files."""
    from bertjax.inference.features import FeatureExtractor, format_features, num_texts, write_shards
    from bertjax.inference.inputs import read_texts
    from bertjax.inference.load import load_model

    if not args.texts and not args.input:
        raise UsageError("no texts; pass texts, or set --input FILE")
    texts = read_texts(args.texts, args.input)
    model = load_model(args.checkpoint)
    extractor = FeatureExtractor(model, args.layers, model.row_len(args.seq_len))
    shown_texts = list(islice(texts, args.show))
    indexed_shards = ((0, shard) for shard in extractor.shards(shown_texts))
    if args.output:
        indexed_shards = write_shards(Path(args.output), extractor, chain(shown_texts, texts))
    for start, shard in indexed_shards:
        for index in range(min(num_texts(shard), max(0, args.show - start))):
            show(format_features(shown_texts[start + index], shard, index, args.layers))
    if args.output:
        show(args.output)


@command(
    "bertjax encode --checkpoint runs/embedder --input texts.txt --output vectors.npy",
    CHECKPOINT,
    option("--input", "file with one text per line (-: standard input)", required=True, metavar="FILE"),
    option("--output", ".npy file; to resume, run an interrupted command again", required=True, metavar="FILE"),
    option("--pooling", "pooling of the last layer (default: the model's modules)", choices=("cls", "mean")),
    option(
        "--prompt_name",
        "name of the model's prompt to prepend to each text, such as query (default: the model's default prompt)",
    ),
    option("--dtype", "dtype of the computation (default: the checkpoint's)", choices=("float32", "bfloat16")),
)
def encode(args: argparse.Namespace) -> None:
    """Writes one vector per text to a NumPy file."""
    from bertjax.inference.encode import VectorEncoder, resolve_prompt
    from bertjax.inference.inputs import STDIN, read_texts
    from bertjax.inference.load import load_model
    from bertjax.model.config import AUTO

    texts = read_texts((), args.input)
    model, pooling = load_model(args.checkpoint, dtype=args.dtype), args.pooling or AUTO
    num_texts = None if args.input == STDIN else sum(1 for _ in read_texts((), args.input))
    encoder = VectorEncoder(model, pooling, resolve_prompt(model, pooling, None, args.prompt_name), num_texts)
    vectors = encoder.write(Path(args.output), texts)
    show(f"{args.output}: {vectors.dtype} [{vectors.shape[0]}, {vectors.shape[1]}]")
