"""Tests of the SQuAD task: results, answer spans, and predictions in the official format."""

import json

import numpy as np
import pytest
from helpers.command_runs import load_task, predict, records, train
from helpers.commanding import failure, printed
from helpers.finetuning_data import learnable_squad_files

from bertjax.data.finetuning.questions import Question
from bertjax.data.finetuning.windows import Window
from bertjax.errors import UsageError
from bertjax.inference.load import load_model
from bertjax.tasks.finetuning.spans import best_answers


@pytest.mark.ci
@pytest.mark.parametrize("version", [pytest.param("1.1", marks=pytest.mark.slow), "2.0"])
def test_squad_trains_evaluates_and_predicts(version, letters, tmp_path, capfd):
    files = learnable_squad_files(tmp_path / "squad", version)
    settings = {"seq_len": 60, "doc_stride": 20, "max_query_len": 14, "n_best": 5, "max_answer_len": 7}
    fields = {f"data__{name}": value for name, value in settings.items()}
    results = train(f"squad.py:version={version},path={files}", tmp_path / "run", letters, steps=80, **fields)
    # Texts from the command line or Python are read with the settings of the run.
    defaults = load_model(tmp_path / "run").defaults
    assert {name: getattr(defaults, name) for name in settings} == settings
    assert results["exact_match"] > 90 and results["f1"] > 90
    assert results["baseline"]["exact_match"] < 40
    if version == "2.0":
        assert results["no_answer_f1"] > 90 and results["has_answer_f1"] > 90
    paths = predict(capfd, tmp_path / "run", tmp_path / "out", "--split=dev")
    predictions = json.loads(paths[0].read_text())
    data = json.loads((files / f"dev-v{version}.json").read_text())["data"][0]["paragraphs"]
    assert list(predictions) == [paragraph["qas"][0]["id"] for paragraph in data]
    assert all(predictions[paragraph["qas"][0]["id"]] in paragraph["context"] for paragraph in data)
    nbest = json.loads((tmp_path / "out" / "nbest_predictions.json").read_text())
    for candidates in nbest.values():
        scores = [candidate["score"] for candidate in candidates]
        assert scores == sorted(scores, reverse=True)
    if version == "2.0":
        odds = json.loads((tmp_path / "out" / "null_odds.json").read_text())
        threshold = results["null_threshold"]
        assert all((predictions[name] == "") == (odds[name] > threshold) for name in odds)
        # The chosen threshold, set as a config field, gives the same predictions.
        flags = [f"--config.data.null_threshold={threshold}", "--config.data.choose_null_threshold=false"]
        other_paths = predict(capfd, tmp_path / "run", tmp_path / "fixed", "--split=dev", *flags)
        assert json.loads(other_paths[0].read_text()) == predictions
    answers = records(paths[-1])
    assert {record["id"]: record["prediction"] for record in answers} == predictions
    for record in answers:
        candidate = next(each for each in nbest[record["id"]] if each["text"] == record["prediction"])
        assert record["probability"] == pytest.approx(candidate["probability"], rel=1e-4)
        assert ("null_odds" in record) == (version == "2.0")
    for paragraph in data[:4]:
        question = paragraph["qas"][0]
        command = ["predict", f"--checkpoint={tmp_path / 'run'}", "--json", f"--context={paragraph['context']}"]
        answer = json.loads(printed(capfd, *command, question["question"]))
        assert answer["prediction"] == predictions[question["id"]]
    if version == "2.0":
        (tmp_path / "run" / "results.json").write_text("{")
        assert "results.json: " in failure(capfd, *command, question["question"])[1]


def test_default_file_of_a_split_has_the_documented_name(letters, tmp_path):
    files = learnable_squad_files(tmp_path, "1.1")
    for name in ("train-v1.1-small.json", "train-v1.1 (1).json", "train-v1.1.json.bak"):
        (files / name).write_text("{}")
    task = load_task(f"squad.py:version=1.1,path={files}", letters, data__eval_split="none")
    assert task.read_stats[0].file == str(files / "train-v1.1.json")
    (files / "train-v1.1.json").unlink()
    with pytest.raises(UsageError, match="no file .*train-v1.1 or .*train-v1.1.json; set --config.data.train_file"):
        load_task(f"squad.py:version=1.1,path={files}", letters, data__eval_split="none")


# Two windows of the context "abcdef", with one token per character: "abcd" and "cdef". In each window, two tokens
# precede the passage. The tokens c and d have the most context in the first and the second window, respectively.
QUESTION = Question("1", "q", "abcdef", (), -1)
WINDOWS = [
    Window(0, 2, np.array([[i, i + 1] for i in range(first, first + 4)]), np.array(is_max_context))
    for first, is_max_context in ((0, [True, True, True, False]), (2, [False, True, True, True]))
]
START = np.array([[-9, -9, 1, 0, 2, 9], [-9, -9, -5, -4, -5, -5]], np.float32)
END = np.array([[-9, -9, 0, 7, 5.5, 2], [-9, -9, -5, -5, -4, -5]], np.float32)


@pytest.mark.parametrize(
    ("n_best", "max_answer_len", "text"),
    [
        # Start d (9) has more context in the other window, and the span from c (2) to b (7) is reversed.
        (4, 4, "ab"),
        (4, 1, "c"),
        # In the first window, the only start is d.
        (1, 4, "de"),
    ],
)
def test_best_span_is_valid_and_has_the_highest_score(n_best, max_answer_len, text):
    outputs = [{"start": START, "end": END, "example": np.array([0, 1])}]
    (answer,) = best_answers([QUESTION], WINDOWS, outputs, n_best, max_answer_len).values()
    assert answer.best(None).text == text
    assert len(answer.nbest) <= n_best and answer.null_score == -18
