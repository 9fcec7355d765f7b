"""Entity-level F1 for IOB1, IOB2, BIOES, BILOU and BMES tags, as computed by `conlleval`."""

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from bertjax.errors import UsageError
from bertjax.metrics.report import NO_ENTITY, ClassReport

# (first word, end word (exclusive), type)
Entity = tuple[int, int, str]

# L and U of BILOU are equivalent to E and S of BIOES, and M of BMES to I.
_PREFIXES = {"B": "B", "I": "I", "E": "E", "S": "S", "L": "E", "U": "S", "M": "I"}
_ENTITY_TAG = re.compile("[BIESLUM](-.+)?")
# Entity type for tags without a type, such as B and I.
_NO_TYPE = "entity"


def extract_entities(tags: Sequence[str]) -> set[Entity]:
    """Returns the entities of one sentence as tuples of first word, end word (exclusive) and type.

    B starts an entity, and S is an entity of one word. I and E start an entity after O, E or S, or after a tag of a
    different type. An entity continues with I tags of its type, up to and including an E tag. Every tag sequence is
    valid, as in `conlleval` and `seqeval`. Tags without a type, such as `B`, have the type `entity`.
    """
    entities = set()
    start, current_type = 0, ""
    for index, tag in enumerate([*tags, "O"]):
        raw_prefix, _, tag_type = tag.partition("-") if "-" in tag else (tag, "", _NO_TYPE)
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


def has_entities(tags: Iterable[str], place_of: Callable[[str], str] = lambda tag: "the data") -> bool:
    """Returns whether the tags mark entities, see `follows_scheme`.

    Raises a UsageError if entity tags (B-TYPE, I-TYPE) are mixed with tags other than O, such as parts of speech.
    `place_of` returns the file and line of a tag for the message.
    """
    inside = sorted({*tags} - {"O"})
    others = [tag for tag in inside if not _ENTITY_TAG.fullmatch(tag)]
    # Ignore the tags B and I without a type, because they may be parts of speech, for example I for interjections.
    entity_tags = [tag for tag in inside if tag not in others and tag[:2] in ("B-", "I-")]
    if others and entity_tags:
        raise UsageError(
            f"{place_of(others[0])} mixes entity tags with other tags: {entity_tags[0]} and {others[0]}; use only O, "
            "B-TYPE and I-TYPE, or no tags with the prefixes B- and I-"
        )
    return follows_scheme(inside)


def follows_scheme(tags: Iterable[str]) -> bool:
    """Returns True if there are tags other than O, and all of these tags mark entities in IOB, BIOES, BILOU or BMES.

    A tag marks an entity if it consists of a prefix of these schemes and a type, as in `B-PER`, or only of a prefix.
    """
    inside = {*tags} - {"O"}
    return bool(inside) and all(map(_ENTITY_TAG.fullmatch, inside))


def entity_report(labels: Iterable[Sequence[str]], predictions: Iterable[Sequence[str]]) -> ClassReport:
    """Builds the report of entity types, in percent. Labels and predictions are the tags of each sentence's words.

    In the confusion matrix, a labeled and a predicted entity with the same span form a pair. All other entities are
    paired with `NO_ENTITY`.
    """
    pairs = []
    for label_tags, predicted_tags in zip(labels, predictions, strict=True):
        labeled, predicted = (
            {(start, end): type_ for start, end, type_ in extract_entities(tags)}
            for tags in (label_tags, predicted_tags)
        )
        spans = labeled.keys() | predicted.keys()
        pairs += [(labeled.get(span, NO_ENTITY), predicted.get(span, NO_ENTITY)) for span in spans]
    types = sorted({type_ for pair in pairs for type_ in pair} - {NO_ENTITY})
    names = [*types, NO_ENTITY]
    confusion = np.zeros((len(names), len(names)), np.int64)
    for label, prediction in pairs:
        confusion[names.index(label), names.index(prediction)] += 1
    correct, predicted, support = np.diag(confusion), confusion.sum(axis=0), confusion.sum(axis=1)
    return ClassReport(tuple(types), correct[:-1], predicted[:-1], support[:-1], confusion, scale=100.0)


def entity_scores(labels: Iterable[Sequence[str]], predictions: Iterable[Sequence[str]]) -> dict[str, float]:
    """Returns precision, recall and F1 of all entities, and F1 of each entity type, in percent.

    Labels and predictions are the tags of each sentence's words, such as `I-PER` or `O`. A predicted entity is correct
    if a labeled entity has the same start, end and type.
    """
    report = entity_report(labels, predictions)
    totals = [counts.sum(keepdims=True) for counts in (report.correct, report.predicted, report.support)]
    total = ClassReport(("",), *totals, scale=report.scale).scores()[""]
    f1_by_type = {f"f1_{type_}": scores["f1"] for type_, scores in report.scores().items()}
    return {**{name: total[name] for name in ("f1", "precision", "recall")}, **f1_by_type}
