"""Ensembles: averaged logits for each kind of output, and incompatible members."""

import functools
import json
import re
import shutil

import numpy as np
import pytest
from helpers.command_runs import evaluate, predict, records, refused, train
from helpers.commanding import printed
from helpers.finetuning_data import conll_files, glue_files, learnable_squad_files

squad_files_v2 = functools.partial(learnable_squad_files, version="2.0")
TASKS = {
    "classes": ("glue.py:task=cola", glue_files, {}),
    "spans": ("squad.py:version=2.0", squad_files_v2, {"data.seq_len": 128, "data.n_best": 200}),
    "tags": ("ner.py:context=sentence", conll_files, {}),
}


def train_members(kind, folder, letters):
    """Trains two members and returns their workdirs."""
    experiment, write_files, fields = TASKS[kind]
    files = write_files(folder / "files")
    for seed in (1, 2):
        other = {"data.class_weights": "balanced", "feature_head.lstm_layers": 1, "feature_head.lstm_size": 4}
        member_fields = {"seed": seed, **fields, **(other if seed == 2 and kind == "classes" else {})}
        train(f"{experiment},path={files}", folder / f"{seed}", letters, steps=2, **member_fields)
    return [folder / "1", folder / "2"]


@pytest.mark.ci
@pytest.mark.parametrize(
    "kind", ["classes", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("spans", "tags"))]
)
def test_ensemble_averages_the_logits_of_its_members(kind, letters, tmp_path, capfd):
    checkpoints = train_members(kind, tmp_path, letters)
    flags = [f"--checkpoint={checkpoint}" for checkpoint in checkpoints]
    report = json.loads(printed(capfd, "ensemble", *flags, f"--output={tmp_path}/ensemble"))
    results = json.loads((tmp_path / "ensemble/results.json").read_text())
    assert report.items() <= results.items()
    for index, (checkpoint, member) in enumerate(zip(checkpoints, report["members"], strict=True)):
        metrics = evaluate(capfd, checkpoint)
        shared = metrics.keys() & member.keys()
        assert shared and all(metrics[name] == pytest.approx(member[name], abs=1e-5) for name in shared)
        predict(capfd, checkpoint, tmp_path / f"member{index}", "--split=dev", "--logits")
    if kind == "spans":
        assert_mean_scores(tmp_path)
        return
    (file,) = (tmp_path / "ensemble").glob("*.jsonl")
    files = [folder / file.name for folder in (file.parent, tmp_path / "member0", tmp_path / "member1")]
    for record, first, second in zip(*map(records, files), strict=True):
        if kind == "tags":
            for tag, *logits in zip(record["prediction"], first["logits"], second["logits"], strict=True):
                mean = {name: sum(member[name] for member in logits) for name in logits[0]}
                assert tag == max(mean, key=mean.get)
        else:
            mean = np.mean([list(member["logits"].values()) for member in (first, second)], axis=0)
            odds = np.exp(mean - mean.max())
            np.testing.assert_allclose(list(record["probabilities"].values()), odds / odds.sum(), atol=2e-6)


def assert_mean_scores(folder):
    """Compares the n-best lists, which contain nearly all spans. Each text has the maximum score of its spans."""
    paths = [folder / name / "nbest_predictions.json" for name in ("ensemble", "member0", "member1")]
    ensemble, first, second = (
        {(id_, each["text"]): each["score"] for id_, nbest in json.loads(path.read_text()).items() for each in nbest}
        for path in paths
    )
    (article,) = json.loads((folder / "files/dev-v2.0.json").read_text())["data"]
    passages = {paragraph["qas"][0]["id"]: paragraph["context"] for paragraph in article["paragraphs"]}
    # If a text occurs several times in a passage, maybe overlapping, the members may score different occurrences.
    compared = [
        (id_, text)
        for id_, text in ensemble.keys() & first.keys() & second.keys()
        if len(re.findall(f"(?={re.escape(text)})", passages[id_])) == 1
    ]
    assert len(compared) > 20
    for key in compared:
        assert ensemble[key] == pytest.approx((first[key] + second[key]) / 2, abs=1e-4)


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
