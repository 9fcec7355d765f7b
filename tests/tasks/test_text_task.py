"""Classification, multi-label classification and tagging of user data."""

import json
import re

import numpy as np
import pytest
from helpers.command_runs import (
    EXPERIMENTS,
    evaluate,
    load_task,
    overrides,
    predict,
    records,
    refused,
    train,
    train_command,
)
from helpers.commanding import printed
from helpers.finetuning_data import write_json_lines, write_tsv

from bertjax.cli import main as cli
from bertjax.data.shard import SINGLE_SHARD
from bertjax.training.bench import benchmark_batch
from bertjax.training.checkpoint_config import experiment_config


@pytest.mark.ci
def test_evaluate_scores_a_labeled_test_file(letters, tmp_path, capfd):
    rows = "".join(f"zu {letter}\tgood\npa {letter}\tbad\n" for letter in "abcdefgh")
    (tmp_path / "train.tsv").write_text("text\tlabel\n" + rows)
    # The labels are the opposite of those in training.
    (tmp_path / "test.tsv").write_text("text\tlabel\n" + "zu a\tbad\npa a\tgood\n" * 3)
    # The whole test file is evaluated, although a share of the training file is held out as the dev set.
    results = train(f"text.py:train={tmp_path}/train.tsv", tmp_path / "run", letters, steps=40, data__dev_share=0.25)
    assert results["accuracy"] == 1.0
    metrics = evaluate(capfd, tmp_path / "run", "--split=test", f"--config.data.test_file={tmp_path}/test.tsv")
    assert metrics["accuracy"] == 0.0
    for split, message in (("test", "no test file; set it with --config.data.test_file"), ("train", "unknown --split")):
        assert message in refused(capfd, "evaluate", f"--checkpoint={tmp_path / 'run'}", f"--split={split}")


def test_regression_logs_its_labels_and_has_a_baseline_of_squared_errors(letters, tmp_path):
    (tmp_path / "train.csv").write_text("text,label\nzu,100\npa,300\n")
    (tmp_path / "small.csv").write_text("text,label\nzu,1\npa,3\n")
    large, small = (
        load_task(f"text.py:train={tmp_path}/{name}.csv,dev={tmp_path}/{name}.csv,kind=number", letters)
        for name in ("train", "small")
    )
    assert large.baseline()["squared_error"] == 100**2
    assert "labels: mean 200, standard deviation 100; scale them to -5 to 5" in " ".join(large.notes)
    assert "labels: mean 2, standard deviation 1" in small.notes


@pytest.mark.parametrize(
    "content, kind, message",
    [
        ("text,label\n", "multilabel", "contains 0 different labels in 0 rows"),
        ("text,label\nzu,a\n", "classes", "contains 1 different labels in 1 rows"),
        ('text,label\nzu,"[1, 0, 1]"\n', "multilabel", "line 2: label is '.1, 0, 1.', multi-hot labels without names"),
        ("text,label\nc,O\na b,B-PER LOC\n", "tags", "line 3 mixes entity tags with other tags: B-PER and LOC"),
    ],
)
def test_unusable_training_file_or_kind_is_an_error(content, kind, message, letters, tmp_path, capfd):
    (tmp_path / "train.csv").write_text(content)
    experiment = f"text.py:train={tmp_path}/train.csv,dev={tmp_path}/train.csv,kind={kind}"
    assert re.search(message, refused(capfd, *train_command(experiment, tmp_path / "run", letters)))


def test_run_without_evaluation_names_its_last_checkpoint_and_only_files_that_exist(letters, tmp_path, capfd):
    (tmp_path / "train.csv").write_text("text,label\nzu,a\npa,b\n")
    train(f"text.py:train={tmp_path}/train.csv", tmp_path / "run", letters, steps=1)
    log = capfd.readouterr().err
    assert "; last checkpoint " in log and "best checkpoint" not in log
    assert "curves.png" not in log and not (tmp_path / "run" / "curves.png").exists()


