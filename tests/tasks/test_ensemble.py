"""Tests that an ensemble averages logits, for every kind of output."""

import json
import shutil

import numpy as np
import pytest
from finetuning_data import conll_files, glue_files, squad_files
from running import records, refused, train

from bertjax.cli import main as cli

TASKS = {
    "classes": ("glue.py:task=cola", glue_files, {}),
    "spans": (
        "squad.py:version=2.0",
        lambda folder: squad_files(folder, "2.0"),
        {"data.seq_len": 128, "data.n_best": 200},
    ),
    "tags": ("ner.py:context=sentence", conll_files, {}),
}


def members(kind, folder, letters):
    experiment, make, fields = TASKS[kind]
    files = make(folder / "files")
    for seed in (1, 2):
        given = {"seed": seed, **fields}
        if seed == 2 and kind == "classes":
            given |= {"data.class_weights": "balanced", "feature_head.lstm_layers": 1, "feature_head.lstm_size": 4}
        train(f"{experiment},path={files}", folder / f"{seed}", letters, steps=2, **given)
    return [f"--checkpoint={folder / str(seed)}" for seed in (1, 2)]


def logits_of(record) -> np.ndarray:
    return np.array(list(record["logits"].values()))


@pytest.mark.parametrize("kind", ["classes", *(pytest.param(one, marks=pytest.mark.slow) for one in ("spans", "tags"))])
def test_ensemble_averages_the_logits_of_its_members(kind, letters, tmp_path, capfd):
    both = members(kind, tmp_path, letters)
    capfd.readouterr()
    cli.main(["ensemble", *both, f"--output={tmp_path}/both"])
    told = json.loads(capfd.readouterr().out)
    results = json.loads((tmp_path / "both/results.json").read_text())
    assert told.items() <= results.items() and len(told["members"]) == 2
    for index, checkpoint in enumerate(both):
        capfd.readouterr()
        cli.main(["evaluate", checkpoint])
        alone = json.loads(capfd.readouterr().out)
        shared = alone.keys() & told["members"][index].keys()
        assert shared and all(alone[name] == pytest.approx(told["members"][index][name], abs=1e-5) for name in shared)
        cli.main(["predict", checkpoint, "--split=dev", f"--output={tmp_path}/p{index}", "--logits"])
    if kind == "spans":
        # Of one question the scores of all spans, of which each member's best ones are written.
        best = json.loads((tmp_path / "both/nbest_predictions.json").read_text())
        one, two = (
            {name: {c["text"]: c["score"] for c in found} for name, found in json.loads(file.read_text()).items()}
            for file in (tmp_path / f"p{index}/nbest_predictions.json" for index in (0, 1))
        )
        (article,) = json.loads((tmp_path / "files/dev-v2.0.json").read_text())["data"]
        passages = {paragraph["qas"][0]["id"]: paragraph["context"] for paragraph in article["paragraphs"]}
        compared = 0
        for name, candidates in best.items():
            for candidate in candidates:
                # One that is there several times has the best score of all its places.
                once = passages[name].count(candidate["text"]) == 1
                if once and candidate["text"] in one[name] and candidate["text"] in two[name]:
                    mean = (one[name][candidate["text"]] + two[name][candidate["text"]]) / 2
                    assert candidate["score"] == pytest.approx(mean, abs=1e-4)
                    compared += 1
        assert compared > 20
        return
    (file,) = (tmp_path / "both").glob("*.jsonl")
    for mine, one, two in zip(
        *(records(folder / file.name) for folder in (file.parent, tmp_path / "p0", tmp_path / "p1")), strict=True
    ):
        if kind == "tags":
            for index, tag in enumerate(mine["prediction"]):
                scores = [
                    {
                        name: (one["logits"][index][name] + two["logits"][index][name]) / 2
                        for name in one["logits"][index]
                    }
                ]
                assert tag == max(scores[0], key=scores[0].get)
        else:
            mean = (logits_of(one) + logits_of(two)) / 2
            odds = np.exp(mean - mean.max())
            np.testing.assert_allclose(list(mine["probabilities"].values()), odds / odds.sum(), atol=2e-6)


@pytest.mark.slow
def test_incompatible_ensemble_members_are_an_error(cola, glue, letters, tmp_path, capfd):
    command = ["ensemble", f"--output={tmp_path}/both", f"--checkpoint={cola}"]
    assert "an ensemble of 1 checkpoints; give --checkpoint at least twice" in refused(capfd, *command)
    shutil.copytree(cola, tmp_path / "copy")
    assert "has the same parameters as another member" in refused(capfd, *command, f"--checkpoint={tmp_path}/copy")
    into = ("ensemble", f"--output={tmp_path}/copy", f"--checkpoint={cola}", f"--checkpoint={tmp_path}/copy")
    assert f"{tmp_path}/copy is the workdir of a run" in refused(capfd, *into)
    train(f"glue.py:task=rte,path={glue}", tmp_path / "rte", letters, steps=1)
    assert "other data than the first member (task: cola -> rte)" in refused(
        capfd, *command, f"--checkpoint={tmp_path}/rte"
    )
    pieces = tmp_path / "pieces.txt"
    pieces.write_text(letters.read_text() + "##ed\n")
    train(f"glue.py:task=cola,path={glue}", tmp_path / "other", pieces, steps=1)
    assert "has another vocabulary.json" in refused(capfd, *command, f"--checkpoint={tmp_path}/other")
    assert not (tmp_path / "both/results.json").exists()
