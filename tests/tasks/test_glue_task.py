"""GLUE: results, predictions and the submission archive."""

import csv
import json
import os
import shutil
import zipfile

import numpy as np
import pytest
import tensorflow_datasets as tfds
from helpers.command_runs import evaluate, load_task, predict, read_metrics, records, refused, train
from helpers.commanding import printed
from helpers.finetuning_data import glue_files, swag_files, write_tfds, write_tsv
from tensorflow_datasets.text.glue import Glue

from bertjax.cli import main as cli
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import load_vocabulary
from bertjax.data.shard import SINGLE_SHARD
from bertjax.inference.glue_submission import NUM_TEST_EXAMPLES
from bertjax.tasks.glue import SPECS


def test_training_learns_cola_and_evaluates_once_per_epoch(cola):
    lines = read_metrics(cola)
    evaluated = [line for line in lines if "eval_matthews" in line]
    assert [line["step"] for line in evaluated] == list(range(8, 88, 8))
    assert max(line["eval_matthews"] for line in evaluated) > 0.9
    results = json.loads((cola / "results.json").read_text())
    assert results["matthews"] == max(line["eval_matthews"] for line in evaluated)
    assert results["baseline"] == {"matthews": 0.0, "accuracy": pytest.approx(11 / 21)}
    assert [(file["read"], file["used"]) for file in results["files"]] == [(64, 64), (21, 21)]
    assert results["config"]["data"]["task"] == "cola" and len(results["data_sha256"]) == 64


@pytest.mark.ci
def test_predictions_for_the_dev_file_and_for_a_text_file_are_equal_and_in_input_order(cola, glue, capfd, tmp_path):
    path, jsonl_path = predict(capfd, cola, tmp_path, "--split=dev", "--columns=sentence,source", "--logits")
    assert (path.name, jsonl_path.name) == ("CoLA.tsv", "CoLA.jsonl")
    rows = list(csv.reader(path.open(), delimiter="\t"))
    assert rows[0] == ["index", "prediction"] and [row[0] for row in rows[1:]] == [str(i) for i in range(21)]
    accuracy = np.mean([row[1] == str(index % 2) for index, row in enumerate(rows[1:])])
    assert accuracy == pytest.approx(json.loads((cola / "results.json").read_text())["accuracy"])
    dev_rows = [line.split("\t") for line in (glue / "CoLA/dev.tsv").read_text().splitlines()]
    predictions = records(jsonl_path)
    assert [record["prediction"] for record in predictions] == [row[1] for row in rows[1:]]
    assert [(record["line"], record["source"], record["sentence"]) for record in predictions] == [
        (line, row[0], row[3]) for line, row in enumerate(dev_rows, 1)
    ]
    for record in predictions:
        assert record["prediction"] == max(record["probabilities"], key=record["probabilities"].get)
        margin = record["logits"]["1"] - record["logits"]["0"]
        assert record["probabilities"]["1"] == pytest.approx(1 / (1 + np.exp(-margin)), abs=1e-5)
    # Predict the same texts from a text file.
    (tmp_path / "texts.txt").write_text("".join(f"{record['sentence']}\n" for record in predictions))
    output = printed(capfd, "predict", f"--checkpoint={cola}", f"--text={tmp_path / 'texts.txt'}", "--json")
    for line, record in zip(output.splitlines(), predictions, strict=True):
        assert json.loads(line)["prediction"] == record["prediction"]
        assert json.loads(line)["probabilities"] == pytest.approx(record["probabilities"], abs=1e-5)
    error = refused(capfd, "predict", f"--checkpoint={cola}", "zu ||| pa")
    assert "is a pair, but the model takes single texts" in error
    unfinished = tmp_path / ".CoLA.tsv-0123456789abcdef.unfinished"  # temporary file of a killed command
    unfinished.write_text("")
    os.utime(unfinished, (0, 0))
    test_path, jsonl_path = predict(capfd, cola, tmp_path)
    assert not unfinished.exists()
    assert len(test_path.read_text().splitlines()) == 10
    # The header is line 1.
    assert [record["line"] for record in records(jsonl_path)] == list(range(2, 11))
    assert "logits" not in jsonl_path.read_text()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("index,nosuch", "no column 'nosuch'; its columns are 'index'"),
        ("prediction", "'prediction' is already a field"),
    ],
)
def test_invalid_columns_flag_is_an_error_before_prediction(cola, capfd, tmp_path, columns, message):
    command = ["predict", f"--checkpoint={cola}", f"--output={tmp_path / 'out'}", f"--columns={columns}"]
    assert message in refused(capfd, *command)
    assert not (tmp_path / "out").exists()