def test_every_row_has_a_line_in_the_prediction_file(letters, tmp_path, capfd):
    labels = ["a\nb", "c\td\\"]
    rows = [{"text": f"zu{index}", "label": labels[index % 2]} for index in range(8)]
    write_json_lines(tmp_path / "train.jsonl", rows)
    # The file has a blank line, and rows without label, with an empty label and with an empty text.
    unusual = ({"text": "['zu', 'ba']"}, {"text": "pa", "label": ""}, {"text": "", "label": labels[0]})
    lines = [json.dumps(rows[0]), "", *map(json.dumps, (*unusual, rows[1]))]
    (tmp_path / "dev.jsonl").write_text("\n".join(lines) + "\n")
    config = f"text.py:train={tmp_path}/train.jsonl,dev={tmp_path}/dev.jsonl"
    results = train(config, tmp_path / "run", letters, steps=1)
    dev = results["files"][1]
    assert (dev["read"], dev["used"], dev["skipped"]) == (6, 3, {})
    assert dev["noted"]["with too few fields"]["rows"] == 2
    assert dev["noted"]["with a list or bytes, whose brackets and quotes are a part of the text"]["first"] == "line 3"
    assert dev["noted"]["with an empty label, predicted but not scored"] == {"rows": 1, "first": "line 4"}
    assert results["baseline"]["accuracy"] == pytest.approx(2 / 3)
    assert sum(row["support"] for row in results["per_class"].values()) == 3
    assert {"accuracy", "macro_f1", "matthews"} <= results.keys()
    path, jsonl_path = predict(capfd, tmp_path / "run", tmp_path / "out", "--split=dev", "--columns=text")
    lines = path.read_text().split("\n")
    assert lines[0] == "prediction" and len(lines) == 8 and set(lines[1:-1]) <= {r"a\nb", r"c\td\\"}
    texts = ["zu0", "", "['zu', 'ba']", "pa", "", "zu1"]
    assert [(record["line"], record["text"]) for record in records(jsonl_path)] == [*enumerate(texts, 1)]


@pytest.mark.ci
@pytest.mark.parametrize(("tag", "metric", "label"), [("S-A", "f1", "A"), ("NOUN", "word_accuracy", "NOUN")])
def test_untagged_sentences_are_predicted_and_not_scored(tag, metric, label, letters, tmp_path, capfd):
    write_tsv(tmp_path / "train.tsv", ["text", "label"], [("zu ba pa", f"{tag} O O"), ("ke zu", f"O {tag}")] * 16)
    rows = [("zu zu", f"{tag} {tag}"), ("",), ("zu ba",), ("", ""), ("zu pa", f"{tag} O")]
    write_tsv(tmp_path / "dev.tsv", ["text", "label"], rows)
    config = f"text.py:train={tmp_path}/train.tsv,dev={tmp_path}/dev.tsv,kind=tags"
    results = train(config, tmp_path / "run", letters, steps=1)
    # Only tagged sentences are scored. All of their words occur in training, so the baseline is perfect.
    assert results["baseline"][metric] == (100.0 if metric == "f1" else 1.0) and results["selected_by"] == metric
    assert results["per_class"][label]["support"] == 3 and ("f1" in results) == (metric == "f1")
    path, jsonl_path = predict(capfd, tmp_path / "run", tmp_path / "out", "--split=dev", "--columns=text")
    lines = path.read_text().split("\n")
    expected = [f"zu {tag}", f"zu {tag}", "", "", "zu _", "ba _", "", "", f"zu {tag}", "pa O", ""]
    assert [line.rpartition(" ")[0] for line in lines] == expected
    sentences = [(record["line"], record["text"], len(record["prediction"])) for record in records(jsonl_path)]
    assert sentences == [(2, "zu zu", 2), (3, "", 0), (4, "zu ba", 2), (5, "", 0), (6, "zu pa", 2)]


LABELS_BY_TEXT = {"zu": ["bright"], "pa": ["calm", "dark"], "zu pa": ["bright", "calm", "dark"], "ke": []}


