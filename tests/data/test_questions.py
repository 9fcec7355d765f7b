"""Tests of the questions of SQuAD and TriviaQA and of windows: answers, offsets, one max-context window per token."""

import json
import lzma

import numpy as np
import pytest

from bertjax.data.finetuning.questions import read_questions, read_triviaqa
from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.finetuning.windows import make_windows
from bertjax.errors import UsageError

CONTEXT = "Ann (born 1990) lives in Caf\u00e9 Town, near Bob. " * 3


def squad(*qas, context=CONTEXT):
    return {"version": "x", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(qas)}]}]}


def qa(id_, answer, start, **more):
    return {"id": id_, "question": "who lives?", "answers": [{"text": answer, "answer_start": start}]} | more


def read(tmp_path, content, training=True, name="train.json", **options):
    path = tmp_path / name
    data = json.dumps(content).encode()
    path.write_bytes(lzma.compress(data) if name.endswith(".xz") else data)
    stats = ReadStats(str(path))
    return read_questions(path, stats, training, **options), stats


def test_questions_of_both_squad_versions_are_read_also_if_compressed(tmp_path):
    content = squad(qa("1", "Ann", 0), {"id": "2", "question": "q", "answers": [], "is_impossible": True})
    questions, stats = read(tmp_path, content, name="train.json.xz")
    assert [(q.id, q.answers, q.answer_start) for q in questions] == [("1", ("Ann",), 0), ("2", (), -1)]
    assert (stats.read, stats.used) == (2, 2)


PARIS = "\U0001f600 Jo  Smith lives\nin Paris, Paris. Caf\u00e9"


@pytest.mark.parametrize(
    "answer, start, found, found_at",
    [
        # The offset is inside the answer, or in the space before it. The nearest occurrence is the answer.
        ("Paris", 22, "Paris", 21),
        ("Paris", 27, "Paris", 28),
        # Whitespace around the answer, and between its words.
        (" lives in ", 12, "lives\nin", 12),
        ("Jo Smith", 2, "Jo  Smith", 2),
    ],
)
def test_answer_near_its_offset_is_found_and_counted(answer, start, found, found_at, tmp_path):
    (question,), stats = read(tmp_path, squad(qa("1", answer, start), context=PARIS))
    assert (question.answers, question.answer_start) == ((found,), found_at)
    assert stats.noted == {"whose answer_start was corrected": {"rows": 1, "first": "question 1"}}


@pytest.mark.parametrize("encoding, unit_bytes", [("utf-16-le", 2), ("utf-8", 1)])
def test_offset_in_utf16_units_or_bytes_is_found(encoding, unit_bytes, tmp_path):
    before, after = "\U0001f600" * 30 + " in ", "Paris, or in the other Paris"
    start = len(before.encode(encoding)) // unit_bytes
    (question,), stats = read(tmp_path, squad(qa("1", "Paris,", start), context=before + after))
    assert question.answer_start == len(before) and stats.noted["whose answer_start was corrected"]["rows"] == 1


def test_unpaired_surrogate_in_the_context_counts_as_one_character(tmp_path):
    (question,), _ = read(tmp_path, squad(qa("1", "Bob", 5), context="ab\ud83d. Bob"))
    assert (question.answer_start, question.context) == (5, "ab\ufffd. Bob")


@pytest.mark.parametrize(
    "answer, start, reason",
    [
        ("", 0, "whose answer is empty"),
        ("paris", 22, "whose answer is not in its context"),
        ("Paris", 2, "whose answer is in its context, but not at answer_start"),
        ("Paris", 900, "whose answer is in its context, but not at answer_start"),
        ("Paris", -16, "whose answer is in its context, but not at answer_start"),
    ],
)
def test_question_without_its_answer_is_skipped_for_a_reason_only_in_training(answer, start, reason, tmp_path):
    content = squad(qa("1", answer, start), qa("2", "Jo", 2), context=PARIS)
    questions, stats = read(tmp_path, content)
    assert [q.id for q in questions] == ["2"] and not stats.noted
    assert stats.skipped == {reason: {"rows": 1, "first": "question 1"}}
    questions, stats = read(tmp_path, content, training=False)
    assert len(questions) == 2 and [*stats.noted] == [f"{reason}, scored by the text of its answers"]


def test_answer_inside_a_word_is_counted_if_it_is_a_word_elsewhere(tmp_path):
    context = "An ant, 1990s \u5728\u5df4\u9ece"
    inside = (qa("1", "an", 3), qa("2", "1990", 8), qa("3", "\u5df4", 15), qa("4", "ant", 3), qa("5", "An", 0))
    assert not read(tmp_path, squad(*inside, context=context))[1].noted
    stats = read(tmp_path, squad(*inside, context=f"{context} an"))[1]
    assert stats.noted == {
        "whose answer starts or ends inside a word, but is a word elsewhere": {"rows": 1, "first": "question 1"}
    }


