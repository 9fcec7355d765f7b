"""A user's own files."""

import json

import pytest
from running import EXPERIMENTS, overrides, predict, records, refused, train

from bertjax import cli


def test_own_files_in_any_form(letters, tmp_path, capfd):
    (tmp_path / "train.csv").write_text("text,topic\n" + '"zu, ba",good\npa ke,bad\n' * 8)
    (tmp_path / "dev.jsonl").write_text('{"text": "zu lo", "topic": "good"}\n{"text": "pa", "topic": "bad"}\n')
    (tmp_path / "new.tsv").write_text("text\tid\nzu\tx\n\nna\tz\n")
    config = f"text.py:train={tmp_path}/train.csv,dev={tmp_path}/dev.jsonl,label=topic"
    results = train(config, tmp_path / "run", letters)
    assert {"accuracy", "macro_f1", "matthews"} <= results.keys()
    (tmp_path / "train.csv").unlink()
    new = f"--config.data.test_file={tmp_path}/new.tsv"
    path, beside = predict(capfd, tmp_path / "run", tmp_path / "out", new, "--columns=id,text")
    lines = path.read_text().split()
    assert lines[0] == "prediction" and len(lines) == 4 and set(lines[1:]) <= {"good", "bad"}
    # A row without a text keeps its place.
    assert [(record["line"], record["id"], record["text"], record["prediction"]) for record in records(beside)] == [
        (2, "x", "zu", lines[1]),
        (3, "", "", lines[2]),
        (4, "z", "na", lines[3]),
    ]


@pytest.mark.parametrize("tag, best_by", [("I-PER", "f1"), ("NOUN", "word_accuracy")])
def test_own_words_with_tags_in_any_form(tag, best_by, letters, tmp_path, capfd):
    sentences = [(["zu", "ba", "pa"], [tag, "O", "O"]), (["ke", "zu"], ["O", tag])] * 16
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": w, "label": t}) + "\n" for w, t in sentences))
    (tmp_path / "dev.tsv").write_text(
        "text\tlabel\n" + "".join(f"{' '.join(w)}\t{' '.join(t)}\n" for w, t in sentences)
    )
    (tmp_path / "new.csv").write_text('text\n"ba zu"\n\nzu\n')
    config = f"text.py:train={tmp_path}/train.jsonl,dev={tmp_path}/dev.tsv,kind=tags"
    results = train(config, tmp_path / "run", letters, steps=0, epochs=15)
    assert results[best_by] == max(results["baseline"][best_by], results[best_by]) > 0.9
    assert ("f1" in results) == (best_by == "f1")
    (tmp_path / "train.jsonl").unlink()
    new = f"--config.data.test_file={tmp_path}/new.csv"
    path, beside = predict(capfd, tmp_path / "run", tmp_path / "out", new, "--columns=text")
    assert path.read_text() == f"ba O\nzu {tag}\n\n\nzu {tag}\n"
    assert [(record["line"], record["text"], record["prediction"]) for record in records(beside)] == [
        (2, "ba zu", ["O", tag]),
        (3, "", []),
        (4, "zu", [tag]),
    ]


def test_mixed_schemes_of_tags_are_refused(letters, tmp_path, capfd):
    (tmp_path / "train.tsv").write_text("text\tlabel\na b\tB-PER LOC\n")
    config = f"--config={EXPERIMENTS}/text.py:train={tmp_path}/train.tsv,dev={tmp_path}/train.tsv,kind=tags,size=L1_H16"
    error = refused(capfd, "train", config, f"--workdir={tmp_path / 'run'}", *overrides(letters))
    assert "the tags mix schemes: B-PER marks an entity, LOC does not" in error


def test_own_data_is_evaluated_and_predicted_without_the_training_file(letters, tmp_path, capfd):
    (tmp_path / "train.csv").write_text("text,label\nzu,a\npa,b\n")
    train(f"text.py:train={tmp_path}/train.csv,dev={tmp_path}/train.csv", tmp_path / "run", letters, steps=1)
    (tmp_path / "other.jsonl").write_text('{"text": "zu\\ud83d", "label": "a"}\n')
    capfd.readouterr()
    config = f"--config={EXPERIMENTS}/text.py:dev={tmp_path}/other.jsonl,quick=true"
    cli.main(["evaluate", f"--checkpoint={tmp_path / 'run'}", config, *overrides(None)])
    said = capfd.readouterr()
    assert "accuracy" in json.loads(said.out) and "half a character" in said.err
    paths = predict(capfd, tmp_path / "run", tmp_path / "out", f"--config.data.test_file={tmp_path}/other.jsonl")
    assert len(paths[0].read_text().splitlines()) == 2


def test_a_changed_dev_file_is_other_data(letters, tmp_path, capfd):
    for name in ("train", "dev"):
        (tmp_path / f"{name}.csv").write_text("text,label\nzu,a\npa,b\n")
    config = f"text.py:train={tmp_path}/train.csv,dev={tmp_path}/dev.csv"
    train(config, tmp_path / "run", letters, steps=1)
    assert "2 classes: 'a' (1), 'b' (1)" in capfd.readouterr().err
    (tmp_path / "dev.csv").write_text("text,label\nzu,b\npa,b\n")
    whole = f"--config={EXPERIMENTS}/{config},size=L1_H16,quick=true"
    error = refused(capfd, "train", whole, f"--workdir={tmp_path / 'run'}", *overrides(letters, steps=1))
    assert "on other data" in error
