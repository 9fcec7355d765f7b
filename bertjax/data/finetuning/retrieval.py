"""Retrieval data in BEIR's format: `corpus.jsonl`, `queries.jsonl` and `qrels/SPLIT.tsv`."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bertjax.data.finetuning.tables import ReadStats, read_table
from bertjax.errors import UsageError, quoted

# Relevance grades, keyed by query id and document id.
Judgments = Mapping[str, Mapping[str, int]]


@dataclasses.dataclass(frozen=True)
class RetrievalData:
    """Corpus, judged queries and judgments."""

    documents: Mapping[str, str]  # texts (title, space, text), keyed by id
    queries: Mapping[str, str]  # texts of the judged queries, keyed by id
    judgments: Judgments  # judgments of these queries. They may name documents that the corpus lacks.
    notes: tuple[str, ...] = ()  # row counts of each file
    # Ids of queries that are also documents, as in ArguAna and Quora. Such a document has the id of the query, ends
    # with its text, and is not judged relevant. As in BEIR, it should not be retrieved for this query.
    copies: frozenset[str] = frozenset()


def read_retrieval(folder: str | Path, split: str = "test") -> RetrievalData:
    """Reads a folder in BEIR's format. Raises a UsageError if no judgment names a known query and document."""
    folder = Path(folder).expanduser()
    documents, document_stats = read_texts_by_id(folder / "corpus.jsonl")
    queries, query_stats = read_texts_by_id(folder / "queries.jsonl", ("_id", "text"))
    path = folder / "qrels" / f"{split}.tsv"
    stats, columns = ReadStats(str(path)), ("query-id", "corpus-id", "score")
    judgments: dict[str, dict[str, int]] = {}
    for row in read_table(path, columns, stats):
        query, document, grade = (row.fields[column] for column in columns)
        if not re.fullmatch(r"\s*[+-]?\d+(\.0*)?\s*", grade):
            raise UsageError(f"{path} line {row.line}: score is {quoted(grade)}; use an integer grade")
        if query not in queries:
            stats.skip("whose query is not in queries.jsonl", row.line)
            continue
        if document not in documents:
            stats.count_irregular("whose document is not in corpus.jsonl, not retrieved", row.line)
        judgments.setdefault(query, {})[document] = int(float(grade))
        stats.used += 1
    if not any(grades.keys() & documents.keys() for grades in judgments.values()):
        raise UsageError(f"no judgment of a known query and document in {stats.summary()}; use files with the same ids")
    notes = [document_stats.summary(), query_stats.summary(), stats.summary()]
    copies = frozenset(
        query
        for query, grades in judgments.items()
        if grades.get(query, 0) < 1 and f" {_words(documents.get(query, ''))}".endswith(f" {_words(queries[query])}")
    )
    if copies:
        notes.append(f"queries whose own document (same id and text) is left out of their ranking: {len(copies):,}")
    return RetrievalData(documents, {query: queries[query] for query in judgments}, judgments, tuple(notes), copies)


def read_texts_by_id(path: Path, columns: Sequence[str] = ("_id", "title", "text")) -> tuple[dict[str, str], ReadStats]:
    """Reads `corpus.jsonl` or a similar file. The first column is the id. The other columns are joined to one text."""
    texts: dict[str, str] = {}
    stats = ReadStats(str(path))
    for row in read_table(path, columns, stats, keep_short=True, optional=("title",)):
        key, *parts = row.fields.values()
        if not all(isinstance(part, str) for part in (key, *parts)):
            raise UsageError(f"{path} line {row.line} has a list; {', '.join(columns)} must be strings")
        text = " ".join(parts).strip()
        if not key:
            stats.skip("with an empty _id", row.line)
            continue
        if key in texts:
            # As in BEIR, the last row with an _id replaces earlier ones.
            stats.count_irregular("with a repeated _id, which replaces the earlier text", row.line)
        if not text:
            stats.count_irregular("with an empty text", row.line)
        texts[key] = text
    stats.used = len(texts)
    return texts, stats


def _words(text: str) -> str:
    """Returns the words of a text, separated by one space."""
    return " ".join(text.split())
