"""`bertjax features`: hidden states of texts, written in shards."""

import fcntl
import itertools
import json
import os
import shutil
import sys

import jax
import numpy as np
import pytest
from helpers.checkpoints import edit_json
from helpers.commanding import printed, refused

from bertjax.cli import main as cli
from bertjax.data.finetuning.batches import inference_batches
from bertjax.data.finetuning.examples import make_examples
from bertjax.inference import features
from bertjax.inference.load import load_model
from bertjax.model.encoder import Encoder
from bertjax.utils.io import temporary_name

TEXTS = ["the cat, sat", "", "a " * 60, "ab ||| c d", *(f"w{index}" for index in range(40))]
# Bytes of 32 float32 states of width 16, from one layer.
SMALL_SHARD_BYTES = 32 * 4 * 16


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(features, "SHARD_BYTES", SMALL_SHARD_BYTES)


def write_features(checkpoint, folder) -> None:
    """Writes the features of TEXTS to `folder/out`."""
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    files = [f"--input={folder / 'texts.txt'}", f"--output={folder / 'out'}"]
    cli.main(["features", f"--checkpoint={checkpoint}", *files, "--layers=-1"])


@pytest.mark.ci
def test_features_in_a_batch_equal_features_of_single_texts(pretrained):
    model = load_model(pretrained)
    (shard,) = features.FeatureExtractor(model, (0, -1), 40).shards(TEXTS)
    assert shard["hidden_states"].shape == (shard["offsets"][-1], 2, 16)
    assert len(shard["offsets"]) == len(TEXTS) + 1
    for index, text in enumerate(TEXTS[:4]):
        tokens = slice(*shard["offsets"][index : index + 2])
        ids, segments = shard["input_ids"][None, tokens], shard["segment_ids"][None, tokens]
        _, states = Encoder(model.config).apply(
            {"params": jax.device_get(model.nested_params["encoder"])},
            ids,
            segments,
            np.ones_like(ids),
            collect_layers=True,
        )
        np.testing.assert_allclose(shard["hidden_states"][tokens, 0], states[0, 0], atol=2e-6)
        np.testing.assert_allclose(shard["hidden_states"][tokens, 1], states[-1, 0], atol=2e-5)
        words = " ".join(text.split(" ||| ")).split()
        for token, word, (start, end) in zip(
            shard["tokens"][tokens], shard["words"][tokens], shard["characters"][tokens], strict=True
        ):
            if token in ("[CLS]", "[SEP]"):
                assert (word, start, end) == (-1, -1, -1)
            else:
                assert text[start:end] == token.removeprefix("##")
                assert text[start:end] in words[word]
    lengths = np.diff(shard["offsets"])
    assert lengths[1] == 2 and lengths[2] == 40 and lengths[3] == 7
    assert shard["words"][shard["offsets"][3] : shard["offsets"][4]].tolist() == [-1, 0, 0, -1, 1, 2, -1]


def test_long_text_does_not_add_padding_to_short_texts():
    rows = [{"input_ids": [1] * length, "segment_ids": [0] * length} for length in [512, *[5] * 4000]]
    indices = []
    shapes = set()
    for batch in inference_batches(make_examples(rows, {}), 512):
        shapes.add(batch["input_ids"].shape)
        indices += batch["example"][batch["example"] >= 0].tolist()
    assert sorted(indices) == list(range(4001))
    assert all(num_rows * length <= 4096 for num_rows, length in shapes)
    assert sum(num_rows for num_rows, length in shapes if length == 512) == 4096 // 512 and len(shapes) == 3


def test_only_texts_of_one_shard_are_in_memory(pretrained, small_shards):
    num_read = []
    endless = (num_read.append(index) or "a b" for index in itertools.count())
    shards = features.FeatureExtractor(load_model(pretrained), (-1,), 40).shards(endless)
    for count in (8, 16, 24):
        assert features.num_texts(next(shards)) == 8
        assert len(num_read) == count


