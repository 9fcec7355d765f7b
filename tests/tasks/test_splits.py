"""Training fractions, dev sets held out of the training data, and runs without a dev set."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from helpers.command_runs import load_task, predict, read_metrics, refused, train, train_command
from helpers.finetuning_data import conll_files, glue_files, squad_files, swag_files, write_json_lines

from bertjax.data.finetuning.examples import make_examples
from bertjax.data.finetuning.tables import ReadStats
from bertjax.data.finetuning.tagged import TaggedText
from bertjax.data.shard import SINGLE_SHARD
from bertjax.tasks.finetuning.config import FinetuningData
from bertjax.tasks.finetuning.splits import divide, sample_fraction, select_dev_rows
from bertjax.tasks.objectives.classification import UNWEIGHTED, ClassWeighting


def text_files(folder: Path, seed: int = 0) -> Path:
    """Writes labeled texts in random order."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"text": f"word{index} w", "label": "O I-A" if index % 3 else "O O"} for index in range(40)]
    random.Random(seed).shuffle(rows)
    write_json_lines(folder / "train.jsonl", rows)
    return folder


# For each experiment, the function that writes its data files and the number of training examples.
TASKS = {
    "glue.py:task=cola": (glue_files, 64),
    "glue.py:task=stsb": (glue_files, 32),
    "swag.py:": (swag_files, 24),
    "squad.py:": (squad_files, 24),
    "ner.py:context=document": (conll_files, 6),
    "ner.py:context=sentence": (conll_files, 24),
    "text.py:": (text_files, 40),
    "text.py:kind=tags": (text_files, 40),
}


def make_task(experiment, files, letters, train=True, **fields):
    paths = {"data__train_file": files / "train.jsonl"} if experiment.startswith("text") else {"data__path": files}
    return load_task(experiment, letters, train=train, data__seq_len=256, **paths, **fields)


def read_rows(batches):
    """Returns the set of texts in the batches, and the number of rows that are not padding."""
    texts = []
    for batch in batches:
        ids = batch["input_ids"].reshape(len(batch["weights"]), -1)
        texts += [tuple(row[row > 0]) for row, weight in zip(ids, batch["weights"], strict=True) if weight]
    return set(texts), len(texts)


@pytest.mark.parametrize("experiment", TASKS)
def test_every_task_supports_train_share_and_dev_share(experiment, letters, tmp_path):
    write_files, count = TASKS[experiment]
    files = write_files(tmp_path / "files")
    fields = {"data__dev_share": 0.25, "steps": 0, "epochs": 1}
    task = make_task(experiment, files, letters, **fields)
    dev, dev_count = read_rows(task.eval_batches(SINGLE_SHARD))
    trained, trained_count = read_rows(task.train_batches(0, SINGLE_SHARD))
    assert not dev & trained
    assert "(dev: data.dev_share=0.25, dev_seed=0)" in task.results["evaluated_on"]
    files_read = task.results["files"]
    assert files_read[0]["used"] + files_read[1]["used"] == files_read[0]["read"] and not files_read[0]["skipped"]
    if experiment != "ner.py:context=sentence":
        # Whole documents are held out, so the number of held-out sentences varies.
        assert dev_count == math.ceil(0.25 * count)
        assert dev_count + trained_count == count
    half = make_task(experiment, files, letters, **fields, data__train_share=0.5)
    sampled, sampled_count = read_rows(half.train_batches(0, SINGLE_SHARD))
    assert sampled < trained and sampled_count == max(1, int(0.5 * trained_count))
    assert read_rows(half.eval_batches(SINGLE_SHARD)) == (dev, dev_count)
    # A task that is built only for evaluation has the same dev rows.
    for_evaluation = make_task(experiment, files, letters, train=False, **fields)
    assert read_rows(for_evaluation.eval_batches(SINGLE_SHARD)) == (dev, dev_count)