def test_is_impossible_may_be_text_and_must_not_contradict_the_answers(tmp_path):
    content = squad(
        qa("1", "Ann", 0, is_impossible="false"),
        qa("2", "Ann", 0, is_impossible="True"),
        {"id": "3", "question": "q", "answers": [], "is_impossible": False},
        {"id": "4", "question": "q", "answers": [], "is_impossible": None},
    )
    questions, stats = read(tmp_path, content)
    assert [(q.id, q.answers) for q in questions] == [("1", ("Ann",)), ("2", ()), ("4", ())]
    assert stats.skipped == {"with is_impossible=false, but without an answer": {"rows": 1, "first": "question 3"}}
    assert len(read(tmp_path, content, training=False)[0]) == 4
    with pytest.raises(UsageError, match="question 1 of entry 1, paragraph 1: is_impossible is 'no'; use"):
        read(tmp_path, squad(qa("1", "Ann", 0, is_impossible="no")))


@pytest.mark.parametrize(
    "fields, all_answerable, reason",
    [
        ({}, True, "whose field answers is missing"),
        ({"answers": None, "is_impossible": False}, False, "whose field answers is missing"),
        # SQuAD 1.1 has no unanswerable questions.
        ({"answers": []}, True, "without an answer (only version=2.0 trains on them)"),
    ],
)
def test_question_without_answers_is_unanswerable_only_if_the_file_says_so(fields, all_answerable, reason, tmp_path):
    content = squad(qa("1", "Ann", 0), {"id": "2", "question": "q"} | fields)
    questions, stats = read(tmp_path, content, all_answerable=all_answerable)
    assert [q.id for q in questions] == ["1"]
    assert stats.skipped == {reason: {"rows": 1, "first": "question 2"}}
    # A file to predict on may lack answers.
    questions, stats = read(tmp_path, content, training=False, all_answerable=all_answerable)
    assert [q.answers for q in questions] == [("Ann",), ()] and reason in str(stats.noted)
    with pytest.raises(UsageError, match=f"no usable questions: {reason[:15]}"):
        read(tmp_path, squad({"id": "2", "question": "q"} | fields), all_answerable=all_answerable)


def test_hugging_face_dataset_questions_are_read_from_json_and_json_lines(tmp_path):
    answers = ({"text": ["Ann"], "answer_start": [0]}, {"text": [], "answer_start": []})
    flat = [
        {"id": id_, "title": "t", "context": CONTEXT, "question": "q", "answers": value}
        for id_, value in zip("12", answers, strict=True)
    ]
    official = squad(qa("1", "Ann", 0, question="q"), {"id": "2", "question": "q", "answers": []})
    nested, (article,) = read(tmp_path, official)[0], official["data"]
    single = [{**flat[0], "answers": {"text": "Ann", "answer_start": 0}}, flat[1]]
    columns = {name: [entry[name] for entry in flat] for name in flat[0]}
    versioned = {"version": 2.0, "data": flat}
    for content in (versioned, flat, columns, single, article["paragraphs"], article["paragraphs"][0]):
        assert read(tmp_path, content)[0] == nested
    for lines, expected in ((flat, nested), (flat[:1], nested[:1])):
        (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(entry) for entry in lines) + "\n")
        assert read_questions(tmp_path / "train.jsonl", ReadStats(""), True) == expected


PLACE = "question 7 of entry 1, paragraph 1"


@pytest.mark.parametrize(
    "content, message",
    [
        (squad(qa("1", "Ann", 0), qa("1", "Ann", 0)), "2 questions with the id '1'"),
        (squad(qa("7", "Ann", None)), f"{PLACE}: answer_start is None; use an integer"),
        (squad(qa("7", "Ann", 0.5)), f"{PLACE}: answer_start is 0.5"),
        (squad(qa("7", 5, 0)), f"{PLACE}: "),
        # MRQA.
        (
            [{"context": "c", "qas": [{"id": 7, "question": "q", "answers": ["c"]}]}],
            f"{PLACE}: answers contains items that are not objects",
        ),
        (squad(qa("7", "Ann", 0) | {"answers": {"text": ["Ann"], "answer_start": []}}), f"{PLACE}: "),
        (squad({"question": "q", "answers": []}), "entry 1, paragraph 1 has no field 'id'"),
        ([{"id": 7, "question": "q"}], f"{PLACE} has no field 'context'"),
        ({"data": [{"paragraphs": None}]}, "entry 1: "),
        ({"rows": []}, "data has no field 'data'"),
        ([5], "entry 1: "),
    ],
)
def test_error_for_a_malformed_question_names_its_place(content, message, tmp_path):
    with pytest.raises(UsageError, match=f"train.json .*{message}"):
        read(tmp_path, content)


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        read_questions(tmp_path / "none.json", ReadStats(""), True)


