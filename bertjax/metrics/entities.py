"""Entity F1 as `conlleval` defines it, for IOB1 and IOB2 alike, on any sequence of tags."""

from collections import Counter
from collections.abc import Iterable, Sequence

from bertjax.errors import UsageError

Chunk = tuple[int, int, str]


def chunks(tags: Sequence[str]) -> set[Chunk]:
    """Entities of one sentence: first word, word after the last, type.

    A chunk begins at a B, at an I after O or after another type, and goes on over I of its type.
    """
    found = set()
    start, kind = 0, ""
    for index, tag in enumerate([*tags, "O"]):
        prefix, _, here = tag.partition("-")
        goes_on = prefix == "I" and here == kind
        if kind and not goes_on:
            found.add((start, index, kind))
            kind = ""
        if prefix in ("B", "I") and not goes_on:
            start, kind = index, here
    return found


def has_entities(tags: Iterable[str]) -> bool:
    """Whether tags mark entities: each O, B-TYPE or I-TYPE, and not all O.

    Raises:
      UsageError: some do and some do not, so that the scheme is mixed up.
    """
    inside = {tag for tag in tags if tag != "O"}
    marked = {tag for tag in inside if tag[:2] in ("B-", "I-") and len(tag) > 2}
    if marked and marked != inside:
        raise UsageError(
            f"the tags mix schemes: {min(marked)} marks an entity, {min(inside - marked)} does not; use O, B-TYPE and "
            "I-TYPE throughout, or neither B- nor I-"
        )
    return bool(marked)


def entity_scores(wanted: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and F1 in percent over all entities, and F1 of each type; a match has both ends and the type.

    Args:
      wanted, predicted: tags of the words of each sentence, such as `I-PER` or `O`.
    """
    there, given, right = Counter(), Counter(), Counter()
    for sentence, guess in zip(wanted, predicted, strict=True):
        a, b = chunks(sentence), chunks(guess)
        for counter, found in ((there, a), (given, b), (right, a & b)):
            counter.update(kind for _, _, kind in found)
    precision, recall, f1 = _measures(right.total(), given.total(), there.total())
    types = {f"f1_{kind}": _measures(right[kind], given[kind], there[kind])[2] for kind in sorted({*there, *given})}
    return {"f1": f1, "precision": precision, "recall": recall, **types}


def _measures(right: int, given: int, there: int) -> tuple[float, float, float]:
    precision = 100.0 * right / given if given else 0.0
    recall = 100.0 * right / there if there else 0.0
    return precision, recall, 2 * precision * recall / (precision + recall) if right else 0.0
