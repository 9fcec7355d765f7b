"""Named entities from columns to columns."""

import numpy as np
import pytest
from finetuning_data import conll_files
from running import predict, train


@pytest.mark.parametrize("context", ["document", "sentence"])
def test_ner(context, letters, tmp_path, capfd):
    files = conll_files(tmp_path / "conll")
    workdir = tmp_path / "run"
    results = train(f"ner.py:path={files},context={context}", workdir, letters, steps=60, eval_every=60)
    assert results["f1"] > 90
    (path,) = predict(capfd, workdir, tmp_path / "out")
    columns = [line.split() for line in path.read_text().splitlines() if line]
    wanted = [line.split() for line in (files / "eng.testb").read_text().splitlines() if line and "-DOC" not in line]
    assert [row[:2] for row in columns] == [[row[0], row[3]] for row in wanted]
    assert np.mean([row[1] == row[2] for row in columns]) > 0.9
    # The tags are the run's own: without the training file a checkpoint still predicts.
    (files / "eng.train").unlink()
    assert predict(capfd, workdir, tmp_path / "out") == [path]


def test_words_without_tags_are_predicted(letters, tmp_path, capfd):
    files = conll_files(tmp_path / "conll")
    train(f"ner.py:path={files}", tmp_path / "run", letters, steps=1)
    (files / "eng.testb").write_text("za\nba\n\nke\n")
    (path,) = predict(capfd, tmp_path / "run", tmp_path / "out")
    assert [line.split()[:1] for line in path.read_text().splitlines()] == [["za"], ["ba"], [], ["ke"]]
