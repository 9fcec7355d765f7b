"""Entity F1 as `conlleval` defines it, for IOB1, IOB2, BIOES and BILOU alike, on any sequence of tags."""

from collections import Counter
from collections.abc import Iterable, Sequence

from bertjax.errors import UsageError

Chunk = tuple[int, int, str]


# L and U of BILOU are E and S of BIOES.
_PREFIXES = {"B": "B", "I": "I", "E": "E", "S": "S", "L": "E", "U": "S"}
_SCHEMES = ("BI", "BIES", "BILU")


def chunks(tags: Sequence[str]) -> set[Chunk]:
    """Entities of one sentence: first word, word after the last, type.

    A chunk begins at a B or S, at an I or E after O, after another type or after a chunk that E or S has ended, and
    goes on over I of its type, and over E, which ends it. So any tags have chunks, as in `conlleval` and `seqeval`.
    """
    found = set()
    start, kind = 0, ""
    for index, tag in enumerate([*tags, "O"]):
        given, _, here = tag.partition("-")
        prefix = _PREFIXES.get(given, "")
        goes_on = prefix in ("I", "E") and kind and here == kind
        if kind and not goes_on:
            found.add((start, index, kind))
            kind = ""
        if prefix and not goes_on:
            start, kind = index, here
        if prefix in ("E", "S") and kind:
            found.add((start, index + 1, kind))
            kind = ""
    return found


def has_entities(tags: Iterable[str]) -> bool:
    """Whether tags mark entities: each O or, in one scheme, B-TYPE or I-TYPE, E- or S-TYPE, L- or U-TYPE; not all O.

    Raises:
      UsageError: some do and some do not, or not in the same scheme.
    """
    inside = {tag for tag in tags if tag != "O"}
    kinds = {tag: prefix for tag in inside for prefix, _, kind in [tag.partition("-")] if kind}
    if inside and len(kinds) == len(inside) and any({*kinds.values()} <= {*scheme} for scheme in _SCHEMES):
        return True
    marked = {tag for tag, prefix in kinds.items() if prefix in ("B", "I")}
    if not marked:
        return False
    other = min(inside - marked, key=lambda tag: (kinds.get(tag) in _PREFIXES, tag))
    if kinds.get(other) in _PREFIXES:
        raise UsageError(
            "the tags mix schemes: they have E- or S- of BIOES beside L- or U- of BILOU; use one of them throughout"
        )
    raise UsageError(
        f"the tags mix schemes: {min(marked)} marks an entity, {other} does not; use O, B-TYPE and I-TYPE throughout, "
        "or neither B- nor I-"
    )


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
