"""Windows over passages: answers where they are, spans that give back the exact text, most context once a token."""

import json
import lzma

import numpy as np
import pytest

from bertjax.data.corpus.tokenizer import Tokenizer, load_vocabulary
from bertjax.data.finetuning.questions import make_windows, read_questions
from bertjax.data.finetuning.tables import ReadStats
from bertjax.errors import UsageError

CONTEXT = "Ann (born 1990) lives in Caf\u00e9 Town, near Bob. " * 3


def squad(*qas, context=CONTEXT):
    return {"version": "x", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(qas)}]}]}


def qa(name, answer, start, **more):
    return {"id": name, "question": "who lives?", "answers": [{"text": answer, "answer_start": start}], **more}


def read(tmp_path, content, training=True, name="train.json", **options):
    path = tmp_path / name
    data = json.dumps(content).encode()
    path.write_bytes(lzma.compress(data) if name.endswith(".xz") else data)
    reading = ReadStats(str(path))
    return read_questions(path, reading, training, **options), reading


@pytest.mark.parametrize("name", ["train.json", "train.json.xz"])
def test_questions_of_both_versions(tmp_path, name):
    content = squad(qa("1", "Ann", 0), {"id": "2", "question": "q", "answers": [], "is_impossible": True})
    questions, reading = read(tmp_path, content, name=name)
    assert [(q.id, q.answers, q.answer_start) for q in questions] == [("1", ("Ann",), 0), ("2", (), -1)]
    assert (reading.read, reading.used) == (2, 2)


def test_an_answer_that_is_not_in_its_context_is_skipped_in_training_and_kept_in_evaluation(tmp_path):
    content = squad(qa("1", "Ann", 0), qa("2", "Zoe", 0))
    questions, reading = read(tmp_path, content)
    assert [q.id for q in questions] == ["1"]
    assert reading.skipped == {"whose answer is not in its context": {"rows": 1, "first": "question 2"}}
    assert len(read(tmp_path, content, training=False)[0]) == 2


def test_a_place_before_the_context_is_none(tmp_path):
    start = CONTEXT.rindex("Bob") - len(CONTEXT)
    assert CONTEXT[start : start + 3] == "Bob"
    _, reading = read(tmp_path, squad(qa("1", "Ann", 0), qa("2", "Bob", start)))
    assert reading.skipped["whose answer is not in its context"]["first"] == "question 2"


def test_where_every_question_has_an_answer_one_without_is_counted(tmp_path):
    content = squad(qa("1", "Ann", 0), {"id": "2", "question": "q", "answers": []})
    questions, reading = read(tmp_path, content, answered=True)
    assert [q.id for q in questions] == ["1"] and "question 2" in str(reading.skipped)
    questions, reading = read(tmp_path, content, training=False, answered=True)
    assert len(questions) == 2 and "question 2" in str(reading.noted)


def test_an_id_that_is_there_twice_is_refused(tmp_path):
    with pytest.raises(UsageError, match="2 questions with the id '1'"):
        read(tmp_path, squad(qa("1", "Ann", 0), qa("1", "Ann", 0)))


def test_half_a_character_keeps_every_place(tmp_path):
    (question,), _ = read(tmp_path, squad(qa("1", "Bob", 5), context="ab\ud83d. Bob"))
    assert question.context == "ab\ufffd. Bob" and question.context[5:8] == "Bob"


@pytest.mark.parametrize("context, question", [(None, "q"), (CONTEXT, 5)])
def test_what_is_no_text_is_refused_with_its_place(context, question, tmp_path):
    with pytest.raises(UsageError, match="article 1, paragraph 1"):
        read(tmp_path, squad({"id": "1", "question": question, "answers": []}, context=context))


def test_a_file_of_another_form_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not of SQuAD's form"):
        read(tmp_path, {"data": [{"paragraphs": [{}]}]})
    with pytest.raises(UsageError, match="cannot read"):
        read_questions(tmp_path / "none.json", ReadStats(""), True)


@pytest.fixture(scope="module")
def tokenizer(letters):
    return Tokenizer(load_vocabulary(letters))


def windows_of(tmp_path, tokenizer, content, **options):
    questions, reading = read(tmp_path, content)
    sizes = {"seq_len": 64, "doc_stride": 16, "max_query_len": 12} | options
    return questions, make_windows(questions, tokenizer, reading, **sizes), reading


@pytest.mark.parametrize("answer", ["Ann", "1990", "Caf\u00e9 Town", "near Bob."])
def test_the_answer_s_tokens_give_back_its_exact_characters(tmp_path, tokenizer, answer):
    content = squad(qa("1", answer, CONTEXT.index(answer)))
    (question,), windows, _ = windows_of(tmp_path, tokenizer, content)
    starts, ends = (windows.examples.rows[f"{name}_positions"] for name in ("start", "end"))
    inside = np.flatnonzero(starts > 0)
    assert inside.size
    for index in inside:
        spans, first = windows.spans[index], windows.first_token[index]
        assert CONTEXT[spans[starts[index] - first][0] : spans[ends[index] - first][1]] == answer
    assert (ends[starts == 0] == 0).all()


def test_windows_overlap_and_each_passage_token_has_most_context_in_one(tmp_path, tokenizer):
    _, windows, reading = windows_of(tmp_path, tokenizer, squad(qa("1", "Ann", 0)))
    assert len(windows.examples) > 3 and windows.examples.lengths.max() == 64
    told = [tuple(span) for spans, best in zip(windows.spans, windows.is_best, strict=True) for span in spans[best]]
    everything = sorted({tuple(span) for spans in windows.spans for span in spans})
    assert sorted(told) == everything
    ids = windows.examples.tokens["input_ids"]
    segments = windows.examples.tokens["segment_ids"]
    cuts = windows.examples.offsets
    for index, first in enumerate(windows.first_token):
        row, segment = ids[cuts[index] : cuts[index + 1]], segments[cuts[index] : cuts[index + 1]]
        assert row[0] == 2 and row[first - 1] == row[-1] == 3
        assert not segment[:first].any() and segment[first:].all()
    assert not reading.noted


def test_a_question_longer_than_its_share_is_cut_and_noted(tmp_path, tokenizer):
    _, windows, reading = windows_of(tmp_path, tokenizer, squad(qa("1", "Ann", 0)), max_query_len=4)
    assert (windows.first_token == 6).all()
    assert reading.noted == {"cut to 4 tokens of the question": {"rows": 1, "first": "question 1"}}


def test_an_empty_passage_has_a_window_without_tokens(tmp_path, tokenizer):
    content = squad({"id": "1", "question": "q", "answers": [], "is_impossible": True}, context="")
    _, windows, _ = windows_of(tmp_path, tokenizer, content)
    assert len(windows.examples) == 1 and len(windows.spans[0]) == 0