def read_windows(tmp_path, tokenizer, content, **options):
    questions, stats = read(tmp_path, content)
    sizes = {"seq_len": 64, "doc_stride": 16, "max_query_len": 12} | options
    return *make_windows(questions, tokenizer, stats, **sizes), stats


@pytest.mark.parametrize("answer", ["Ann", "1990", "Caf\u00e9 Town", "near Bob."])
def test_answer_tokens_map_to_the_exact_characters(tmp_path, tokenizer, answer):
    content = squad(qa("1", answer, CONTEXT.index(answer)))
    examples, windows, _ = read_windows(tmp_path, tokenizer, content)
    starts, ends = (examples.rows[f"{name}_positions"] for name in ("start", "end"))
    with_answer = np.flatnonzero(starts > 0)
    assert with_answer.size
    for index in with_answer:
        window = windows[index]
        first, last = (window.char_spans[position[index] - window.passage_start] for position in (starts, ends))
        assert CONTEXT[first[0] : last[1]] == answer
    assert (ends[starts == 0] == 0).all()


def test_special_tokens_in_question_and_passage_are_single_tokens(tmp_path, tokenizer):
    content = squad(qa("1", "b", 8, question="[MASK] x"), context="a [SEP] b")
    examples, *_ = read_windows(tmp_path, tokenizer, content)
    tokens = ["[CLS]", "[MASK]", "x", "[SEP]", "a", "[SEP]", "b", "[SEP]"]
    assert tokenizer.pieces(examples.tokens["input_ids"]) == tokens
    assert examples.rows["start_positions"].tolist() == [6]


def test_windows_overlap_and_each_token_has_one_max_context_window(tmp_path, tokenizer):
    examples, windows, stats = read_windows(tmp_path, tokenizer, squad(qa("1", "Ann", 0)))
    assert len(examples) == len(windows) > 3 and examples.lengths.max() == 64
    best_spans = [tuple(span) for window in windows for span in window.char_spans[window.is_max_context]]
    assert sorted(best_spans) == sorted({tuple(span) for window in windows for span in window.char_spans})
    rows = (np.split(examples.tokens[name], examples.offsets[1:-1]) for name in ("input_ids", "segment_ids"))
    for window, ids, segments in zip(windows, *rows, strict=True):
        start = window.passage_start
        assert ids[0] == 2 and ids[start - 1] == ids[-1] == 3
        assert not segments[:start].any() and segments[start:].all()
    assert not stats.noted


def test_long_question_is_truncated_and_counted(tmp_path, tokenizer):
    _, windows, stats = read_windows(tmp_path, tokenizer, squad(qa("1", "Ann", 0)), max_query_len=4)
    assert {window.passage_start for window in windows} == {6}
    assert stats.noted == {"with the question truncated to 4 tokens": {"rows": 1, "first": "question 1"}}


def test_empty_passage_has_one_window_without_passage_tokens(tmp_path, tokenizer):
    content = squad({"id": "1", "question": "q", "answers": [], "is_impossible": True}, context="")
    _, (window,), _ = read_windows(tmp_path, tokenizer, content)
    assert len(window.char_spans) == 0


LATE = "word " * 399 + "Lima is late"


def entry(question_id, value, aliases, *documents):
    return {
        "QuestionId": question_id,
        "Question": f"Which one is {question_id}?",
        "Answer": {"Value": value, "Aliases": list(aliases), "Type": "WikipediaEntity"},
        "EntityPages": [{"Filename": document, "Title": "t", "DocSource": "TagMe"} for document in documents],
    }


def read_trivia(tmp_path, entries, documents):
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
    questions, stats = read_trivia(tmp_path, entries, documents)
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


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        # Documents outside the evidence folder are not read.
        ([entry("1", "Lima", [], "../secret.txt", "/etc/hostname")], "no usable questions: whose document is missing"),
        ([{"QuestionId": "1"}], "is not in TriviaQA's format"),
        ([entry("1", "Lima", [], "a.txt")] * 2, "has 2 questions with the id '1'"),
        ([entry("1", "Rome", [], "a.txt")], "no usable questions: whose document has no answer"),
    ],
)
def test_unusable_file_of_triviaqa_is_an_error(tmp_path, entries, message):
    with pytest.raises(UsageError, match=message):
        read_trivia(tmp_path, entries, {"a.txt": "Lima", "../secret.txt": "Lima"})
