"""`bertjax mine`: hard negatives for the training of an embedder."""

import argparse
import logging
import math
from collections import Counter
from pathlib import Path

from bertjax.cli.parser import CHECKPOINT, command, number, option
from bertjax.errors import UsageError
from bertjax.utils.terminal import show

logger = logging.getLogger(__name__)
_POSITIVE = number(int, at_least=1)


@command(
    "bertjax mine --checkpoint runs/embed --input pairs.tsv --output hard.tsv --negatives 4 --margin 0.05",
    CHECKPOINT,
    option("--input", ".tsv, .csv or .jsonl file with anchors and positives", required=True, metavar="FILE"),
    option("--output", ".tsv, .csv or .jsonl file, which is replaced if it exists", required=True, metavar="FILE"),
    option("--anchor", "name of the column with anchors, such as questions", default="anchor"),
    option("--positive", "name of the column with positives, such as answers", default="positive"),
    option("--corpus", "file with more documents: one text per line, or BEIR's corpus.jsonl", metavar="FILE"),
    option("--negatives", "number of negatives per row", type=_POSITIVE, default=1),
    option("--first_rank", "first rank to use; rank 1 is the nearest non-positive document", type=_POSITIVE, default=1),
    option("--last_rank", "last rank (default: --negatives ranks, or 10 times as many with --margin)", type=_POSITIVE),
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

    count, margin = args.negatives, -math.inf if args.margin is None else args.margin
    lowest = args.first_rank - 1 + count
    last_rank = args.last_rank or (lowest if args.margin is None else args.first_rank - 1 + 10 * count)
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
    output.parent.mkdir(parents=True, exist_ok=True)
    if not model.embedder:
        logger.warning(f"{args.checkpoint} is not a sentence embedder; its vectors are means over all tokens")
    vectors = encode_texts(model, [*pairs], is_query=True), encode_texts(model, documents, is_query=False)
    positions = {text: position for position, text in enumerate(documents)}
    positive_indices = [[positions[text] for text in positives] for positives in pairs.values()]
    mined = [*hard_negatives(*vectors, positive_indices, count, args.first_rank, last_rank, margin)]
    rows = [
        [anchor, positive, *(documents[index] for index in indices)]
        for (anchor, positives), (indices, _, _) in zip(pairs.items(), mined, strict=True)
        if len(indices) == count
        for positive in positives
    ]
    numbers = Counter(len(indices) for indices, _, _ in mined)
    found = ", ".join(f"{number} each for {numbers[number]:,} anchors" for number in sorted(numbers)[::-1])
    if not rows:
        raise UsageError(
            f"too few negatives: {found}; lower --negatives, --first_rank or --margin, or raise --last_rank"
        )
    negative_cosines, positive_cosines = (np.concatenate([row[i] for row in mined]) for i in (1, 2))
    logger.info(
        f"negatives: {found}; mean cosine: positives {positive_cosines.mean():.3f}, negatives "
        f"{negative_cosines.mean():.3f}; {len(rows):,} of {len(positive_cosines):,} pairs have enough negatives"
    )
    names = ["negative", *(f"negative_{number}" for number in range(2, count + 1))]
    write_table(output, [*columns, *names], rows)
    show(args.output)
