"""Ensembles: averaged logits, and incompatible members."""

import json
import shutil

import numpy as np
import pytest
from helpers.command_runs import evaluate, predict, records, refused, train
from helpers.commanding import printed

from bertjax.inference.ensemble import _update_mean


@pytest.mark.ci
def test_ensemble_averages_the_logits_of_its_members(glue, letters, tmp_path, capfd):
    other = {"data.class_weights": "balanced", "feature_head.lstm_layers": 1, "feature_head.lstm_size": 4}
    for seed, fields in ((1, {}), (2, other)):
        train(f"glue.py:task=cola,path={glue}", tmp_path / f"{seed}", letters, steps=2, seed=seed, **fields)
    checkpoints = [tmp_path / "1", tmp_path / "2"]
    flags = [f"--checkpoint={checkpoint}" for checkpoint in checkpoints]
    report = json.loads(printed(capfd, "ensemble", *flags, f"--output={tmp_path}/ensemble"))
    results = json.loads((tmp_path / "ensemble/results.json").read_text())
    assert report.items() <= results.items()
    for index, (checkpoint, member) in enumerate(zip(checkpoints, report["members"], strict=True)):
        metrics = evaluate(capfd, checkpoint)
        shared = metrics.keys() & member.keys()
        assert shared and all(metrics[name] == pytest.approx(member[name], abs=1e-5) for name in shared)
        predict(capfd, checkpoint, tmp_path / f"member{index}", "--split=dev", "--logits")
    files = [tmp_path / folder / "CoLA.jsonl" for folder in ("ensemble", "member0", "member1")]
    for record, *members in zip(*map(records, files), strict=True):
        mean = np.mean([list(member["logits"].values()) for member in members], axis=0)
        odds = np.exp(mean - mean.max())
        np.testing.assert_allclose(list(record["probabilities"].values()), odds / odds.sum(), atol=2e-6)


def test_mean_of_the_lowest_logits_does_not_overflow():
    # SQuAD's logits at padding are the lowest float32 value.
    lowest = np.finfo(np.float32).min
    members = [[{"start": np.array([value, lowest], np.float32), "example": np.array([3])}] for value in (1, 2, 6)]
    mean = members[0]
    for count, outputs in enumerate(members[1:], 2):
        mean = _update_mean(mean, outputs, count)
    assert mean[0]["start"].tolist() == [3, lowest] and mean[0]["example"].tolist() == [3]


@pytest.mark.slow
def test_incompatible_ensemble_members_are_an_error(cola, glue, letters, tmp_path, capfd):
    command = ["ensemble", f"--output={tmp_path}/ensemble", f"--checkpoint={cola}"]
    shutil.copytree(cola, tmp_path / "copy")
    assert "with the same parameters" in refused(capfd, *command, f"--checkpoint={tmp_path}/copy")
    to_workdir = ("ensemble", f"--output={tmp_path}/copy", f"--checkpoint={cola}", f"--checkpoint={tmp_path}/copy")
    assert f"{tmp_path}/copy is a workdir" in refused(capfd, *to_workdir)
    train(f"glue.py:task=rte,path={glue}", tmp_path / "rte", letters, steps=1)
    message = refused(capfd, *command, f"--checkpoint={tmp_path}/rte")
    assert "rte/checkpoints/1 differs from the first member in labels, data; set the same for all" in message
    vocabulary = tmp_path / "vocabulary.txt"
    vocabulary.write_text(letters.read_text() + "##ed\n")
    train(f"glue.py:task=cola,path={glue}", tmp_path / "other", vocabulary, steps=1, data__seq_len=16)
    message = refused(capfd, *command, f"--checkpoint={tmp_path}/other")
    assert "other/checkpoints/1 differs from the first member in vocabulary" in message
    assert ", config.data.seq_len; set" in message
    assert not (tmp_path / "ensemble/results.json").exists()
