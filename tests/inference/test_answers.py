"""What fine-tuned models say of texts from the command line, a file or standard input."""

import io
import itertools
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import portable

from bertjax.cli import main as cli
from bertjax.convert import huggingface
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.inference import predict as answers
from bertjax.inference.load import load_trained
from bertjax.model.heads import SequenceModel, TokenModel
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, SPANS, TAGS
from bertjax.tasks.finetuning.records import softmax
from bertjax.training.parameters import nested

LABELS = {CLASSES: ("bad", "good", "so"), TAGS: ("O", "B-X", "I-X")}


@pytest.fixture(scope="module")
def folders(letters, pretrained, tmp_path_factory):
    """A checkpoint of each kind of output layer."""
    found = {"": pretrained}
    for output in (CLASSES, CHOICES, TAGS, SPANS, "number"):
        found[output] = tmp_path_factory.mktemp(output)
        given = portable(letters, CLASSES if output == "number" else output, LABELS.get(output, ()))
        huggingface.write(given, found[output])
    return found


def asked(capfd, folder, *arguments) -> str:
    capfd.readouterr()
    cli.main(["predict", f"--checkpoint={folder}", *map(str, arguments)])
    return capfd.readouterr().out


def told(capfd, folder, *arguments) -> list[dict]:
    return [json.loads(line) for line in asked(capfd, folder, "--json", *arguments).splitlines()]


def refused(capfd, *arguments) -> str:
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.main(["predict", *map(str, arguments)])
    assert end.value.code == 2
    return capfd.readouterr().err.splitlines()[-1]


def alone(folder, model_of, *texts: str) -> np.ndarray:
    """The logits of one text, or pair, computed without any batch."""
    given = huggingface.read(folder)
    ids, segments = [given.vocabulary.cls_id], [0]
    for segment, text in enumerate(texts):
        part = [*Tokenizer(given.vocabulary).encode(text), given.vocabulary.sep_id]
        ids, segments = ids + part, segments + [segment] * len(part)
    batch = {
        "input_ids": np.array([ids]),
        "segment_ids": np.array([segments]),
        "input_mask": np.ones((1, len(ids)), int),
    }
    return np.asarray(model_of(given).apply({"params": nested(given.params)}, batch)[0])


def of_rows(given):
    return SequenceModel(given.model, given.outputs)


def of_tokens(given):
    return TokenModel(given.model, given.outputs, head_dropout=False)


def test_classes_have_the_probabilities_of_each_text_alone(folders, capfd):
    found = told(capfd, folders[CLASSES], "the cat", "a dog ||| c", "x" * 200, "--logits")
    assert [record["line"] for record in found] == [1, 2, 3] and found[1]["text"] == "a dog ||| c"
    for texts, record in (((("the cat"),), found[0]), (("a dog", "c"), found[1])):
        logits = alone(folders[CLASSES], of_rows, *texts)
        assert list(record["probabilities"]) == list(LABELS[CLASSES])
        np.testing.assert_allclose(list(record["probabilities"].values()), softmax(logits), atol=1e-5)
        np.testing.assert_allclose(list(record["logits"].values()), logits, rtol=1e-4, atol=1e-5)
        assert record["prediction"] == LABELS[CLASSES][int(logits.argmax())]
    shown = asked(capfd, folders[CLASSES], "the cat").splitlines()
    best = max(found[0]["probabilities"].items(), key=lambda pair: pair[1])
    assert shown[0] == "the cat" and shown[1].startswith(f"  {best[0]} {100 * best[1]:.1f} %   ")


def test_a_number_and_choices(folders, capfd):
    (record,) = told(capfd, folders["number"], "the cat")
    assert record["prediction"] == pytest.approx(float(alone(folders["number"], of_rows, "the cat")[0]), rel=1e-4)
    assert asked(capfd, folders["number"], "the cat") == f"the cat\n  {record['prediction']:g}\n"
    found = told(capfd, folders[CHOICES], "he ||| ran ||| sat down ||| is", "she ||| b ||| c")
    for record in found:
        first, *endings = record["text"].split(" ||| ")
        scores = np.array([alone(folders[CHOICES], of_rows, first, ending)[0] for ending in endings])
        np.testing.assert_allclose(record["probabilities"], softmax(scores), atol=1e-5)
        assert record["prediction"] == int(scores.argmax())
    assert "has 1 endings" in refused(capfd, f"--checkpoint={folders[CHOICES]}", "he ||| ran")