@pytest.mark.ci
def test_killed_command_resumes_after_complete_shards(pretrained, tmp_path, small_shards, monkeypatch):
    complete, killed = tmp_path / "complete", tmp_path / "killed"
    for folder in (complete, killed):
        folder.mkdir()
    write_features(pretrained, complete)
    names = sorted(os.listdir(complete / "out"))
    assert names == [*(f"{number:05}.npz" for number in range(len(names) - 1)), "features.json"] and len(names) > 4
    metadata = json.loads((complete / "out" / "features.json").read_text())
    assert (metadata["texts"], metadata["shards"]) == (len(TEXTS), len(names) - 1)

    saves = iter([np.savez, np.savez, lambda *_, **__: 1 / 0])
    monkeypatch.setattr(np, "savez", lambda *args, **arrays: next(saves)(*args, **arrays))
    with pytest.raises((SystemExit, ZeroDivisionError)):
        write_features(pretrained, killed)
    assert sorted(os.listdir(killed / "out")) == ["00000.npz", "00001.npz", "features.json"]
    monkeypatch.undo()
    monkeypatch.setattr(features, "SHARD_BYTES", SMALL_SHARD_BYTES)
    modified = (killed / "out" / "00001.npz").stat().st_mtime_ns
    # SIGKILL while writing a shard leaves an unfinished file.
    (killed / "out" / temporary_name("00002.npz")).write_bytes(b"PK")
    write_features(pretrained, killed)
    assert (killed / "out" / "00001.npz").stat().st_mtime_ns == modified
    assert sorted(os.listdir(killed / "out")) == names
    for name in names[:-1]:
        expected, resumed = np.load(complete / "out" / name), np.load(killed / "out" / name)
        assert set(expected) == set(resumed)
        for array in expected:
            np.testing.assert_array_equal(expected[array], resumed[array], err_msg=f"{name} {array}")


def test_shards_of_different_layers_or_models_are_rejected(pretrained, tmp_path, small_shards, capfd):
    write_features(pretrained, tmp_path)
    # The parameters are equal, but the architecture differs.
    edited = shutil.copytree(pretrained, tmp_path / "edited")
    edit_json(edited / "config.json", layer_norm_eps=0.5)

    def error(checkpoint=pretrained, out=tmp_path / "out", layers=-1) -> str:
        files = [f"--input={tmp_path / 'texts.txt'}", f"--output={out}", "--show=0"]
        return refused(capfd, "features", f"--checkpoint={checkpoint}", *files, f"--layers={layers}")

    assert "invalid" in error(layers="last") and "unknown layers: [3]" in error(layers=3)
    assert "contains features with different layers" in error(layers=0)
    assert "contains features with different architecture" in error(edited)
    assert "files other than features" in error(out=tmp_path)
    lock = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "another command is writing" in error()
    os.close(lock)
    # A refused command leaves no new folder.
    (tmp_path / "texts.txt").write_bytes(b"\xff\n")
    assert "line 1 is not UTF-8" in error(out=tmp_path / "new") and not (tmp_path / "new").exists()


def test_error_of_the_features_command_names_the_invalid_input_file(pretrained, tmp_path, capfd):
    texts = tmp_path / "texts.txt"
    command = ["features", f"--checkpoint={pretrained}", f"--input={texts}"]
    texts.write_bytes(b"\xef\xbb\xbfa b\r\nc\xff\n")
    assert "texts.txt line 2 is not UTF-8 at byte 1" in refused(capfd, *command, "--show=5")
    texts.write_bytes(b"")
    assert "texts.txt is empty" in refused(capfd, *command)
    assert "no texts; pass texts, or set --input FILE" in refused(capfd, *command[:2])


def test_features_command_reads_standard_input_and_prints_every_layer(pretrained, capfd, monkeypatch, tmp_path):
    (tmp_path / "texts.txt").write_bytes(b"b\r\nc\n")
    command = ["features", f"--checkpoint={pretrained}", "a", "--input=-", "--show=2", "--layers=-1,0"]
    with open(tmp_path / "texts.txt") as file:
        monkeypatch.setattr(sys, "stdin", file)
        lines = printed(capfd, *command).splitlines()
    assert [line.split()[:3] if line.startswith("  ") else line for line in lines] == [
        item
        for text in ("a", "b")
        for item in (text, *([token, "layer", f"{n}:"] for token in ("[CLS]", text, "[SEP]") for n in (-1, 0)))
    ]


def test_truncated_texts_are_counted_in_features(pretrained, capfd):
    cli.main(["features", f"--checkpoint={pretrained}", "a " * 100, "b", "a ||| " + "b " * 60])
    assert "2 of 3 texts were truncated to 40 tokens" in capfd.readouterr().err
