"""Tests that packed training rows do not change the losses of a run."""

import json
from pathlib import Path

import numpy as np
import pytest
from finetuning_data import conll_files
from running import EXPERIMENTS, overrides, refused, train

SHARED = {"data__examples_per_row": 4, "data__bucket": 8}


def metrics(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "task", [*(pytest.param(task, marks=pytest.mark.slow) for task in ("cola", "stsb", "multilabel")), "ner"]
)
def test_packed_rows_train_like_one_example_per_row(glue, letters, tmp_path, task):
    rows = [
        {"text": text, "label": labels} for text, labels in (("ba ke", ["a"]), ("lo", ["a", "b"]), ("mi ro na", []))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 6))
    experiment = {
        "ner": f"ner.py:path={conll_files(tmp_path / 'ner')}",
        "multilabel": f"text.py:train={tmp_path}/rows.jsonl,dev={tmp_path}/rows.jsonl,kind=multilabel",
    }.get(task, f"glue.py:task={task},path={glue}")
    found = []
    for name, fields in (("alone", {}), ("shared", SHARED)):
        given = {"steps": 6, "log_every": 1, "data__batch_size": 32, "data__seq_len": 64, **fields}
        results = train(experiment, tmp_path / name, letters, **given)
        found.append((metrics(tmp_path / name), {k: v for k, v in results.items() if isinstance(v, float)}))
    (alone, results), (shared, same) = found
    assert same == pytest.approx(results, rel=1e-4, abs=1e-4)
    # An equal number of tokens, in fewer positions.
    fills = [
        np.mean([line.pop("token_fraction") for line in lines if "token_fraction" in line]) for lines in (alone, shared)
    ]
    positions = [sum(line.pop("positions", 0) for line in lines) for lines in (alone, shared)]
    assert fills[1] > 1.3 * fills[0] and positions[1] < 0.8 * positions[0]
    assert [line.keys() for line in shared] == [line.keys() for line in alone]
    assert sum("grad_norm" in line for line in alone) == 6
    for line, other in zip(alone, shared, strict=True):
        # Of numbers that hardly differ yet, rounding decides.
        assert other.pop("eval_pearson", 0) == pytest.approx(line.pop("eval_pearson", 0), abs=1e-4)
        np.testing.assert_allclose([*other.values()], [*line.values()], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("experiment", "fields", "says"),
    [
        ("glue.py:task=cola,size=L1_H16", {"data__examples_per_row": 3}, "it must divide data.batch_size=32"),
        (
            "glue.py:task=cola,size=L1_H16",
            {"data__examples_per_row": 4, "feature_head__lstm_layers": 1},
            "word by word",
        ),
        ("glue.py:task=cola,size=L1_H16", {"data__examples_per_row": 32, "grad_accum_steps": 2}, "does not split"),
        ("squad.py:version=1.1,size=L1_H16", {"data__examples_per_row": 4}, "rows of squad are full"),
        ("swag.py:size=L1_H16", {"data__examples_per_row": 4}, "an example of swag is four sequences"),
    ],
)
def test_invalid_examples_per_row_is_an_error(capfd, letters, tmp_path, experiment, fields, says):
    given = overrides(letters, **{"model__attention_probs_dropout_prob": 0.0, **fields})
    assert says in refused(capfd, "train", f"--config={EXPERIMENTS}/{experiment}", f"--workdir={tmp_path}/run", *given)
    assert not (tmp_path / "run").exists()


def test_inspect_shows_all_examples_of_a_packed_row(glue, letters, capfd):
    from bertjax.cli import main as cli

    given = overrides(letters, data__examples_per_row=4, data__batch_size=8, data__bucket=8)
    cli.main(["inspect", f"--config={EXPERIMENTS}/glue.py:task=cola,path={glue},size=L1_H16", "--rows=1", *given])
    shown = capfd.readouterr().out
    assert "4 examples, " in shown and "example 3, " in shown and "labels [" in shown
