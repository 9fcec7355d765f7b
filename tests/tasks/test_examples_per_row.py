"""Tests of fine-tuning with packed rows: equal losses and `inspect`."""

import re

import numpy as np
import pytest
from helpers.command_runs import EXPERIMENTS, overrides, read_metrics, train
from helpers.commanding import printed
from helpers.finetuning_data import conll_files, write_json_lines

PACKED = {"data__examples_per_row": 4, "data__bucket": 8}


@pytest.mark.ci
@pytest.mark.parametrize(
    "task", [*(pytest.param(task, marks=pytest.mark.slow) for task in ("cola", "stsb", "multilabel")), "ner"]
)
def test_packed_rows_train_like_one_example_per_row(glue, letters, tmp_path, task):
    rows = [
        {"text": text, "label": labels} for text, labels in (("ba ke", ["a"]), ("lo", ["a", "b"]), ("mi ro na", []))
    ]
    write_json_lines(tmp_path / "rows.jsonl", rows * 6)
    experiment = {
        "ner": f"ner.py:path={conll_files(tmp_path / 'ner')}",
        "multilabel": f"text.py:train={tmp_path}/rows.jsonl,dev={tmp_path}/rows.jsonl,kind=multilabel",
    }.get(task, f"glue.py:task={task},path={glue}")
    runs = []
    for name, packing in (("unpacked", {}), ("packed", PACKED)):
        fields = {"steps": 6, "log_every": 1, "data__batch_size": 32, "data__seq_len": 64, **packing}
        results = train(experiment, tmp_path / name, letters, **fields)
        runs.append((read_metrics(tmp_path / name), {k: v for k, v in results.items() if isinstance(v, float)}))
    (unpacked, unpacked_results), (packed, packed_results) = runs
    assert packed_results == pytest.approx(unpacked_results, rel=1e-4, abs=1e-4)
    # Packed rows contain the same tokens in fewer positions.
    fractions = [sum(line.pop("token_fraction", 0) for line in lines) for lines in (unpacked, packed)]
    positions = [sum(line.pop("positions", 0) for line in lines) for lines in (unpacked, packed)]
    assert fractions[1] > 1.3 * fractions[0] and positions[1] < 0.8 * positions[0]
    assert [line.keys() for line in packed] == [line.keys() for line in unpacked]
    assert sum("grad_norm" in line for line in unpacked) == 6
    for unpacked_line, packed_line in zip(unpacked, packed, strict=True):
        # After a few steps, all examples have nearly the same prediction, so rounding changes the correlation.
        correlation = unpacked_line.pop("eval_pearson", 0)
        assert packed_line.pop("eval_pearson", 0) == pytest.approx(correlation, abs=1e-4)
        np.testing.assert_allclose([*packed_line.values()], [*unpacked_line.values()], rtol=2e-5, atol=2e-6)


def test_inspect_shows_all_examples_of_a_packed_row(glue, letters, capfd):
    flags = overrides(letters, data__examples_per_row=4, data__batch_size=8, data__bucket=8)
    config = f"--config={EXPERIMENTS}/glue.py:task=cola,path={glue},size=L1_H16"
    text = printed(capfd, "inspect", config, "--rows=1", *flags)
    assert "sequence 3, " in text and len(re.findall("^label: [01]$", text, re.MULTILINE)) == 4
