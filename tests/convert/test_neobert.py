"""NeoBERT equals its paper, and is exported bit for bit with its code."""

import dataclasses
import json

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from bertjax.convert import huggingface
from bertjax.convert.convert import convert
from bertjax.data.corpus.vocabulary import SPECIAL_PIECES
from bertjax.model.encoder import Encoder

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e '.[parity]', which `make test-all` does")
from safetensors.torch import load_file, save_file  # noqa: E402 - needs PyTorch

NUM_TOKENS = 60


def neobert_states(arrays, ids, num_heads):
    """Computes NeoBERT's last hidden states for a row of ids, from the paper. Array names are those of its code."""

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * arrays[f"model.{name}.weight"]

    def rotate(x):  # [L, H, K]; adjacent elements form complex numbers
        frequencies = 10_000.0 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
        angles = torch.outer(torch.arange(len(x)), frequencies)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)

    x = arrays["model.encoder.weight"][torch.tensor(ids)]
    for layer in range(2):
        name = f"transformer_encoder.{layer}"
        weights = {part: arrays[f"model.{name}.{part}.weight"] for part in ("qkv", "wo", "ffn.w12", "ffn.w3")}
        heads = (norm(x, f"{name}.attention_norm") @ weights["qkv"].T).reshape(len(ids), num_heads, -1)
        query, key, value = heads.chunk(3, dim=-1)
        scores = torch.einsum("lhk,mhk->hlm", rotate(query), rotate(key)) * query.shape[-1] ** -0.5
        context = torch.einsum("hlm,mhk->lhk", scores.softmax(-1), value)
        x = x + context.flatten(1) @ weights["wo"].T
        inner, gate = (norm(x, f"{name}.ffn_norm") @ weights["ffn.w12"].T).chunk(2, dim=-1)
        x = x + (torch.nn.functional.silu(inner) * gate) @ weights["ffn.w3"].T
    return norm(x, "layer_norm")


def save_neobert(folder, **fields):
    """Saves a random NeoBERT with a masked-LM head. Returns its arrays."""
    torch.manual_seed(0)
    width, num_mlp = 32, 40
    arrays = {"model.encoder.weight": torch.randn(NUM_TOKENS, width), "model.layer_norm.weight": torch.rand(width)}
    arrays |= {"decoder.weight": torch.randn(NUM_TOKENS, width), "decoder.bias": torch.randn(NUM_TOKENS)}
    shapes = {"qkv": (3 * width, width), "wo": (width, width), "ffn.w12": (2 * num_mlp, width)}
    shapes |= {"ffn.w3": (width, num_mlp), "attention_norm": (width,), "ffn_norm": (width,)}
    for layer in range(2):
        for part, shape in shapes.items():
            arrays[f"model.transformer_encoder.{layer}.{part}.weight"] = 0.3 * torch.randn(shape)
    config = {"model_type": "neobert", "architectures": ["NeoBERTLMHead"], "vocab_size": NUM_TOKENS}
    config |= {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 60}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | fields))
    save_file(arrays, folder / "model.safetensors")
    return arrays


def test_neobert_equals_its_paper_and_is_written_back(tmp_path):
    arrays = save_neobert(tmp_path / "theirs")
    checkpoint = huggingface.read(tmp_path / "theirs")
    ids = np.random.default_rng(0).integers(5, NUM_TOKENS, (1, 12), np.int32)
    params = {"params": unflatten_dict(checkpoint.params, sep="/")["encoder"]}
    states = Encoder(checkpoint.config).apply(params, ids, 0 * ids, np.ones_like(ids))[0]
    np.testing.assert_allclose(states[0], neobert_states(arrays, ids[0], 4), atol=1e-5, rtol=1e-4)
    (tmp_path / "ours").mkdir()
    huggingface.write(dataclasses.replace(checkpoint, params=dict(checkpoint.params)), tmp_path / "ours")
    restored = load_file(tmp_path / "ours" / "model.safetensors")
    assert restored.keys() == arrays.keys() and all(torch.equal(restored[name], arrays[name]) for name in arrays)
    assert huggingface.read(tmp_path / "ours").config == checkpoint.config


@pytest.mark.parametrize("through_workdir", [False, True])
def test_export_of_neobert_copies_its_code(through_workdir, tmp_path):
    source, auto_map = tmp_path / "source", {"AutoConfig": "model.NeoBERTConfig", "AutoModel": "model.NeoBERT"}
    save_neobert(source, auto_map=auto_map)
    (source / "vocab.txt").write_text("\n".join([*SPECIAL_PIECES, *map(str, range(NUM_TOKENS - 5))]))

    def exported(name):
        start = str(source)
        if through_workdir:
            start = str(tmp_path / f"{name}_workdir")
            convert(str(source), start, "bertjax", overwrite=False)
        convert(start, str(tmp_path / name), "huggingface", overwrite=False)
        return tmp_path / name, json.loads((tmp_path / name / "config.json").read_text())

    assert "auto_map" not in exported("without")[1]
    (source / "model.py").write_text("from .rotary import rotate")
    (source / "rotary.py").write_text("raise SystemExit")
    folder, written = exported("with")
    assert written["auto_map"] == auto_map
    assert (folder / "rotary.py").read_text() == "raise SystemExit" and (folder / "model.py").exists()
