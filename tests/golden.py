"""Prints hashes of results that code changes must not affect: batches, converted checkpoints and trained parameters.

    python tests/golden.py             # hashes of batches and of converted checkpoints, for test_golden.py
    python tests/golden.py --steps     # hashes of parameters and optimizer state after 20 steps of three runs

The hashes of --steps depend on the processor and the versions of libraries, so compare two commits on one machine:

    git worktree add /tmp/before COMMIT
    python tests/golden.py --steps; PYTHONPATH=/tmp/before python tests/golden.py --steps

The script uses only the command line, so that it runs with any commit that has the same commands.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import bertjax

# Use the experiments of the imported package, which may be from a different commit.
EXPERIMENTS = Path(bertjax.__file__).parents[1] / "experiments"
# Experiment and overrides by name. {data} is a folder of datasets, {corpus} a prepared corpus.
PRETRAINING = {
    "pairs at 128": "pretrain.py:size=L1_H16,corpus={corpus},quick=true",
    "pairs at 512": "pretrain.py:size=L1_H16,corpus={corpus},quick=true,seq_len=512",
    "packed pairs": "pretrain.py:size=L1_H16,corpus={corpus},quick=true --config.data.packing=true",
    "packed pairs at 512": "pretrain.py:size=L1_H16,corpus={corpus},quick=true,seq_len=512 --config.data.packing=true",
    "spans at 128": "pretrain.py:size=L1_H16,corpus={corpus},quick=true,objective=none",
    "whole words": "pretrain.py:size=L1_H16,corpus={corpus},quick=true --config.data.masking.whole_word=true",
    "two phases": "pretrain.py:size=L1_H16,corpus={corpus},quick=true,phases=2 --config.data.seq_len=32",
}
FINETUNING = {
    "cola": "glue.py:task=cola,path={data}/glue,size=L1_H16,quick=true",
    "rte": "glue.py:task=rte,path={data}/glue,size=L1_H16,quick=true",
    "stsb": "glue.py:task=stsb,path={data}/glue,size=L1_H16,quick=true",
    "squad": "squad.py:path={data}/squad,size=L1_H16,quick=true",
    "ner": "ner.py:path={data}/conll,size=L1_H16,quick=true",
    "swag": "swag.py:path={data}/swag,size=L1_H16,quick=true",
}
_STEPS = 20
_TRAINED = ("pairs at 128", "cola", "squad")


def write_vocabulary(path: Path) -> Path:
    """Writes a vocabulary of some words and of all characters of lower-case ASCII text."""
    from helpers.made_up_text import write_letters

    write_letters(path, tuple(f"{a}{b}" for a in ("ba", "ke", "lo", "mi") for b in ("na", "ro", "su")))
    return path


def write_text(path: Path) -> Path:
    """Writes forty documents with one sentence per line."""
    rng = random.Random(5)
    words = [f"{a}{b}" for a in ("ba", "ke", "lo", "mi") for b in ("na", "ro", "su", "te", "vi")]
    documents = (
        "\n".join(" ".join(rng.choices(words, k=rng.randint(3, 14))) for _ in range(rng.randint(2, 30)))
        for _ in range(40)
    )
    path.write_text("\n\n".join(documents) + "\n")
    return path


def run(*arguments: str) -> None:
    """Runs a command without printing its output."""
    from bertjax.cli import main as cli

    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(log):
            cli.main(list(arguments))
    except SystemExit as end:
        raise RuntimeError(f"{arguments} exited with {end.code}: {log.getvalue()}") from end


def hash_of(arrays: Mapping[str, Any]) -> str:
    """Returns the first 16 hex digits of the SHA-256 of the names, dtypes, shapes and bytes of arrays."""
    digest = hashlib.sha256()
    for name, value in sorted(arrays.items()):
        array = np.ascontiguousarray(value)
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def prepare_data(folder: Path) -> dict[str, Path]:
    """Creates a corpus, a vocabulary and datasets. Returns their paths by name, such as `corpus` for `{corpus}`."""
    from helpers.finetuning_data import conll_files, glue_files, squad_files, swag_files

    vocabulary = write_vocabulary(folder / "vocab.txt")
    text = write_text(folder / "text.txt")
    corpus = folder / "corpus"
    run("prepare", f"--input=text:{text}", f"--vocab={vocabulary}", f"--output={corpus}", "--heldout=0.1")
    for name, write in (("glue", glue_files), ("squad", squad_files), ("conll", conll_files), ("swag", swag_files)):
        write(folder / name)
    return {"corpus": corpus, "data": folder, "vocabulary": vocabulary}


def config_flags(experiment: str, data: Mapping[str, Path]) -> list[str]:
    config, *overrides = experiment.format(**data).split(" ")
    if experiment in FINETUNING.values():
        overrides.append(f"--config.data.vocabulary={data['vocabulary']}")
    return [f"--config={EXPERIMENTS}/{config}", *overrides]


def batch_hashes(data: Mapping[str, Path], folder: Path) -> dict[str, str]:
    """Returns the hash of the first three batches of each experiment."""
    found = {}
    for name, experiment in (PRETRAINING | FINETUNING).items():
        file = folder / "batches.npz"
        run("inspect", *config_flags(experiment, data), "--steps=3", "--rows=1", f"--npz={file}")
        with np.load(file) as batches:
            found[name] = hash_of(batches)
    return found


def converted_hashes(folder: Path, vocabulary: Path) -> dict[str, str]:
    """Converts a TensorFlow checkpoint to each format and returns the hashes of the arrays."""
    from helpers.checkpoints import google_checkpoint
    from safetensors.numpy import load_file

    google_checkpoint(vocabulary, folder / "google")
    run("convert", f"{folder}/google", f"{folder}/own")
    run("convert", f"{folder}/own", f"{folder}/huggingface", "--format=huggingface")
    return {
        "bertjax": hash_of(saved_arrays(folder / "own" / "checkpoints" / "0" / "params")),
        "huggingface": hash_of(load_file(folder / "huggingface" / "model.safetensors")),
    }


def saved_arrays(item: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint item, such as `params`, by tree path."""
    import jax
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(item)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def step_hashes(data: Mapping[str, Path], folder: Path) -> dict[str, str]:
    """Trains the experiments in `_TRAINED` for 20 steps with dropout. Returns hashes of their checkpoints."""
    found = {}
    for name in _TRAINED:
        workdir = folder / "runs" / name.replace(" ", "_")
        flags = config_flags((PRETRAINING | FINETUNING)[name], data)
        run("train", *flags, f"--config.steps={_STEPS}", "--config.model.dtype=float32", f"--workdir={workdir}")
        for item in ("params", "training"):
            found[f"{name}, {item}"] = hash_of(saved_arrays(workdir / "checkpoints" / str(_STEPS) / item))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", action="store_true")
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory(prefix="bertjax-golden-") as name:
        folder = Path(name)
        data = prepare_data(folder)
        if args.steps:
            found = step_hashes(data, folder)
        else:
            found = batch_hashes(data, folder) | converted_hashes(folder, data["vocabulary"])
    print(f"hashes of the code in {Path(bertjax.__file__).parent}:\n{json.dumps(found, indent=1)}")


if __name__ == "__main__":
    main()