def test_every_word_of_a_text_longer_than_a_row_has_its_tag(folders, capfd):
    words = [f"w{index}" for index in range(60)]
    short, empty, long = told(capfd, folders[TAGS], "a dog", " ", " ".join(words))
    assert long["words"] == words and len(long["prediction"]) == len(long["probabilities"]) == 60
    assert (empty["words"], empty["prediction"]) == ([], [])
    # [CLS] a d ##o ##g [SEP]: a word is told by its first piece.
    logits = alone(folders[TAGS], of_tokens, "a dog")[[1, 2]]
    assert short["prediction"] == [LABELS[TAGS][tag] for tag in logits.argmax(axis=-1)]
    np.testing.assert_allclose([list(p.values()) for p in short["probabilities"]], softmax(logits), atol=1e-5)
    shown = asked(capfd, folders[TAGS], "a dog").splitlines()
    assert [line.split()[0] for line in shown[1:]] == ["a", "dog"]
    assert [line.split()[1] for line in shown[1:]] == short["prediction"]


def test_an_answer_is_the_best_span_of_the_context(folders, capfd, tmp_path):
    context = "Jo saw Al."
    (tmp_path / "passage.txt").write_text(context + "\n")
    (record,) = told(capfd, folders[SPANS], "who?", f"--context={context}")
    # A text is no address to be asked for.
    assert told(capfd, folders[SPANS], "who?", "--context=http://a.example/")[0]["prediction"] in "http://a.example/"
    assert told(capfd, folders[SPANS], "who?", f"--context_file={tmp_path / 'passage.txt'}") == [record]
    logits = alone(folders[SPANS], of_tokens, "who?", context)
    # [CLS] w ##h ##o ? [SEP], then J ##o s ##a ##w A ##l .
    places = {6: (0, 1), 7: (1, 2), 8: (3, 4), 9: (4, 5), 10: (5, 6), 11: (7, 8), 12: (8, 9), 13: (9, 10)}
    first, last = max(
        itertools.combinations_with_replacement(places, 2), key=lambda pair: logits[pair[0], 0] + logits[pair[1], 1]
    )
    assert record["prediction"] == context[places[first][0] : places[last][1]]
    assert 0 < record["probability"] <= 1
    assert asked(capfd, folders[SPANS], "who?", f"--context={context}").splitlines()[1].endswith(" %")


def test_lines_of_any_number_stream_in_order(folders, letters, monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(answers, "_TEXTS", 3)
    lines = [f"text {index} {'a ' * (index % 5)}" for index in range(10)]
    (tmp_path / "texts.txt").write_text("\n".join(lines) + "\n")
    found = told(capfd, folders[CLASSES], f"--text={tmp_path / 'texts.txt'}")
    assert [(record["line"], record["text"]) for record in found] == list(enumerate(lines, 1))
    for standard_input in ("-", "--text=-"):
        stream = io.BytesIO((tmp_path / "texts.txt").read_bytes())
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
        assert told(capfd, folders[CLASSES], standard_input) == found
    # An endless input is answered as it comes.
    read: list[int] = []
    endless = (read.append(index) or f"a {index}" for index in itertools.count())
    made = answers.answers(load_trained(folders[CLASSES]), endless)
    for count in range(1, 8):
        assert next(made)["prediction"] in LABELS[CLASSES]
        assert len(read) == -(-count // 3) * 3


def test_what_a_terminal_would_obey_is_escaped(folders, capfd):
    text = "a\x1b[31mb\x9b1m"
    assert asked(capfd, folders[CLASSES], text).splitlines()[0] == r"a\x1b[31mb\x9b1m"
    raw = asked(capfd, folders[CLASSES], "--json", text)
    assert raw.isascii() and raw.strip().isprintable() and json.loads(raw)["text"] == text


def test_what_cannot_be_asked_is_refused(folders, capfd, tmp_path):
    checkpoint = f"--checkpoint={folders[CLASSES]}"
    for arguments, named in (
        ((f"--checkpoint={folders['']}", "a"), "no output layer to predict with; `bertjax train --init_from`"),
        ((f"--checkpoint={folders[SPANS]}", "who?"), "give it with --context"),
        ((checkpoint, "a", "--context=b"), "--context is for a checkpoint that answers questions"),
        ((checkpoint,), "give texts, or a file of them with --text, or --output DIR"),
        ((checkpoint, "a", "--output=out"), "--output is for predictions of the task's data"),
        ((checkpoint, "a", "--config.seed=1"), "--config is for predictions of the task's data"),
        ((checkpoint, "--output=out", "--json"), "--json is for texts"),
        ((checkpoint, "a", "--seq_len=41"), "--seq_len is 41; it must be between 8 and the model's 40"),
        ((checkpoint, ""), "a text is empty"),
        ((checkpoint, f"--text={tmp_path / 'nothing'}"), "cannot read"),
    ):
        assert named in refused(capfd, *arguments)