def test_dev_set_depends_on_dev_seed_and_not_on_seed_or_row_order(letters, tmp_path):
    dev_sets = []
    for order, seed, dev_seed in ((0, 0, 0), (1, 5, 0), (1, 0, 1)):
        files = text_files(tmp_path / str(order), seed=order)
        task = make_task("text.py:", files, letters, seed=seed, data__dev_share=0.2, data__dev_seed=dev_seed)
        dev_sets.append(read_rows(task.eval_batches(SINGLE_SHARD))[0])
    assert dev_sets[0] == dev_sets[1] != dev_sets[2]


def test_questions_on_a_passage_are_all_in_training_or_all_in_dev(letters, tmp_path):
    qa = {"question": "where?", "answers": [{"text": "here", "answer_start": 6}]}
    passages = {letter: f"{letter}x is here." for letter in "abcdefgh"}
    paragraphs = [
        {"context": passage, "qas": [qa | {"id": f"{letter}{index}"} for index in range(3)]}
        for letter, passage in passages.items()
    ]
    (tmp_path / "train-v1.1.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    task = make_task("squad.py:", tmp_path, letters, data__dev_share=0.3, steps=0, epochs=1)
    dev, dev_count = read_rows(task.eval_batches(SINGLE_SHARD))
    trained, count = read_rows(task.train_batches(0, SINGLE_SHARD))
    # All questions are equal, so all rows of a passage have the same text.
    assert (len(dev), dev_count, len(trained), count) == (3, 9, 5, 15) and not dev & trained


def test_dev_share_requires_distinct_texts(letters, tmp_path, capfd):
    (tmp_path / "train.csv").write_text("text,label\n" + "same,a\nsame,b\n" * 5)
    command = train_command(f"text.py:train={tmp_path}/train.csv", tmp_path / "run", letters, data__dev_share=0.2)
    assert "train.csv contains only 1 distinct texts or documents" in refused(capfd, *command)


def test_training_without_a_dev_set_keeps_the_last_checkpoint(letters, tmp_path, capfd):
    fields = {"steps": 4, "eval_every": 2, "checkpoint_every": 2, "data__eval_split": "none"}
    config = f"glue.py:task=rte,path={glue_files(tmp_path)}"
    (tmp_path / "RTE" / "dev.tsv").unlink()
    task = load_task(config, letters, **fields)
    assert task.eval_every == 0 and task.best_metric is None and not [*task.eval_batches(SINGLE_SHARD)]
    results = train(config, tmp_path / "run", letters, **fields)
    assert "evaluated on no data; the last checkpoint is kept" in capfd.readouterr().err
    assert (results["step"], results["selected_by"], results["baseline"]) == (4, "", {})
    assert not {"loss", "accuracy", "f1", "per_class"} & results.keys()
    lines = read_metrics(tmp_path / "run")
    assert not any(name.startswith("eval_") for line in lines for name in line)
    assert (tmp_path / "run" / "curves.png").exists()
    assert [child.name for child in (tmp_path / "run" / "checkpoints").iterdir()] == ["4"]
    error = refused(capfd, "evaluate", f"--checkpoint={tmp_path / 'run'}")
    assert "no evaluation data; set a dev or test file" in error
    path, _ = predict(capfd, tmp_path / "run", tmp_path / "out")
    assert len(path.read_text().splitlines()) == 8


def test_class_weights_and_label_smoothing_reach_every_objective(letters, tmp_path):
    fields = {"label_smoothing": 0.25, "data__class_weights": '{"1": 4}'}
    files = glue_files(tmp_path / "glue")
    task = make_task("glue.py:task=cola", files, letters, **fields)
    assert task.objective.weighting == ClassWeighting((1.0, 4.0), 0.25)
    assert make_task("glue.py:task=cola", files, letters, train=False, **fields).objective.weighting == UNWEIGHTED
    swag = make_task("swag.py:", swag_files(tmp_path / "swag"), letters, label_smoothing=0.25)
    assert swag.objective.weighting == ClassWeighting((), 0.25)
    fields["data__class_weights"] = "balanced"
    ner = make_task("ner.py:", conll_files(tmp_path / "conll"), letters, **fields)
    count_of = (tmp_path / "conll" / "eng.train").read_text().count
    counts = np.array([count_of(" O\n") - 6, count_of(" I-PER\n")])
    assert ner.objective.weighting == ClassWeighting(tuple((counts.sum() / 2 / counts).tolist()), 0.25)
    text = make_task("text.py:", text_files(tmp_path / "text"), letters, **fields)
    assert len(text.objective.weighting.weights) == 2


@pytest.mark.parametrize("fraction, rows", [(0.1, 3), (0.001, 1), (0.99, 30)])
def test_number_of_dev_rows_is_rounded_up_and_hardly_depends_on_further_rows(fraction, rows):
    contents = [f"text {index}".encode() for index in range(30)]
    mask = select_dev_rows(contents, fraction, 3)
    assert mask.sum() == rows
    # An appended row changes the selection of at most two other rows.
    assert (select_dev_rows([*contents, b"more"], fraction, 3)[:30] != mask).sum() <= 2
    # Equal rows are all in training or all in dev.
    np.testing.assert_array_equal(select_dev_rows(contents * 2, fraction, 3), np.tile(mask, 2))


def test_sample_fraction_is_deterministic_and_keeps_at_least_one_row():
    assert sample_fraction(10, 1.0).tolist() == list(range(10))
    expected = np.random.default_rng(0).permutation(10)[:3]
    assert sample_fraction(10, 0.3).tolist() == sorted(expected)
    # In float64, 100 * 0.29 is less than 29.
    assert len(sample_fraction(10, 0.001)) == 1 and len(sample_fraction(100, 0.29)) == 29


def test_subset_has_the_requested_examples():
    sequences = [{"input_ids": [i] * (i + 2), "segment_ids": [0] * (i + 1) + [1]} for i in range(12)]
    examples = make_examples(sequences, {"labels": np.arange(6)}, 2, range(2, 8))
    part = examples.subset(np.array([4, 1]))
    assert part.rows["labels"].tolist() == [4, 1] and part.lines == (6, 3)
    expected = [sequences[i] for i in (8, 9, 2, 3)]
    assert part.tokens["input_ids"].tolist() == [token for row in expected for token in row["input_ids"]]
    assert np.diff(part.offsets).tolist() == [len(row["input_ids"]) for row in expected] and len(part) == 2
    firsts = [np.frombuffer(text, np.int32).tolist() for text in examples.texts()]
    assert firsts == [[2 * i] * (2 * i + 1) for i in range(6)]
    assert examples.subset(np.arange(6)).fingerprint() == examples.fingerprint()


@pytest.mark.parametrize(
    ("documents", "by_document", "sizes", "half"),
    [
        ([0, 0, 0, 2], True, {1, 3}, [1, 4, 6]),
        ([0, 0, 0, 2], False, {1, 3}, [1, 6]),
        # A single document is divided into sentences.
        ([1, 1, 1, 1], True, {2}, [1, 6]),
        (range(4), False, {2}, [1, 6]),
    ],
)
def test_tagged_text_is_divided_by_document(documents, by_document, sizes, half):
    lines = [1, 4, 6, 7]
    text = TaggedText([["a", "b"], ["c"], [], ["d"]], [["O", "O"], ["O"], [], ["B"]], documents, lines)
    stats = [ReadStats("file", read=4)]
    train, dev = divide(FinetuningData(dev_share=0.5), text, stats, by_document)
    assert {len(train), len(dev)} == sizes and [stats[0].used, stats[1].used] == [len(train), len(dev)]
    assert sorted([*train.lines, *dev.lines]) == lines
    for part in (train, dev):
        assert part == text.subset([lines.index(line) for line in part.lines])
    stats = [ReadStats("file", read=4)]
    train, dev = divide(FinetuningData(train_share=0.5), text, stats, by_document)
    assert train.lines == half and dev is None and [each.used for each in stats] == [len(train)]
