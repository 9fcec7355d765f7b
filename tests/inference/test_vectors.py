"""Vectors of many texts: blocks, and the `.npy` file of `encode`."""

import itertools
import os
import shutil

import jax
import numpy as np
import pytest
from helpers.commanding import printed, refused

import bertjax
from bertjax.inference import encode

TEXTS = ["a film", ("who is it", "it is a man"), "", *("ab " * index for index in range(20))]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(encode, "_BLOCK_TEXTS", 5)


@pytest.fixture(scope="module")
def bert(pretrained):
    return bertjax.load(pretrained)


@pytest.mark.ci
def test_vectors_do_not_depend_on_the_block_size(bert, monkeypatch):
    expected = bert.encode(TEXTS, pooling="mean").pooled
    monkeypatch.setattr(encode, "_BLOCK_TEXTS", 5)
    np.testing.assert_allclose(bert.encode(iter(TEXTS), pooling="mean").pooled, expected, rtol=1e-6, atol=1e-6)
    assert bert.encode([], pooling="mean").pooled.shape == (0, 16)


def test_only_texts_of_one_block_are_in_memory(bert, small_blocks):
    num_read = []
    endless = (num_read.append(index) or "a b" for index in itertools.count())
    shards = encode.VectorEncoder(bert._loaded, "mean").shards(endless)
    for count in (5, 10, 15):
        assert len(next(shards)["vectors"]) == 5 and len(num_read) == count


def test_interrupted_call_resumes_after_the_last_complete_block(bert, tmp_path, small_blocks, monkeypatch):
    complete = bert.encode(TEXTS, pooling="mean", output=tmp_path / "complete.npy").pooled
    assert isinstance(complete, np.memmap) and complete.dtype == np.float32
    np.testing.assert_array_equal(complete, bert.encode(TEXTS, pooling="mean").pooled)

    def interrupted():
        yield from TEXTS[:12]
        raise KeyboardInterrupt

    output = tmp_path / "new" / "vectors.npy"
    with pytest.raises(KeyboardInterrupt):
        bert.encode(interrupted(), pooling="mean", output=output)
    assert sorted(os.listdir(f"{output}.part")) == ["00000.npz", "00001.npz", "features.json"] and not output.exists()
    num_encoded, tokenize = [], encode.tokenize
    monkeypatch.setattr(
        encode, "tokenize", lambda _, texts, *args: num_encoded.append(len(texts)) or tokenize(_, texts, *args)
    )
    bert.encode(iter(TEXTS), pooling="mean", output=output)
    assert num_encoded == [5, 5, 3]
    assert output.read_bytes() == (tmp_path / "complete.npy").read_bytes()
    assert os.listdir(output.parent) == ["vectors.npy"]
    assert bert.encode([], pooling="mean", output=tmp_path / "empty.npy").pooled.shape == (0, 16)


def test_unfinished_vectors_of_another_call_are_rejected(bert, tmp_path, small_blocks):
    output = tmp_path / "vectors.npy"
    with pytest.raises(TypeError):
        bert.encode([*TEXTS[:12], None], pooling="mean", output=output)
    scaled = bert.replace(jax.tree.map(lambda array: 2 * array, bert.params))
    for model, texts, options, message in (
        (scaled, TEXTS, {}, "vectors.npy.part contains features with different parameters_sha256"),
        (bert, TEXTS, {"pooling": "cls"}, "different pooling"),
        (bert, TEXTS, {"prompt": "a "}, "different prompt"),
        (bert, TEXTS[:8], {}, "00001.npz was created from different texts"),
    ):
        with pytest.raises(bertjax.UsageError, match=message):
            model.encode(texts, **{"pooling": "mean", "output": output, **options})
    shard = tmp_path / "vectors.npy.part" / "00001.npz"
    content = bytearray(shard.read_bytes())
    content[content.index(b"NUMPY", content.index(b"vectors.npy")) + 200] ^= 1
    shard.write_bytes(content)
    with pytest.raises(bertjax.BertjaxError, match="00001.npz is damaged; remove it and run the same command again"):
        bert.encode(TEXTS, pooling="mean", output=output)
    shutil.rmtree(f"{output}.part")
    output.touch()
    with pytest.raises(bertjax.UsageError, match="vectors.npy exists; remove it, or choose another output"):
        bert.encode(TEXTS, pooling="mean", output=output)


def test_bfloat16_model_returns_similar_vectors_in_float32(bert, pretrained):
    expected = bert.encode(TEXTS, pooling="mean").pooled
    half = bertjax.load(pretrained, dtype="bfloat16")
    encoded = half.encode(TEXTS, pooling="mean").pooled
    assert half.config.dtype == "bfloat16" and encoded.dtype == np.float32
    difference = np.abs(encoded - expected).max()
    assert 1e-5 < difference < 0.05
    with pytest.raises(bertjax.UsageError, match="dtype is 'float16'; use one of auto, float32, bfloat16"):
        bertjax.load(pretrained, dtype="float16")


def test_encode_command_writes_one_vector_per_line(bert, pretrained, tmp_path, capfd):
    (tmp_path / "texts.txt").write_text("a film\n\nb a\n")
    output = tmp_path / "vectors.npy"
    words = ("encode", f"--checkpoint={pretrained}", f"--input={tmp_path / 'texts.txt'}", f"--output={output}")
    assert "set pooling to 'cls' or 'mean'" in refused(capfd, *words)
    assert printed(capfd, *words, "--pooling=mean") == f"{output}: float32 [3, 16]\n"
    expected = bert.encode(["a film", "", "b a"], pooling="mean").pooled
    np.testing.assert_array_equal(np.load(output), expected)
    assert "exists" in refused(capfd, *words, "--pooling=mean")
    assert sorted(os.listdir(tmp_path)) == ["texts.txt", "vectors.npy"]
