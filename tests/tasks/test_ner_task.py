"""Named entity recognition on CoNLL files."""

import json

import numpy as np
import pytest
from helpers.command_runs import load_task, predict, records, refused, train, train_command
from helpers.commanding import printed
from helpers.finetuning_data import conll_files


@pytest.mark.ci
@pytest.mark.parametrize("context", ["document", pytest.param("sentence", marks=pytest.mark.slow)])
def test_ner_trains_evaluates_and_predicts(context, letters, tmp_path, capfd):
    files = conll_files(tmp_path / "conll")
    workdir = tmp_path / "run"
    results = train(f"ner.py:path={files},context={context}", workdir, letters, steps=60, eval_every=60)
    assert results["f1"] > 90
    path, jsonl_path = predict(capfd, workdir, tmp_path / "out", "--logits")
    columns = [line.split() for line in path.read_text().splitlines() if line]
    gold = [line.split() for line in (files / "eng.testb").read_text().splitlines() if line and "-DOC" not in line]
    assert [row[:2] for row in columns] == [[row[0], row[3]] for row in gold]
    assert np.mean([row[1] == row[2] for row in columns]) > 0.9
    lines = (files / "eng.testb").read_text().splitlines()
    sentences = records(jsonl_path)
    assert [
        (word, tag) for record in sentences for word, tag in zip(record["words"], record["prediction"], strict=True)
    ] == [(row[0], row[2]) for row in columns]
    for record in sentences:
        assert [line.split()[0] for line in lines[record["line"] - 1 :][: len(record["words"])]] == record["words"]
        columns = (record[key] for key in ("prediction", "probabilities", "logits"))
        for tag, probabilities, logits in zip(*columns, strict=True):
            assert tag == max(probabilities, key=probabilities.get) == max(logits, key=logits.get)
    command = ["predict", f"--checkpoint={workdir}", f"--output={tmp_path / 'out'}", "--columns=word"]
    assert "--columns needs data with named columns" in refused(capfd, *command)
    # The tags come from the workdir, so prediction does not need the training file.
    (files / "eng.train").unlink()
    assert predict(capfd, workdir, tmp_path / "out")[0] == path
    # A file can be set without a folder, and words without tags.
    (tmp_path / "words").write_text("za\nba\n\nke\n")
    fields = ["--config=ner", f"--config.data.test_file={tmp_path / 'words'}"]
    assert predict(capfd, workdir, tmp_path / "out", *fields)[0] == path
    assert [line.split()[:1] for line in path.read_text().splitlines()] == [["za"], ["ba"], [], ["ke"]]
    assert "set --config.data.path or" in refused(capfd, *command[:3], "--config=ner")


@pytest.mark.ci
def test_tags_without_a_type_are_trained_scored_and_predicted_as_entities(letters, tmp_path, capfd):
    for name in ("eng.train", "eng.testa", "eng.testb"):
        (tmp_path / name).write_text("za B\nba I\nke O\n\nke O\nza B\n" * 4)
    results = train(f"ner.py:path={tmp_path}", tmp_path / "run", letters, steps=60)
    assert results["f1"] == results["f1_entity"] > 90 and results["per_class"]["entity"]["support"] == 8
    output = printed(capfd, "predict", f"--checkpoint={tmp_path}/run", "ke za ba", "--json")
    (entity,) = json.loads(output)["entities"]
    assert entity == {"label": "entity", "start": 3, "end": 8, "text": "za ba"}


def test_tags_that_only_the_dev_file_has_may_be_listed_in_a_labels_file(letters, tmp_path, capfd):
    files = conll_files(tmp_path / "conll")
    with (files / "eng.testa").open("a") as file:
        file.write("\nza NNP I-NP I-NEW\n")
    error = refused(capfd, *train_command(f"ner.py:path={files}", tmp_path / "run", letters))
    assert "has unknown tags: I-NEW" in error and "set --config.data.labels" in error
    tags = [*load_task(f"ner.py:path={files}", letters, data__eval_split="none").labels, "I-NEW"]
    (tmp_path / "labels.json").write_text(json.dumps({"labels": tags}))
    assert load_task(f"ner.py:path={files}", letters, data__labels=tmp_path / "labels.json").labels == tags
