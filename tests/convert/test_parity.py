"""Converted checkpoints compute the same outputs in bertjax and in transformers with PyTorch."""

import jax
import numpy as np
import pytest
from checkpoints import assert_equal, edit_json
from flax.traverse_util import unflatten_dict

from bertjax.convert.convert import BERTJAX, HUGGINGFACE, convert, read_checkpoint
from bertjax.model.encoder import Encoder
from bertjax.model.heads import LmHead, NextSentenceHead, Pooler

REASON = "needs PyTorch and transformers: pip install -e '.[parity]', which `make test-all` does"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

TOLERANCE = 1e-5
TEXTS = [
    ("The river ran high, and the bank gave way.", "Nobody had expected that."),
    ("Who wrote it?", "A clerk of the court; he signed with an X, as those who could not write did, in the year 1712."),
    ("Short.", "Yes"),
]
SIZES = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    "12 layers": {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768},
}


def save_random_model(letters, folder, size="tiny", class_name="BertForPreTraining", **fields):
    """Saves a random model of transformers, with parameters large enough for differences to show."""
    torch.manual_seed(0)
    fields = {"hidden_dropout_prob": 0.0, "initializer_range": 0.05, **SIZES[size], **fields}
    num_tokens = len(letters.read_text().splitlines())
    model = getattr(transformers, class_name)(transformers.BertConfig(vocab_size=num_tokens, **fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_bytes(letters.read_bytes())
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true, "tokenizer_class": "BertTokenizer"}')
    return model


def torch_outputs(folder):
    """Computes hidden states, pooled output and logits of both heads in PyTorch, with AutoTokenizer and AutoModel."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForPreTraining.from_pretrained(folder).eval()
    inputs = tokenizer([a for a, _ in TEXTS], [b for _, b in TEXTS], padding=True, return_tensors="pt")
    with torch.no_grad():
        outputs = model(**inputs, output_hidden_states=True)
        pooled = model.bert(**inputs).pooler_output
    states = np.stack([state.numpy() for state in outputs.hidden_states])
    return inputs, states, pooled.numpy(), outputs.prediction_logits.numpy(), outputs.seq_relationship_logits.numpy()


def jax_outputs(folder, inputs):
    """Computes the hidden states, pooled output and logits of `torch_outputs` in bertjax."""
    checkpoint = read_checkpoint(folder)
    config, params = checkpoint.config, unflatten_dict(checkpoint.params, sep="/")
    ids, mask, segments = (
        inputs[name].numpy().astype(np.int32) for name in ("input_ids", "attention_mask", "token_type_ids")
    )

    @jax.jit
    def compute(params):
        hidden, states = Encoder(config).apply({"params": params["encoder"]}, ids, segments, mask, collect_layers=True)
        pooled = Pooler(config).apply({"params": params["pooler"]}, hidden[:, 0])
        table = params["encoder"]["embeddings"]["token"]
        return (
            states,
            pooled,
            LmHead(config).apply({"params": params["masked_lm"]}, hidden, table)[..., : config.vocab_size],
            NextSentenceHead(config).apply({"params": params["next_sentence"]}, pooled),
        )

    return [np.asarray(array) for array in compute(params)]


def assert_close(inputs, expected, outputs):
    inside = inputs["attention_mask"].numpy() > 0
    assert not inside.all() and inputs["token_type_ids"].numpy().max() == 1
    states, pooled, mlm, nsp = expected
    for a, b in (
        (states[:, inside], outputs[0][:, inside]),
        (pooled, outputs[1]),
        (mlm[inside], outputs[2][inside]),
        (nsp, outputs[3]),
    ):
        assert a.shape == b.shape and np.abs(a).max() > 0.05
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("size", "hidden_act"),
    [("12 layers", "gelu"), *(("tiny", name) for name in ("gelu", "gelu_python", "gelu_new", "gelu_fast", "relu"))],
)
def test_outputs_are_equal_after_conversion_in_both_directions(size, hidden_act, letters, tmp_path):
    save_random_model(letters, tmp_path / "foreign", size, hidden_act=hidden_act, layer_norm_eps=1e-7)
    convert(str(tmp_path / "foreign"), str(tmp_path / "own"), BERTJAX, False)
    inputs, *expected = torch_outputs(tmp_path / "foreign")
    assert_close(inputs, expected, jax_outputs(tmp_path / "own", inputs))
    convert(str(tmp_path / "own"), str(tmp_path / "back"), HUGGINGFACE, False)
    # Compare outputs approximately: the two tanh GELUs of transformers differ in the last bit. The weights are equal.
    inputs, *outputs = torch_outputs(tmp_path / "back")
    assert_close(inputs, expected, outputs)
    before, after = (
        transformers.AutoModelForPreTraining.from_pretrained(tmp_path / name) for name in ("foreign", "back")
    )
    assert before.state_dict().keys() == after.state_dict().keys()
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name]), name


@pytest.mark.parametrize(
    "class_name, modules",
    [
        ("BertModel", {"encoder", "pooler"}),
        ("BertForMaskedLM", {"encoder", "masked_lm"}),
        ("BertForNextSentencePrediction", {"encoder", "pooler", "next_sentence"}),
        ("BertForSequenceClassification", {"encoder", "pooler", "classifier"}),
        ("BertForMultipleChoice", {"encoder", "pooler", "classifier"}),
        ("BertForTokenClassification", {"encoder", "classifier"}),
        ("BertForQuestionAnswering", {"encoder", "classifier"}),
    ],
)
def test_every_transformers_class_survives_a_round_trip(class_name, modules, letters, tmp_path):
    labels = {0: "no", 1: "7", 2: "yes"}
    has_labels = class_name in ("BertForSequenceClassification", "BertForTokenClassification")
    fields = {"id2label": labels, "label2id": {name: index for index, name in labels.items()}} if has_labels else {}
    model = save_random_model(letters, tmp_path / "foreign", class_name=class_name, **fields)
    if has_labels:
        edit_json(tmp_path / "foreign/config.json", id2label={"0": "no", "1": 7, "2": "yes"})
    convert(str(tmp_path / "foreign"), str(tmp_path / "own"), BERTJAX, False)
    assert read_checkpoint(tmp_path / "own").modules == modules
    convert(str(tmp_path / "own"), str(tmp_path / "back"), HUGGINGFACE, False)
    back, report = getattr(transformers, class_name).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name]), name
    assert not has_labels or back.config.id2label == labels


def test_shards_and_bfloat16_weights_are_read(letters, tmp_path):
    model = save_random_model(letters, tmp_path / "single")
    model.save_pretrained(tmp_path / "shards", max_shard_size="300KB")
    (tmp_path / "shards" / "vocab.txt").write_bytes(letters.read_bytes())
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert_equal(read_checkpoint(tmp_path / "single").params, read_checkpoint(tmp_path / "shards").params)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bfloat16")
    checkpoint = read_checkpoint(tmp_path / "bfloat16")
    assert "bfloat16" in " ".join(checkpoint.notes)
    expected = model.bert.embeddings.position_embeddings.weight.detach().float().numpy()
    np.testing.assert_array_equal(checkpoint.params["encoder/embeddings/position"], expected)