def test_predictions_of_an_unordered_file_are_sorted_by_index(cola, capfd, tmp_path):
    sentences = {7: "zu ba", 3: "pa lo", 5: "zu ke", 0: "pa mi"}
    write_tsv(tmp_path / "glue/CoLA/test.tsv", ["index", "sentence"], [[str(i), text] for i, text in sentences.items()])
    path, _ = predict(capfd, cola, tmp_path, f"--config.data.path={tmp_path}/glue")
    assert path.read_text() == "index\tprediction\n0\t0\n3\t0\n5\t1\n7\t1\n"
    # TFDS shuffles the rows that it stores.
    rows = [{"sentence": text, "label": -1, "idx": index} for index, text in sentences.items()]
    label, idx = tfds.features.ClassLabel(names=["unacceptable", "acceptable"]), tfds.features.Scalar(np.int32)
    write_tfds(tmp_path / "tfds", "glue/cola", "test", rows, version="2.0.0", label=label, idx=idx)
    data_flag = f"--config.data.path=tfds:{tmp_path}/tfds:glue"
    tfds_path, jsonl_path = predict(capfd, cola, tmp_path / "out", data_flag, "--columns=idx")
    assert tfds_path.read_text() == path.read_text()
    predictions = {int(record["idx"]): record["prediction"] for record in records(jsonl_path)}
    assert predictions == {0: "0", 3: "0", 5: "1", 7: "1"}


PAIR_HEADER = "index\tsentence1\tsentence2\tlabel"
MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
QQP_HEADER = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"


@pytest.mark.parametrize(
    ("task", "lines", "texts", "labels", "best_metric"),
    [
        ("sst2", ["sentence\tlabel", "fine \t1", "bad \t0"], ["fine", "bad"], [1, 0], "accuracy"),
        ("mrpc", [MRPC_HEADER, "1\t7\t8\ta b\tb a", "0\t5\t6\tc\td"], ["a b | b a", "c | d"], [1, 0], "f1"),
        # A row on two lines is read as two rows with too few fields.
        ("qqp", [QQP_HEADER, "3\t4\t5\tx\ty\t0", '6\t7\t8\t"x', 'x"\tx\t1'], ["x | y"], [0], "f1"),
        ("qnli", ["question\tsentence\tlabel", "x\ty\tnot_entailment"], ["x | y"], [1], "accuracy"),
        ("wnli", [PAIR_HEADER, "0\ta\tb\t1", "1\tc\td\t0"], ["a | b", "c | d"], [1, 0], "accuracy"),
    ],
)
def test_columns_of_official_files(task, lines, texts, labels, best_metric, letters, tmp_path):
    folder = tmp_path / SPECS[task].folder
    folder.mkdir()
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    built = load_task(f"glue.py:task={task},path={tmp_path}", letters, data__seq_len=32)
    assert built.best_metric.name == best_metric
    (batch,) = built.eval_batches(SINGLE_SHARD)
    tokenizer = Tokenizer(load_vocabulary(letters))
    # The rows of a batch are sorted by length, and `example` contains their indices.
    for row, (label, text) in enumerate(zip(labels, texts, strict=True)):
        (position,) = np.flatnonzero(batch["example"] == row)
        assert batch["labels"][position] == label
        ids = batch["input_ids"][position]
        assert tokenizer.decode(ids[ids > 0]) == f"[CLS] {text.replace('|', '[SEP]')} [SEP]"


def test_incomplete_submission_is_rejected_unless_partial_is_set(cola, capfd, tmp_path):
    predict(capfd, cola, tmp_path / "predictions")
    with (tmp_path / "predictions" / "CoLA.tsv").open("a") as file:
        file.write("9\t\n")  # a row without a prediction, which does not count
    output = tmp_path / "some.zip"
    command = ["submission", f"--predictions={tmp_path / 'predictions'}", f"--output={output}"]
    message = refused(capfd, *command, code=1, logs=False)
    assert "incomplete submission" in message and not output.exists()
    assert "RTE.tsv is missing" in message and "CoLA.tsv has 9 predictions instead of 1,063" in message
    cli.main([*command, "--partial"])
    assert "incomplete: RTE.tsv is missing" in capfd.readouterr().err
    assert sorted(zipfile.ZipFile(output).namelist()) == ["CoLA.tsv", "WNLI.tsv"]


