"""Tests of the SWAG task."""

import csv

import numpy as np
import pytest
from helpers.command_runs import predict, records, train
from helpers.finetuning_data import swag_files


@pytest.mark.ci
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
