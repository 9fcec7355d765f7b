"""`bertjax fill_mask`, `features`, `encode` and `mine`: masked tokens, embeddings of texts, and hard negatives."""

import argparse
import logging
import math
from collections import Counter
from itertools import chain, islice
from pathlib import Path

from bertjax.cli.parser import CHECKPOINT, command, count, number, option
from bertjax.errors import UsageError
from bertjax.utils.terminal import show

logger = logging.getLogger(__name__)


@command(
    'bertjax fill_mask --checkpoint runs/mini "Paris is the [MASK] of France."',
    option("texts text", "text with [MASK], or the model's mask token, for each token to predict", nargs="+"),
    CHECKPOINT,
    count("--top", "number of predicted tokens to print per [MASK]", default=5),
)
def fill_mask(args: argparse.Namespace) -> None:
    """Prints the most probable tokens for each [MASK] of a text."""
    from bertjax.inference import predict
    from bertjax.inference.load import load_model

    model = load_model(args.checkpoint)
    # Predict all texts before printing, so that a text without a mask token produces only an error message.
    predictions_of_texts = [predict.fill_mask(model, text, args.top) for text in args.texts]
    for text, predictions in zip(args.texts, predictions_of_texts, strict=True):
        show(text)
        for tokens in predictions:
            show(f"  {predict.format_probabilities(tokens)}")


def layer_indices(text: str) -> tuple[int, ...]:
    """Parses layer indices such as `-1,-2`."""
    return tuple(int(index) for index in text.split(","))


@command(
    'bertjax features --checkpoint runs/mini "A river bank." "A bank account." --layers=-1,-2 --output banks',
    option("texts text", "text, or two texts separated by |||", nargs="*"),
    CHECKPOINT,
    option("--input FILE", "file with one text per line (-: standard input)"),
    option(
        "--layers",
        "layer indices, such as --layers=-1,-2; 0 is the embeddings, -1 the last layer",
        type=layer_indices,
        default="-1",
    ),
    count("--seq_len", "maximum tokens per text (default: the model's maximum)"),
    option(
        "--output DIR",
        "folder for .npz files, see docs/finetuning.md; an interrupted command resumes after the last complete file",
    ),
    count("--show", "number of texts to print", default=5, at_least=0),
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
    option("--input FILE", "file with one text per line (-: standard input)", required=True),
    option("--output FILE", ".npy file; to resume, run an interrupted command again", required=True),
    option("--pooling", "last layer's pooling (default: modules of sentence-transformers)", choices=("cls", "mean")),
    option(
        "--prompt_name", "name of a prompt of the model to prepend, such as query (default: the model's default prompt)"
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


@command(
    "bertjax mine --checkpoint runs/embed --input pairs.tsv --output hard.tsv --negatives 4 --margin 0.05",
    CHECKPOINT,
    option("--input FILE", ".tsv, .csv or .jsonl file with anchors and positives", required=True),
    option("--output FILE", ".tsv, .csv or .jsonl file, which is replaced if it exists", required=True),
    option("--anchor", "name of the column with anchors, such as questions", default="anchor"),
    option("--positive", "name of the column with positives, such as answers", default="positive"),
    option("--corpus FILE", "file with more documents: one text per line, or BEIR's corpus.jsonl"),
    count("--negatives", "number of negatives per row", default=1),
    count("--first_rank", "first rank to use; rank 1 is the nearest non-positive document", default=1),
    count("--last_rank", "last rank to use (default: use --negatives ranks, or 10 times as many with --margin)"),
    option(
        "--margin",
        "minimum difference: cosine of the anchor's least similar positive minus cosine of a negative",
        type=number(float, at_least=-2, at_most=2),
    ),
)
def mine(args: argparse.Namespace) -> None:
    """Adds hard negatives to pairs: for each anchor, the nearest documents that are not its positives."""
    import numpy as np

    from bertjax.data.finetuning.retrieval import read_texts_by_id
    from bertjax.data.finetuning.tables import ReadStats, read_table, table_format, write_table
    from bertjax.data.finetuning.text_columns import read_pairs, split_positives
    from bertjax.inference.encode import encode_texts
    from bertjax.inference.inputs import read_texts
    from bertjax.inference.load import load_model
    from bertjax.inference.mine import hard_negatives
    from bertjax.utils.io import make_output_folder

    per_row, margin = args.negatives, -math.inf if args.margin is None else args.margin
    lowest = args.first_rank - 1 + per_row
    last_rank = args.last_rank or (lowest if args.margin is None else args.first_rank - 1 + 10 * per_row)
    if last_rank < lowest:
        raise UsageError(f"--last_rank={last_rank} is too low; use at least {lowest}")
    output, columns, stats = Path(args.output), (args.anchor, args.positive), ReadStats(args.input)
    table_format(output)
    if output.resolve() == Path(args.input).resolve():
        raise UsageError(f"--output={args.output} is the input; choose another file")
    table = split_positives(read_table(Path(args.input), columns, stats), args.positive, stats)
    pairs = read_pairs(table, columns, stats)
    logger.info(stats.summary())
    texts = [text for positives in pairs.values() for text in positives]
    if args.corpus and Path(args.corpus).suffix == ".jsonl":
        corpus, stats = read_texts_by_id(Path(args.corpus))
        logger.info(stats.summary())
        texts += corpus.values()
    else:
        texts += read_texts((), args.corpus)
    documents = [text for text in dict.fromkeys(texts) if text.strip()]
    logger.info(f"{len(pairs):,} distinct anchors, {len(documents):,} distinct documents")
    model = load_model(args.checkpoint)
    make_output_folder(output.parent)
    if not model.embedder:
        logger.warning(f"{args.checkpoint} is not a sentence embedder; its vectors are means over all tokens")
    vectors = encode_texts(model, [*pairs], is_query=True), encode_texts(model, documents, is_query=False)
    positions = {text: position for position, text in enumerate(documents)}
    positive_indices = [[positions[text] for text in positives] for positives in pairs.values()]
    mined = [*hard_negatives(*vectors, positive_indices, per_row, args.first_rank, last_rank, margin)]
    rows = [
        [anchor, positive, *(documents[index] for index in indices)]
        for (anchor, positives), (indices, _, _) in zip(pairs.items(), mined, strict=True)
        if len(indices) == per_row
        for positive in positives
    ]
    numbers = Counter(len(indices) for indices, _, _ in mined)
    found = ", ".join(f"{number} each for {numbers[number]:,} anchors" for number in sorted(numbers)[::-1])
    if not rows:
        raise UsageError(f"too few negatives: {found}; lower --negatives, --first_rank, --margin or raise --last_rank")
    negative_cosines, positive_cosines = (np.concatenate([row[i] for row in mined]) for i in (1, 2))
    logger.info(
        f"negatives: {found}; mean cosine: positives {positive_cosines.mean():.3f}, negatives "
        f"{negative_cosines.mean():.3f}; {len(rows):,} of {len(positive_cosines):,} pairs have enough negatives"
    )
    names = ["negative", *(f"negative_{number}" for number in range(2, per_row + 1))]
    write_table(output, [*columns, *names], rows)
    show(args.output)