def test_submission_predicts_wnli_by_the_majority_class_unless_own_wnli(tmp_path, capfd):
    for name, count in NUM_TEST_EXAMPLES.items():
        rows = "".join(f"{index}\t1\n" for index in range(count))
        (tmp_path / name).write_text("index\tprediction\n" + rows)
    command = ["submission", f"--predictions={tmp_path}", f"--output={tmp_path / 'all.zip'}"]
    cli.main(command)
    (message,) = capfd.readouterr().err.splitlines()
    assert message.startswith("WNLI.tsv: the majority class")
    rows = [f"{index}\t0" for index in range(146)]
    wnli = zipfile.ZipFile(tmp_path / "all.zip").read("WNLI.tsv").decode()
    assert wnli.splitlines() == ["index\tprediction", *rows]
    cli.main([*command, "--own_wnli"])
    assert capfd.readouterr().err == ""
    assert b"145\t1\n" in zipfile.ZipFile(tmp_path / "all.zip").read("WNLI.tsv")


@pytest.mark.parametrize(
    "experiment, write_files, dataset, file, names",
    [
        ("glue.py:task=rte", glue_files, "glue/rte", "RTE/dev.tsv", ["entailment", "not_entailment"]),
        ("swag.py:", swag_files, "swag", "val.csv", ["0", "1", "2", "3"]),
    ],
)
def test_tfds_rows_equal_rows_of_files(experiment, write_files, dataset, file, names, letters, tmp_path):
    files = write_files(tmp_path / "files")
    table = csv.DictReader((files / file).open(), delimiter="\t" if file.endswith("tsv") else ",")
    rows = [{name: row[name] for name in row if name.startswith(("sent", "ending", "label"))} for row in table]
    rows = [row | {"idx": index} for index, row in enumerate(rows)]
    features = {"label": tfds.features.ClassLabel(names=names), "idx": tfds.features.Scalar(np.int32)}
    version = "2.0.0" if "glue" in dataset else "1.0.0"
    write_tfds(tmp_path / "tfds", dataset, "validation", rows, version=version, **features)
    sources = []
    for path in (files, f"tfds:{tmp_path / 'tfds'}:{dataset.partition('/')[0]}"):
        task = load_task(experiment, letters, train=False, data__path=path)
        (batch,) = task.eval_batches(SINGLE_SHARD)
        sources.append(sorted(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)))
    assert sources[0] == sources[1] and len(sources[0]) == len(batch["input_ids"])


@pytest.mark.ci
def test_stsb_is_a_regression_task(glue, letters, tmp_path, capfd):
    results = train(f"glue.py:task=stsb,path={glue}", tmp_path / "run", letters)
    assert not any(file["noted"] for file in results["files"])
    assert {"pearson", "spearman", "squared_error"} <= results.keys()
    path, jsonl_path = predict(capfd, tmp_path / "run", tmp_path)
    numbers = [float(line.split("\t")[1]) for line in path.read_text().splitlines()[1:]]
    assert all(0 <= number <= 5 for number in numbers)
    assert [record["prediction"] for record in records(jsonl_path)] == pytest.approx(numbers, abs=6e-4)


@pytest.mark.ci
def test_mnli_has_two_dev_sets_and_predicts_ax(glue, letters, tmp_path, capfd):
    results = train(f"glue.py:task=mnli,path={glue}", tmp_path / "run", letters)
    assert {"accuracy", "accuracy_mismatched"} <= results.keys()
    assert results["loss"] == results["cross_entropy"] and results["loss_mismatched"] != results["loss"]
    for suffix, rows in (("", 8), ("_mismatched", 11)):
        counts = [count for row in results[f"confusion{suffix}"].values() for count in row.values()]
        assert sum(counts) == rows
    # Swapping the two sets swaps their losses.
    for source, target in (("matched", "mismatched"), ("mismatched", "matched")):
        shutil.copy(glue / "MNLI" / f"dev_{source}.tsv", tmp_path / f"dev_{target}.tsv")
    swapped = evaluate(capfd, tmp_path / "run", f"--config.data.path={tmp_path}")
    assert swapped["loss"] == pytest.approx(results["loss_mismatched"], rel=1e-5)
    assert swapped["loss_mismatched"] == pytest.approx(results["loss"], rel=1e-5)
    paths = predict(capfd, tmp_path / "run", tmp_path / "out")
    assert [path.stem for path in paths] == ["MNLI-m", "MNLI-mm", "AX"] * 2
    for path, rows in zip(paths[:3], (8, 11, 6), strict=True):
        predictions = [record["prediction"] for record in records(path.with_suffix(".jsonl"))]
        assert predictions == [line.split("\t")[1] for line in path.read_text().splitlines()[1:]]
        assert len(predictions) == rows


def test_text_columns_are_the_text_features_of_tfds():
    configs = {config.name: [*config.text_features] for config in Glue.BUILDER_CONFIGS}
    for name, spec in SPECS.items():
        assert [*(spec.tfds_texts or spec.texts)] == configs[name], name
