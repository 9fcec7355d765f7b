"""Embeddings of many texts in shards."""

import fcntl
import itertools
import json
import os
import sys

import jax
import numpy as np
import pytest

from bertjax.cli import main as cli
from bertjax.convert.convert import convert
from bertjax.data.finetuning.examples import make_examples
from bertjax.inference import features
from bertjax.inference.batches import BATCH_TOKENS, batches
from bertjax.inference.load import load_trained
from bertjax.model.encoder import Encoder
from bertjax.utils.io import temporary_name

TEXTS = ["the cat, sat", "", "a " * 60, "ab ||| c d", *(f"w{index}" for index in range(40))]


@pytest.fixture
def small_shards(monkeypatch):
    # Tokens of width 16 in one layer: 32 of them.
    monkeypatch.setattr(features, "SHARD_BYTES", 32 * 4 * 16)


def write(folder, path) -> None:
    path.write_text("\n".join(TEXTS) + "\n")
    cli.main(
        ["features", f"--checkpoint={folder}", f"--input={path}", f"--output={path.parent / 'out'}", "--layers=-1"]
    )


def refused(capfd, *arguments, code: int = 2) -> str:
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    assert end.value.code == code
    return capfd.readouterr().err.splitlines()[-1]


def test_each_text_has_its_own_length_and_the_states_it_has_alone(pretrained):
    trained = load_trained(pretrained)
    (shard,) = features.shards(features.Request(trained, (0, -1), 40), TEXTS)
    assert shard["hidden_states"].shape == (shard["offsets"][-1], 2, 16)
    assert len(shard["offsets"]) == len(TEXTS) + 1
    for index, text in enumerate(TEXTS[:4]):
        here = slice(*shard["offsets"][index : index + 2])
        ids, segments = shard["input_ids"][None, here], shard["segment_ids"][None, here]
        _, states = Encoder(trained.config).apply(
            {"params": jax.device_get(trained.params["encoder"])}, ids, segments, np.ones_like(ids), collect_layers=True
        )
        np.testing.assert_allclose(shard["hidden_states"][here, 0], states[0, 0], atol=2e-6)
        np.testing.assert_allclose(shard["hidden_states"][here, 1], states[-1, 0], atol=2e-5)
        # Tokens, characters and words tell of each other.
        words = " ".join(text.split(" ||| ")).split()
        for token, word, (first, last) in zip(
            shard["tokens"][here], shard["words"][here], shard["characters"][here], strict=True
        ):
            if token in ("[CLS]", "[SEP]"):
                assert (word, first, last) == (-1, -1, -1)
            else:
                assert text[first:last] == token.removeprefix("##")
                assert text[first:last] in words[word]
    lengths = np.diff(shard["offsets"])
    assert lengths[1] == 2 and lengths[2] == 40 and lengths[3] == 7
    assert shard["words"][shard["offsets"][3] : shard["offsets"][4]].tolist() == [-1, 0, 0, -1, 1, 2, -1]


def test_a_long_row_makes_none_of_the_others_longer():
    rows = [{"input_ids": [1] * length, "segment_ids": [0] * length} for length in [512, *[5] * 4000]]
    seen = []
    shapes = set()
    for batch in batches(make_examples(rows, {}), 512):
        shapes.add(batch["input_ids"].shape)
        seen += batch["example"][batch["example"] >= 0].tolist()
    assert sorted(seen) == list(range(4001))
    assert all(rows * length <= BATCH_TOKENS for rows, length in shapes)
    assert sum(rows for rows, length in shapes if length == 512) == BATCH_TOKENS // 512 and len(shapes) == 3


def test_no_more_texts_are_in_memory_than_those_of_a_shard(pretrained, small_shards):
    request = features.Request(load_trained(pretrained), (-1,), 40)
    read = []
    endless = (read.append(index) or "a b" for index in itertools.count())
    made = features.shards(request, endless)
    for count in (8, 16, 24):
        assert features.texts_in(next(made)) == 8
        assert len(read) == count


