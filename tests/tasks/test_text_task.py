"""Tests of classification and tagging on a user's own files."""

import json

import numpy as np
import pytest
from running import EXPERIMENTS, overrides, predict, records, refused, train

from bertjax.cli import main as cli
from bertjax.data.shard import SINGLE_SHARD
from bertjax.tasks.build import build_task, parse_config
from bertjax.training.checkpoint_config import experiment_config


def test_own_files_in_every_format(letters, tmp_path, capfd):
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
@pytest.mark.slow
def test_own_tagged_files_in_every_format(tag, best_by, letters, tmp_path, capfd):
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


def test_mixed_tag_schemes_are_an_error(letters, tmp_path, capfd):
    (tmp_path / "train.tsv").write_text("text\tlabel\na b\tB-PER LOC\n")
    config = f"--config={EXPERIMENTS}/text.py:train={tmp_path}/train.tsv,dev={tmp_path}/train.tsv,kind=tags,size=L1_H16"
    error = refused(capfd, "train", config, f"--workdir={tmp_path / 'run'}", *overrides(letters))
    assert "the tags mix schemes: B-PER marks an entity, LOC does not" in error


def test_evaluate_and_predict_do_not_need_the_training_file(letters, tmp_path, capfd):
    (tmp_path / "train.csv").write_text("text,label\nzu,a\npa,b\n")
    train(f"text.py:train={tmp_path}/train.csv,dev={tmp_path}/train.csv", tmp_path / "run", letters, steps=1)
    (tmp_path / "other.jsonl").write_text('{"text": "zu\\ud83d", "label": "a"}\n')
    capfd.readouterr()
    config = f"--config={EXPERIMENTS}/text.py:dev={tmp_path}/other.jsonl,quick=true"
    cli.main(["evaluate", f"--checkpoint={tmp_path / 'run'}", config, *overrides(None)])
    said = capfd.readouterr()
    assert "accuracy" in json.loads(said.out) and "unpaired surrogates" in said.err
    paths = predict(capfd, tmp_path / "run", tmp_path / "out", f"--config.data.test_file={tmp_path}/other.jsonl")
    assert len(paths[0].read_text().splitlines()) == 2


def test_resuming_with_a_changed_dev_file_is_an_error(letters, tmp_path, capfd):
    for name in ("train", "dev"):
        (tmp_path / f"{name}.csv").write_text("text,label\nzu,a\npa,b\n")
    config = f"text.py:train={tmp_path}/train.csv,dev={tmp_path}/dev.csv"
    train(config, tmp_path / "run", letters, steps=1)
    assert "2 classes: 'a' (1), 'b' (1)" in capfd.readouterr().err
    (tmp_path / "dev.csv").write_text("text,label\nzu,b\npa,b\n")
    whole = f"--config={EXPERIMENTS}/{config},size=L1_H16,quick=true"
    error = refused(capfd, "train", whole, f"--workdir={tmp_path / 'run'}", *overrides(letters, steps=1))
    assert "on other data" in error


