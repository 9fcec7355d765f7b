"""Tests of the SWAG task with data from files and from TFDS."""

import csv

import numpy as np
import tensorflow_datasets as tfds
from command_runs import load_task, predict, records, train
from finetuning_data import swag_files, write_tfds

from bertjax.data.shard import SINGLE_SHARD


def test_swag_trains_evaluates_and_predicts(letters, tmp_path, capfd):
    files = swag_files(tmp_path / "swag")
    results = train(f"swag.py:path={files}", tmp_path / "run", letters, data__eval_batch_size=8, steps=40)
    assert results["accuracy"] == 1 and results["baseline"]["accuracy"] < 0.6
    path, jsonl_path = predict(capfd, tmp_path / "run", tmp_path / "out", "--columns=ending1", "--logits")
    lines = path.read_text().split()
    test_rows = list(csv.DictReader((files / "test.csv").open()))
    correct = [[row[f"ending{index}"].startswith("zu") for index in range(4)].index(True) for row in test_rows]
    assert lines == ["pred", *map(str, correct)]
    for line, (choice, row, record) in enumerate(zip(lines[1:], test_rows, records(jsonl_path), strict=True), 2):
        assert (record["line"], record["ending1"], record["prediction"]) == (line, row["ending1"], int(choice))
        assert int(np.argmax(record["probabilities"])) == int(np.argmax(record["logits"])) == int(choice)


def test_swag_rows_from_tfds_equal_rows_of_files(letters, tmp_path):
    files = swag_files(tmp_path / "swag")
    columns = ("sent1", "sent2", "ending0", "ending1", "ending2", "ending3", "label")
    rows = [{name: row[name] for name in columns} for row in csv.DictReader((files / "val.csv").open())]
    label = tfds.features.ClassLabel(names=["0", "1", "2", "3"])
    write_tfds(tmp_path / "tfds", "swag", "validation", rows, label=label)
    sources = []
    for path in (files, f"tfds:{tmp_path / 'tfds'}:swag"):
        task = load_task("swag.py:", letters, train=False, data__path=path)
        (batch,) = task.eval_batches(SINGLE_SHARD)
        rows = zip(batch["input_ids"], batch["labels"], strict=True)
        sources.append(sorted((ids.tolist(), int(label)) for ids, label in rows))
    assert sources[0] == sources[1] and len(sources[0]) == 16
