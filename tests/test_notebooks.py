"""The notebooks of docs/notebooks run from the first cell to the last, with few steps and a small random checkpoint."""

import os
import sys
from pathlib import Path

import pytest
from helpers.checkpoints import random_checkpoint

from bertjax.convert import huggingface

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.notebooks
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook_runs(file, letters, tmp_path, monkeypatch):
    import nbclient
    import nbformat

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    huggingface.write(random_checkpoint(letters, max_position_embeddings=128), checkpoint)
    monkeypatch.setenv("QUICK", "1")
    monkeypatch.setenv("CHECKPOINT", str(checkpoint))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(file, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    assert "bertjax:" not in text and "Traceback" not in text, text
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook_shows_its_outputs(file):
    text = file.read_text()
    assert '"image/png"' in text and '"output_type": "error"' not in text