def test_every_row_has_a_line_of_predictions(letters, tmp_path, capfd):
    labels = ["a\nb", "c\td\\"]
    rows = [{"text": f"zu{index}", "label": labels[index % 2]} for index in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # A blank line, a row without a label, one with an empty one, one with an empty text.
    odd = [json.dumps(row) for row in ({"text": "zu"}, {"text": "pa", "label": ""}, {"text": "", "label": labels[0]})]
    (tmp_path / "dev.jsonl").write_text("\n".join([json.dumps(rows[0]), "", *odd, json.dumps(rows[1])]) + "\n")
    config = f"text.py:train={tmp_path}/train.jsonl,dev={tmp_path}/dev.jsonl"
    results = train(config, tmp_path / "run", letters, steps=1)
    dev = results["files"][1]
    assert (dev["read"], dev["used"], dev["skipped"]) == (6, 3, {})
    assert dev["noted"]["with too few fields"]["rows"] == 2
    assert dev["noted"]["with an empty label, predicted but not scored"] == {"rows": 1, "first": "line 4"}
    assert results["accuracy"] in (0.0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0)
    assert results["baseline"]["accuracy"] == pytest.approx(2 / 3)
    assert sum(row["support"] for row in results["per_class"].values()) == 3
    path, beside = predict(capfd, tmp_path / "run", tmp_path / "out", "--split=dev")
    lines = path.read_text().split("\n")
    assert len(lines) == 8 and set(lines[1:-1]) <= {r"a\nb", r"c\td\\"}
    assert [record["line"] for record in records(beside)] == [1, 2, 3, 4, 5, 6]


def test_untagged_sentences_are_predicted_and_not_scored(letters, tmp_path, capfd):
    (tmp_path / "train.tsv").write_text("text\tlabel\n" + "zu ba pa\tS-A O O\nke zu\tO S-A\n" * 16)
    (tmp_path / "dev.tsv").write_text("text\tlabel\nzu zu\tS-A S-A\n\nzu ba\n\t\nzu pa\tS-A O\n")
    config = f"text.py:train={tmp_path}/train.tsv,dev={tmp_path}/dev.tsv,kind=tags"
    results = train(config, tmp_path / "run", letters, steps=1)
    # Of the sentences with tags: a guess that knows each word is right in all of them.
    assert results["baseline"]["f1"] == 100.0 and results["per_class"]["A"]["support"] == 3
    path, beside = predict(capfd, tmp_path / "run", tmp_path / "out", "--split=dev")
    lines = path.read_text().split("\n")
    shown = ["zu S-A", "zu S-A", "", "", "zu _", "ba _", "", "", "zu S-A", "pa O", ""]
    assert [line.rpartition(" ")[0] for line in lines] == shown


LABELS_OF = {"zu": ["bright"], "pa": ["calm", "dark"], "zu pa": ["bright", "calm", "dark"], "ke": []}


def test_separated_labels_equal_a_list_of_labels(letters, tmp_path):
    found = []
    for form in ("csv", "jsonl"):
        rows = ["text,label", *(f'{text},"{"; ".join(labels)}"' for text, labels in LABELS_OF.items())]
        if form == "jsonl":
            rows = [json.dumps({"text": text, "label": labels}) for text, labels in LABELS_OF.items()]
        (tmp_path / f"train.{form}").write_text("\n".join(rows) + "\n")
        config = f"{EXPERIMENTS}/text.py:train={tmp_path}/train.{form},dev={tmp_path}/train.{form},kind=multilabel"
        given = overrides(letters, data__label_separator=";")
        task = build_task(parse_config(experiment_config(f"{config},size=L1_H16,quick=true", given)), train=True)
        (batch,) = task.eval_batches(SINGLE_SHARD)
        found.append(
            {int(example): row.tolist() for example, row in zip(batch["example"], batch["labels"], strict=True)}
        )
    assert found[0] == found[1]
    assert [found[0][index] for index in range(4)] == [[1, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 0]]
    # The most frequent labels: none is in more than half of the rows.
    assert task.baseline() == {"micro_f1": 0.0, "macro_f1": 0.0, "subset_accuracy": 0.25}


def test_multilabel_trains_evaluates_predicts_and_converts(letters, tmp_path, capfd):
    for name, times in (("train", 16), ("dev", 2)):
        rows = [json.dumps({"text": text, "label": labels}) for text, labels in LABELS_OF.items() for _ in range(times)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    given = {"data__label_separator": ";", "model__hidden_dropout_prob": 0.0}
    config = f"text.py:train={tmp_path}/train.jsonl,dev={tmp_path}/dev.jsonl,kind=multilabel"
    every = {"steps": 200, "eval_every": 200, "checkpoint_every": 200}
    results = train(config, tmp_path / "run", letters, **every, **given)
    said = capfd.readouterr().err
    assert "3 classes: 'bright' (32), 'calm' (32), 'dark' (32)" in said
    assert results["selected_by"] == "micro_f1" and results["micro_f1"] > 0.9
    assert {"macro_f1", "subset_accuracy", "binary_cross_entropy", "loss"} <= results.keys()
    assert results["per_class"]["bright"]["support"] == 4 and "confusion" not in results
    path, beside = predict(capfd, tmp_path / "run", tmp_path / "out", "--split=dev")
    predicted = [set(filter(None, line.split(";"))) for line in path.read_text().split("\n")[1:-1]]
    wanted = [set(labels) for labels in LABELS_OF.values() for _ in range(2)]
    assert np.mean([a == b for a, b in zip(predicted, wanted, strict=True)]) == pytest.approx(
        results["subset_accuracy"]
    )
    found = [json.loads(line) for line in beside.read_text().splitlines()]
    assert [set(record["prediction"]) for record in found] == predicted
    for record in found:
        assert {label for label, p in record["probabilities"].items() if p >= 0.5} == set(record["prediction"])
    capfd.readouterr()
    cli.main(["predict", f"--checkpoint={tmp_path / 'run'}", "zu pa", "ke", "--json"])
    asked = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    for record, index in zip(asked, (4, 6), strict=True):
        assert record["prediction"] == found[index]["prediction"]
        assert record["probabilities"] == pytest.approx(found[index]["probabilities"], abs=1e-5)
    # The lower the threshold, the more labels.
    path, beside = predict(capfd, tmp_path / "run", tmp_path / "low", "--split=dev", "--config.data.threshold=1e-6")
    assert path.read_text().split("\n")[1:-1] == ["bright;calm;dark"] * 8
    cli.main(["convert", f"{tmp_path / 'run'}", f"{tmp_path / 'theirs'}", "--format=huggingface"])
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert theirs["problem_type"] == "multi_label_classification" and theirs["id2label"]["1"] == "calm"
    command = ["evaluate", f"--checkpoint={tmp_path / 'theirs'}", *overrides(None, **given)]
    capfd.readouterr()
    cli.main([*command, f"--config={EXPERIMENTS}/{config},quick=true"])
    found = json.loads(capfd.readouterr().out)
    assert found["micro_f1"] == pytest.approx(results["micro_f1"])
    (tmp_path / "other.csv").write_text("text,label\n" + "zu,bright\npa,calm\nke,dark\n")
    other = f"--config={EXPERIMENTS}/text.py:train={tmp_path}/other.csv,dev={tmp_path}/other.csv,quick=true"
    error = refused(capfd, *command[:2], other, *overrides(None))
    assert "is for multilabel, but the config is for text/classes" in error


def test_label_with_the_separator_is_an_error(letters, tmp_path, capfd):
    (tmp_path / "train.jsonl").write_text('{"text": "zu", "label": ["a,b", "c"]}\n')
    config = f"--config={EXPERIMENTS}/text.py:train={tmp_path}/train.jsonl,kind=multilabel,size=L1_H16,quick=true"
    error = refused(capfd, "train", config, f"--workdir={tmp_path / 'run'}", *overrides(letters))
    assert (
        "line 1: 'a,b' in label is not a label; labels are nonempty texts without config.data.label_separator=','"
        in error
    )


def test_data_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"train_file": "a:b.tsv", "dev_file": "gs://bucket/dev.tsv", "vocabulary": "v:1/vocab.txt"}
    overrides = [f"--config.data.{name}={value}" for name, value in given.items()]
    data = experiment_config(f"{EXPERIMENTS}/text.py", overrides).data
    assert data.train_file == str(tmp_path / "a:b.tsv") and data.vocabulary == str(tmp_path / "v:1" / "vocab.txt")
    assert data.dev_file == "gs://bucket/dev.tsv"
    stored = experiment_config(f"{EXPERIMENTS}/glue.py:task=rte", ["--config.data.path=tfds:data:glue"]).data
    assert stored.path == "tfds:data:glue"


@pytest.mark.parametrize("kind", ["classes", "multilabel", "tags"])
def test_labels_from_a_file_keep_their_order(kind, letters, tmp_path):
    rows = [{"text": "zu", "label": "y"}, {"text": "pa", "label": "x"}]
    if kind == "tags":
        rows = [{"words": [row["text"]], "tags": [row["label"]]} for row in rows]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "labels.json").write_text(json.dumps({"labels": ["z", "y", "x"]}))
    fields = ["text=words", "label=tags"] if kind == "tags" else []
    arguments = ",".join([f"train={tmp_path}/train.jsonl,dev={tmp_path}/train.jsonl,kind={kind}", *fields])
    given = overrides(letters, data__labels=tmp_path / "labels.json")
    config = experiment_config(f"{EXPERIMENTS}/text.py:{arguments},size=L1_H16,quick=true", given)
    layer = json.loads(build_task(parse_config(config), train=True).workdir_files["output_layer.json"])
    assert layer["labels"] == ["z", "y", "x"]


