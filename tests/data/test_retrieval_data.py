"""Retrieval data in BEIR's format."""

import json

import pytest

from bertjax.data.finetuning.retrieval import read_retrieval, read_texts_by_id
from bertjax.errors import UsageError

CORPUS = [
    {"_id": "d1", "title": "", "text": "replaced"},
    {"_id": 2, "title": "", "text": "Dogs bark.", "metadata": {}},
    {"_id": "d1", "title": "Cats", "text": "They sit."},
    {"_id": "d4", "title": "", "text": ""},
    {"_id": "d5", "text": "No title."},
]
QUERIES = [{"_id": "q1", "text": "cats"}, {"_id": "q2", "text": "dogs"}, {"_id": "q3", "text": "not judged"}]
QRELS = ["query-id\tcorpus-id\tscore", "q1\td1\t1", "q1\tnosuch\t2.0", "q2\t2\t0", "q9\td1\t1"]


@pytest.fixture
def folder(tmp_path):
    """Returns a function that writes a retrieval folder and returns its path."""

    def write(corpus=CORPUS, queries=QUERIES, qrels=QRELS):
        (tmp_path / "qrels").mkdir(exist_ok=True)
        for name, rows in (("corpus", corpus), ("queries", queries)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "qrels" / "test.tsv").write_text("\n".join(qrels) + "\n")
        return tmp_path

    return write


def test_titles_are_joined_to_texts_and_unused_rows_are_counted(folder):
    data = read_retrieval(folder())
    assert data.documents == {"d1": "Cats They sit.", "2": "Dogs bark.", "d4": "", "d5": "No title."}
    assert data.queries == {"q1": "cats", "q2": "dogs"}
    assert data.judgments == {"q1": {"d1": 1, "nosuch": 2}, "q2": {"2": 0}}
    corpus, queries, qrels = data.notes
    assert "5 rows read, 4 used" in corpus and "1 with a repeated _id, which replaces" in corpus
    assert "1 with an empty text (first: line 4)" in corpus and "3 rows read, 3 used" in queries
    assert "4 rows read, 3 used" in qrels and "1 skipped whose query is not in queries.jsonl (first: line 5)" in qrels
    assert "1 whose document is not in corpus.jsonl, not retrieved (first: line 3)" in qrels
    assert read_texts_by_id(folder() / "corpus.jsonl")[0] == data.documents
    reordered = ["\t".join(line.split("\t")[::-1]) for line in QRELS]
    assert read_retrieval(folder(qrels=reordered)).judgments == data.judgments


def test_queries_that_are_documents_are_counted(folder):
    # Query 2 has the id of a document only by chance, and document d5 is judged relevant for its copy.
    queries = [{"_id": key, "text": text} for key, text in (("d1", "They  sit."), ("2", "cats"), ("d5", "No title."))]
    qrels = [QRELS[0], "d1\td5\t1", "d1\td1\t0", "2\td1\t1", "d5\td5\t1"]
    data = read_retrieval(folder(queries=queries, qrels=qrels))
    assert data.copies == {"d1"} and data.notes[-1].endswith("is left out of their ranking: 1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qrels": [*QRELS, "q1\td1\t0.5"]}, "test.tsv line 6: score is '0.5'; use an integer grade"),
        ({"qrels": [QRELS[0], "q9\td1\t1", "q1\tnosuch\t1"]}, "1 skipped whose query .* 1 whose document .*; use file"),
        ({"queries": [{"_id": "q1", "text": ["a"]}]}, "queries.jsonl line 1 has a list"),
        ({"corpus": [{"id": "d1", "text": "a"}]}, "corpus.jsonl has no column '_id'"),
        ({"queries": [{"_id": "q1", "query": "a"}]}, "queries.jsonl has no column 'text'"),
    ],
)
def test_unusable_files_are_rejected(changes, message, folder):
    with pytest.raises(UsageError, match=message):
        read_retrieval(folder(**changes))


def test_unknown_split_is_rejected(folder):
    with pytest.raises(UsageError, match=r"cannot read .*dev.tsv"):
        read_retrieval(folder(), "dev")
