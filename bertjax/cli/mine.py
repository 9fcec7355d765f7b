"""`bertjax mine`: hard negatives for the training of an embedder."""

import argparse
import logging
import math
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from bertjax.cli.parser import CHECKPOINT, command, number, option
from bertjax.errors import UsageError
from bertjax.utils.terminal import show

logger = logging.getLogger(__name__)
# Names of prompts, as in `encode_query` and `encode_document` of sentence-transformers.
_QUERY_PROMPTS, _DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")
_POSITIVE = number(int, at_least=1)


@command(
    "bertjax mine --checkpoint runs/embed --input pairs.tsv --output hard.tsv --negatives 4 --margin 0.05",
    CHECKPOINT,
    option("--input", ".tsv, .csv or .jsonl file with anchors and positives", required=True, metavar="FILE"),
    option("--output", ".tsv, .csv or .jsonl file, which is replaced if it exists", required=True, metavar="FILE"),
    option("--anchor", "name of the column with anchors, such as questions", default="anchor"),
    option("--positive", "name of the column with positives, such as answers", default="positive"),
    option("--corpus", "more documents: a file with one text per line, or BEIR's corpus.jsonl", metavar="FILE"),
    option("--negatives", "number of negatives per row", type=_POSITIVE, default=1),
    option("--first_rank", "first rank of a negative; positives of the anchor have no rank", type=_POSITIVE, default=1),
    option("--last_rank", "last rank (default: as many ranks as --negatives; with --margin, 10 times)", type=_POSITIVE),
    option(
        "--margin",
        "minimum difference between the cosines of the anchor's least similar positive and of a negative",
        type=number(float, at_least=-2, at_most=2),
    ),
)
def mine(args: argparse.Namespace) -> None:
    """Adds hard negatives to pairs: for each anchor, the nearest documents that are not its positives."""
    from bertjax.api import AUTO, Pretrained
    from bertjax.data.finetuning.retrieval import read_texts_by_id
    from bertjax.data.finetuning.tables import table_format, write_table
    from bertjax.inference.encode import MEAN
    from bertjax.inference.inputs import read_texts
    from bertjax.inference.load import load_model
    from bertjax.inference.mine import hard_negatives, read_pairs

    count, margin = args.negatives, -math.inf if args.margin is None else args.margin
    last_rank = args.last_rank or args.first_rank - 1 + (count if args.margin is None else 10 * count)
    if last_rank < args.first_rank - 1 + count:
        raise UsageError(f"--last_rank={last_rank} is too low; use at least {args.first_rank - 1 + count}")
    table_format(Path(args.output))
    pairs, stats = read_pairs(Path(args.input), args.anchor, args.positive)
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
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    prompts = model.embedder.prompts if model.embedder else {}
    if not model.embedder:
        logger.warning(f"{args.checkpoint} is not a sentence embedder; its vectors are means over all tokens")

    def encode(texts: list[str], prompt_names: tuple[str, ...]) -> Any:
        prompt = next((prompts[name] for name in prompt_names if name in prompts), None)
        return Pretrained(model).encode(texts, AUTO if model.embedder else MEAN, prompt).pooled

    vectors = encode(list(pairs), _QUERY_PROMPTS), encode(documents, _DOCUMENT_PROMPTS)
    positions = {text: position for position, text in enumerate(documents)}
    own = [[positions[text] for text in positives] for positives in pairs.values()]
    mined = hard_negatives(*vectors, own, count, args.first_rank, last_rank, margin)
    rows, numbers = [], Counter[int]()
    positive_cosines, negative_cosines = [], []
    for (anchor, positives), (indices, cosines, own_cosines) in zip(pairs.items(), mined, strict=True):
        numbers[len(indices)] += 1
        positive_cosines += own_cosines.tolist()
        negative_cosines += cosines.tolist()
        if len(indices) == count:
            rows += [[anchor, positive, *(documents[index] for index in indices)] for positive in positives]
    found = ", ".join(f"{number} for {numbers[number]:,} anchors" for number in sorted(numbers)[::-1])
    if not rows:
        raise UsageError(
            f"too few negatives: {found}; lower --negatives, --first_rank or --margin, or raise --last_rank"
        )
    means = f"{fmean(positive_cosines):.3f} of positives, {fmean(negative_cosines):.3f} of negatives"
    logger.info(
        f"negatives: {found}; mean cosine {means}; {len(rows):,} of {len(positive_cosines):,} pairs are complete"
    )
    names = ["negative", *(f"negative_{number}" for number in range(2, count + 1))]
    write_table(Path(args.output), [args.anchor, args.positive, *names], rows)
    show(args.output)