def test_vocabulary_may_have_any_file_name(letters, tmp_path, capfd):
    data = tmp_path / "train.csv"
    data.write_text("text,label\n" + "".join(f"the {'good' if n % 2 else 'bad'},{n % 2}\n" for n in range(8)))
    vocabulary = tmp_path / "bert-base-letters.txt"
    vocabulary.write_bytes(letters.read_bytes())
    for _ in ("begun", "gone on with"):
        train(f"text.py:train={data}", tmp_path / "run", vocabulary, steps=1)
    assert (tmp_path / "run/vocab.txt").read_bytes() == letters.read_bytes()
    cli.main(["predict", f"--checkpoint={tmp_path}/run", "the good"])


def test_bench_step_counts_the_timed_batch(letters, tmp_path, capfd):
    # Of three batches one is longer, and with this seed it comes first.
    rows = ["zu ba,a\n"] * 62 + ["zu " * 40 + ",b\n"] * 32
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(rows))
    config = f"--config={EXPERIMENTS}/text.py:train={tmp_path}/train.csv,size=L1_H16"
    given = overrides(letters, data__bucket=8, data__seq_len=64, data__batch_size=32, data__eval_split="none", seed=3)
    task = build_task(parse_config(experiment_config(config.partition("=")[2], given)), train=True)
    cli.main(["bench", "step", config, *given, "--steps=2"])
    said = json.loads(capfd.readouterr().out.splitlines()[-1])
    first, timed = next(task.train_batches(0, SINGLE_SHARD))["input_ids"], task.synthetic_batch(0)["input_ids"]
    assert first.shape != timed.shape == (said["rows"], said["seq_len"])
    assert said["positions_per_second"] * said["seconds_per_step"] == pytest.approx(timed.size)
