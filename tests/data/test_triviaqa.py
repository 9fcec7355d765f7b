"""Tests of TriviaQA: the earliest answer in the first 400 tokens, and skipped documents."""

import json

import pytest

from bertjax.data.finetuning.questions import read_triviaqa
from bertjax.data.finetuning.tables import ReadStats
from bertjax.errors import UsageError

LATE = "word " * 399 + "Lima is late"


def entry(question_id, value, aliases, *documents):
    return {
        "QuestionId": question_id,
        "Question": f"Which one is {question_id}?",
        "Answer": {"Value": value, "Aliases": list(aliases), "Type": "WikipediaEntity"},
        "EntityPages": [{"Filename": document, "Title": "t", "DocSource": "TagMe"} for document in documents],
    }


def read(tmp_path, entries, documents):
    (tmp_path / "qa").mkdir()
    evidence = tmp_path / "evidence/wikipedia"
    evidence.mkdir(parents=True)
    for name, text in documents.items():
        (evidence / name).write_text(text, encoding="utf-8")
    path = tmp_path / "qa/wikipedia-train.json"
    path.write_text(json.dumps({"Data": entries, "Domain": "Wikipedia", "Version": 1.0}))
    stats = ReadStats(str(path))
    return read_triviaqa(path, tmp_path, stats), stats


def test_each_document_with_an_answer_is_a_question(tmp_path):
    entries = [
        entry("tc_1", "Lima", ["lima peru", "City of Kings"], "a.txt", "b.txt", "late.txt", "none.txt", "gone.txt"),
        entry("tc_2", "C++ (language)", ["C++"], "c.txt"),
    ]
    documents = {
        "a.txt": "Limassol is not it.\nThe city of kings, LIMA, is.",
        "b.txt": "Go to Lima Peru, or Lima.",
        "late.txt": LATE,
        "none.txt": LATE.replace("word Lima", "word word Lima"),
        "c.txt": "It was C, then C++; later more.",
    }
    questions, stats = read(tmp_path, entries, documents)
    by_id = {question.id: question for question in questions}
    assert {id_: question.answers[0] for id_, question in by_id.items()} == {
        "tc_1--a.txt": "city of kings",
        "tc_1--b.txt": "Lima Peru",
        "tc_1--late.txt": "Lima",
        "tc_2--c.txt": "C++",
    }
    for question in questions:
        start = question.answer_start
        assert question.context[start : start + len(question.answers[0])] == question.answers[0]
    assert set(by_id["tc_1--a.txt"].answers) == {"city of kings", "Lima", "lima peru", "City of Kings"}
    # The context is the first 400 words, with the document's whitespace.
    assert by_id["tc_1--late.txt"].context == LATE.removesuffix(" is late")
    assert (stats.read, stats.used) == (6, 4)
    assert {reason: skipped["rows"] for reason, skipped in stats.skipped.items()} == {
        "whose document has no answer in its first 400 words": 1,
        "whose document is missing": 1,
    }


@pytest.mark.parametrize("name", ["../secret.txt", "/etc/hostname"])
def test_document_outside_the_evidence_folder_is_treated_as_missing(tmp_path, name):
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence/secret.txt").write_text("Lima")
    (tmp_path / "evidence").rename(tmp_path / "e")
    with pytest.raises(UsageError, match="no usable questions: whose document is missing"):
        read(tmp_path, [entry("1", "Lima", [], name)], {})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"QuestionId": "1"}], "is not in TriviaQA's format"),
        ([entry("1", "Lima", [], "a.txt")] * 2, "has 2 questions with the id '1'"),
        ([entry("1", "Rome", [], "a.txt")], "no usable questions: whose document has no answer"),
    ],
)
def test_unusable_file_is_an_error(tmp_path, entries, message):
    with pytest.raises(UsageError, match=message):
        read(tmp_path, entries, {"a.txt": "Lima"})
