"""Entity-level F1 for IOB1, IOB2, BIOES and BILOU tags, as computed by `conlleval`."""

from collections import Counter
from collections.abc import Iterable, Sequence

from bertjax.errors import UsageError

# (first word, end word (exclusive), type)
Entity = tuple[int, int, str]

# L and U of BILOU are equivalent to E and S of BIOES.
_PREFIXES = {"B": "B", "I": "I", "E": "E", "S": "S", "L": "E", "U": "S"}
_SCHEMES = ("BI", "BIES", "BILU")


def extract_entities(tags: Sequence[str]) -> set[Entity]:
    """Returns the entities of one sentence as tuples of first word, end word (exclusive) and type.

    B starts an entity, and S is an entity of one word. I and E start an entity after O, E or S, or after a tag of a
    different type. An entity continues with I tags of its type, up to and including an E tag. Every tag sequence is
    valid, as in `conlleval` and `seqeval`.
    """
    entities = set()
    start, current_type = 0, ""
    for index, tag in enumerate([*tags, "O"]):
        raw_prefix, _, tag_type = tag.partition("-")
        prefix = _PREFIXES.get(raw_prefix, "")
        is_continued = prefix in ("I", "E") and current_type and tag_type == current_type
        if current_type and not is_continued:
            entities.add((start, index, current_type))
            current_type = ""
        if prefix and not is_continued:
            start, current_type = index, tag_type
        if prefix in ("E", "S") and current_type:
            entities.add((start, index + 1, current_type))
            current_type = ""
    return entities


def has_entities(tags: Iterable[str]) -> bool:
    """Returns True if tags mark entities, that is, all tags except O belong to IOB, BIOES or BILOU.

    Raises a UsageError if the tags mix schemes, or if only some of them mark entities.
    """
    inside = {tag for tag in tags if tag != "O"}
    if follows_scheme(inside):
        return True
    prefixes = _prefixes(inside)
    entity_tags = {tag for tag, prefix in prefixes.items() if prefix in ("B", "I")}
    if not entity_tags:
        return False
    other_tag = min(inside - entity_tags, key=lambda tag: (prefixes.get(tag) in _PREFIXES, tag))
    if prefixes.get(other_tag) in _PREFIXES:
        raise UsageError(
            "the tags mix schemes: E- or S- of BIOES and L- or U- of BILOU; use only one of the two schemes"
        )
    raise UsageError(
        f"the tags mix schemes: {min(entity_tags)} marks an entity, {other_tag} does not; use only O, B-TYPE and "
        "I-TYPE, or no tags with the prefixes B- and I-"
    )


def follows_scheme(tags: Iterable[str]) -> bool:
    """Returns True if there are tags other than O, and all of them belong to one of IOB, BIOES and BILOU."""
    inside = {tag for tag in tags if tag != "O"}
    prefixes = _prefixes(inside)
    return bool(inside) and {*prefixes} == inside and any({*prefixes.values()} <= {*scheme} for scheme in _SCHEMES)


def _prefixes(tags: set[str]) -> dict[str, str]:
    """Returns the prefix of each tag that has a prefix and a type."""
    return {tag: prefix for tag in tags for prefix, _, type_ in [tag.partition("-")] if type_}


def entity_scores(labels: Iterable[Sequence[str]], predictions: Iterable[Sequence[str]]) -> dict[str, float]:
    """Returns precision, recall and F1 of all entities, and F1 of each entity type, in percent.

    Labels and predictions are the tags of each sentence's words, such as `I-PER` or `O`. A predicted entity is correct
    if a labeled entity has the same start, end and type.
    """
    label_counts, predicted_counts, correct_counts = Counter(), Counter(), Counter()
    for label_tags, predicted_tags in zip(labels, predictions, strict=True):
        labeled, predicted = extract_entities(label_tags), extract_entities(predicted_tags)
        label_counts.update(type_ for _, _, type_ in labeled)
        predicted_counts.update(type_ for _, _, type_ in predicted)
        correct_counts.update(type_ for _, _, type_ in labeled & predicted)
    precision, recall, f1 = _precision_recall_f1(correct_counts.total(), predicted_counts.total(), label_counts.total())
    f1_by_type = {
        f"f1_{type_}": _precision_recall_f1(correct_counts[type_], predicted_counts[type_], label_counts[type_])[2]
        for type_ in sorted({*label_counts, *predicted_counts})
    }
    return {"f1": f1, "precision": precision, "recall": recall, **f1_by_type}


def _precision_recall_f1(correct: int, predicted: int, labeled: int) -> tuple[float, float, float]:
    precision = 100.0 * correct / predicted if predicted else 0.0
    recall = 100.0 * correct / labeled if labeled else 0.0
    return precision, recall, 2 * precision * recall / (precision + recall) if correct else 0.0