def test_a_killed_command_leaves_whole_shards_and_goes_on_after_them(pretrained, tmp_path, small_shards, monkeypatch):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    write(pretrained, whole / "texts.txt")
    names = sorted(os.listdir(whole / "out"))
    assert names == [*(f"{number:05}.npz" for number in range(len(names) - 1)), "features.json"] and len(names) > 4
    about = json.loads((whole / "out" / "features.json").read_text())
    assert (about["texts"], about["shards"]) == (len(TEXTS), len(names) - 1)

    saves = iter([np.savez, np.savez, lambda *_, **__: 1 / 0])
    monkeypatch.setattr(np, "savez", lambda *args, **arrays: next(saves)(*args, **arrays))
    with pytest.raises(SystemExit):
        write(pretrained, killed / "texts.txt")
    assert sorted(os.listdir(killed / "out")) == ["00000.npz", "00001.npz", "features.json"]
    monkeypatch.undo()
    monkeypatch.setattr(features, "SHARD_BYTES", 32 * 4 * 16)
    before = (killed / "out" / "00001.npz").stat().st_mtime_ns
    # As SIGKILL in the middle of a shard leaves one.
    (killed / "out" / temporary_name("00002.npz")).write_bytes(b"PK")
    write(pretrained, killed / "texts.txt")
    assert (killed / "out" / "00001.npz").stat().st_mtime_ns == before
    assert sorted(os.listdir(killed / "out")) == names
    for name in names[:-1]:
        one, other = np.load(whole / "out" / name), np.load(killed / "out" / name)
        assert set(one) == set(other)
        for array in one:
            np.testing.assert_array_equal(one[array], other[array], err_msg=f"{name} {array}")


def test_shards_of_something_else_are_refused(pretrained, tmp_path, small_shards, capfd):
    write(pretrained, tmp_path / "texts.txt")
    command = ["features", f"--checkpoint={pretrained}", f"--input={tmp_path / 'texts.txt'}"]
    out = [f"--output={tmp_path / 'out'}", "--layers=-1"]
    assert "has features with another layers" in refused(capfd, *command, out[0], "--layers=0")
    # The same parameters as another function.
    edited = tmp_path / "edited"
    convert(str(pretrained), str(edited), "huggingface", False, lambda said: None)
    config = json.loads((edited / "config.json").read_text())
    foreign = [f"--checkpoint={edited}", f"--input={tmp_path / 'texts.txt'}", f"--output={tmp_path / 'foreign'}"]
    cli.main(["features", *foreign])
    (edited / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 0.5}))
    assert "has features with another architecture" in refused(capfd, "features", *foreign)
    (tmp_path / "texts.txt").write_text("other\n")
    assert "00000.npz is of other texts" in refused(capfd, *command, *out)
    write(pretrained, tmp_path / "texts.txt")
    (tmp_path / "out" / "00001.npz").write_bytes(b"PK")
    assert "00001.npz is damaged; remove it" in refused(capfd, *command, *out, code=1)
    assert "files in it that are no features" in refused(capfd, *command, f"--output={tmp_path}")
    handle = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert "another command is writing" in refused(capfd, *command, *out)
    os.close(handle)


def test_lines_that_are_no_texts_are_named(pretrained, tmp_path, capfd, monkeypatch):
    command = ["features", f"--checkpoint={pretrained}", f"--input={tmp_path / 'texts.txt'}"]
    (tmp_path / "texts.txt").write_bytes(b"\xef\xbb\xbfa b\r\nc\xff\n")
    assert "texts.txt line 2 is not UTF-8 at byte 1" in refused(capfd, *command, "--show=5")
    monkeypatch.setattr("bertjax.inference.texts._LINE_BYTES", 8)
    (tmp_path / "texts.txt").write_bytes(b"a b\n" + b"\0" * 100)
    assert "line 2 has more than 8 bytes" in refused(capfd, *command)
    (tmp_path / "texts.txt").write_bytes(b"")
    assert "texts.txt is empty" in refused(capfd, *command)
    assert "no texts; give texts, or a file with --input" in refused(capfd, *command[:2])


def test_texts_come_through_standard_input_and_are_shown(pretrained, capfd, monkeypatch, tmp_path):
    (tmp_path / "texts.txt").write_bytes(b"b\r\nc\n")
    with open(tmp_path / "texts.txt") as file:
        monkeypatch.setattr(sys, "stdin", file)
        cli.main(["features", f"--checkpoint={pretrained}", "a", "--input=-", "--show=2"])
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == ["a", "b"]
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [
        "[CLS]",
        "a",
        "[SEP]",
        "[CLS]",
        "b",
        "[SEP]",
    ]
