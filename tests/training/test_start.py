"""Start of a run from a fine-tuned checkpoint."""

import pytest
from helpers.command_runs import train


@pytest.mark.ci
def test_output_layer_of_a_checkpoint_with_the_same_labels_is_kept(letters, tmp_path, capfd):
    (tmp_path / "table.tsv").write_text("text\tlabel\nzu\tgood\nba\tbad\n")
    experiment = f"text.py:train={tmp_path}/table.tsv"
    fields = {"steps": 1, "data__batch_size": 2, "data__eval_split": "none"}
    train(experiment, tmp_path / "first", letters, **fields)
    capfd.readouterr()
    train(experiment, tmp_path / "second", None, f"--init_from={tmp_path}/first", **fields)
    log = capfd.readouterr().err
    assert "starting at step 0 with the parameters of" in log and "initialized randomly" not in log