@pytest.mark.ci
def test_multilabel_trains_evaluates_predicts_and_converts(letters, tmp_path, capfd):
    for name, times in (("train", 16), ("dev", 2)):
        rows = ({"text": text, "label": labels} for text, labels in LABELS_BY_TEXT.items() for _ in range(times))
        write_json_lines(tmp_path / f"{name}.jsonl", rows)
    config = f"text.py:train={tmp_path}/train.jsonl,dev={tmp_path}/dev.jsonl,kind=multilabel"
    results = train(config, tmp_path / "run", letters, steps=200, data__label_separator=";")
    assert "3 classes: 'bright' (32), 'calm' (32), 'dark' (32)" in capfd.readouterr().err
    assert results["selected_by"] == "micro_f1" and results["micro_f1"] > 0.9
    assert {"macro_f1", "subset_accuracy", "binary_cross_entropy", "loss"} <= results.keys()
    assert results["per_class"]["bright"]["support"] == 4 and "confusion" not in results
    path, jsonl_path = predict(capfd, tmp_path / "run", tmp_path / "out", "--split=dev")
    predicted = [set(filter(None, line.split(";"))) for line in path.read_text().split("\n")[1:-1]]
    gold = [set(labels) for labels in LABELS_BY_TEXT.values() for _ in range(2)]
    assert np.mean([a == b for a, b in zip(predicted, gold, strict=True)]) == pytest.approx(results["subset_accuracy"])
    predictions = [json.loads(line) for line in jsonl_path.read_text().splitlines()]
    assert [set(record["prediction"]) for record in predictions] == predicted
    for record in predictions:
        assert {label for label, p in record["probabilities"].items() if p >= 0.5} == set(record["prediction"])
    output = printed(capfd, "predict", f"--checkpoint={tmp_path / 'run'}", "zu pa", "ke", "--json")
    texts = [json.loads(line) for line in output.splitlines()]
    for record, index in zip(texts, (4, 6), strict=True):
        assert record["prediction"] == predictions[index]["prediction"]
        assert record["probabilities"] == pytest.approx(predictions[index]["probabilities"], abs=1e-5)
    # A threshold near 0 predicts all labels.
    path, _ = predict(capfd, tmp_path / "run", tmp_path / "low", "--split=dev", "--config.data.threshold=1e-6")
    assert path.read_text().split("\n")[1:-1] == ["bright;calm;dark"] * 8
    cli.main(["convert", f"{tmp_path / 'run'}", f"{tmp_path / 'converted'}", "--format=huggingface"])
    converted = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert converted["problem_type"] == "multi_label_classification" and converted["id2label"]["1"] == "calm"
    flags = [f"--config={EXPERIMENTS}/{config},quick=true", *overrides(None, data__label_separator=";")]
    metrics = evaluate(capfd, tmp_path / "converted", *flags)
    assert metrics["micro_f1"] == pytest.approx(results["micro_f1"])
    (tmp_path / "other.csv").write_text("text,label\n" + "zu,bright\npa,calm\nke,dark\n")
    other = f"--config={EXPERIMENTS}/text.py:train={tmp_path}/other.csv,dev={tmp_path}/other.csv,quick=true"
    error = refused(capfd, "evaluate", f"--checkpoint={tmp_path / 'converted'}", other, *overrides(None))
    assert "was trained with kind 'multilabel', but the config uses" in error


def test_data_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"train_file": "a:b.tsv", "dev_file": "gs://bucket/dev.tsv", "vocabulary": "v:1/vocab.txt"}
    data = experiment_config("text", [f"--config.data.{name}={value}" for name, value in files.items()]).data
    assert data.train_file == str(tmp_path / "a:b.tsv") and data.vocabulary == str(tmp_path / "v:1" / "vocab.txt")
    assert data.dev_file == "gs://bucket/dev.tsv"
    assert experiment_config("glue:task=rte", ["--config.data.path=tfds:data:glue"]).data.path == "tfds:data:glue"
    sources = experiment_config("embed:train=pairs.tsv+hf:org/x:train", []).data.sources
    assert [source["file"] for source in sources] == [f"{tmp_path}/pairs.tsv", "hf:org/x:train"]


def test_bench_step_times_the_most_common_shape(letters, tmp_path):
    # With this seed, the first of three batches has another shape than the others.
    (tmp_path / "train.csv").write_text("text,label\n" + "zu ba,a\n" * 62 + ("zu " * 40 + ",b\n") * 32)
    fields = {"data__bucket": 8, "data__seq_len": 64, "data__batch_size": 32, "seed": 3}
    task = load_task(f"text.py:train={tmp_path}/train.csv", letters, **fields)
    first, timed = next(task.train_batches(0, SINGLE_SHARD)), benchmark_batch(task)[0]
    assert first["input_ids"].shape != timed["input_ids"].shape


def test_classes_and_their_weights_are_logged_by_label(letters, tmp_path):
    (tmp_path / "train.csv").write_text("text,label\n" + "ba,a\n" * 6 + "zu,b\n" * 2)
    for weights, expected in (("balanced", ["class weights: 'a'=0.6667, 'b'=2"]), ("", [])):
        task = load_task(f"text.py:train={tmp_path}/train.csv", letters, data__class_weights=weights)
        assert [note for note in task.notes if note.startswith("class weights")] == expected
        assert "2 classes: 'a' (6), 'b' (2)" in task.notes


def test_special_token_in_a_text_is_one_token(letters, tmp_path):
    (tmp_path / "data.csv").write_text("text,label\na [SEP] b,x\nthe [MASK],y\n")
    task = load_task(f"text.py:train={tmp_path}/data.csv,dev={tmp_path}/data.csv", letters)
    (batch,) = task.eval_batches(SINGLE_SHARD)
    rows = {" ".join(task.tokenizer.pieces(ids)).replace(" [PAD]", "") for ids in batch["input_ids"]}
    assert {"[CLS] a [SEP] b [SEP]", "[CLS] the [MASK] [SEP]"} <= rows
