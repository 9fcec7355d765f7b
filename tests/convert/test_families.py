"""Models of all families and heads compute the same as in transformers, and are exported bit for bit."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers.checkpoints import assert_equal, edit_json

from bertjax.convert import huggingface
from bertjax.convert.eurobert import EUROBERT
from bertjax.convert.family import ACTIVATIONS, REQUIRED
from bertjax.convert.modernbert import MODERNBERT
from bertjax.data.corpus.vocabulary import load_vocabulary
from bertjax.errors import UsageError
from bertjax.inference import export
from bertjax.model.config import ModelConfig
from bertjax.model.encoder import Encoder
from bertjax.model.heads import DiscriminatorHead, LmHead, NextSentenceHead, Pooler
from bertjax.model.layers import activation

REASON = "needs PyTorch and transformers: pip install -e '.[parity]', which `make test-all` does"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

TOLERANCE = 1e-5
LENGTH, NUM_TOKENS, PAD_ID = 40, 60, 1
SIZES = {
    **{"vocab_size": NUM_TOKENS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"intermediate_size": 48, "max_position_embeddings": 48, "pad_token_id": PAD_ID},
    **{"bos_token_id": 2, "eos_token_id": 3},
}
REQUIRED_SIZES = {name: SIZES[name] for name in REQUIRED}
MODERN = {**SIZES, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 8, "attn_implementation": "eager"}
# Class and fields of a config in transformers, keyed by name. The rows are longer than two windows of local attention.
CONFIGS = {
    "bert": ("BertConfig", SIZES),
    "bert with other options": ("BertConfig", {**SIZES, "hidden_act": "relu", "layer_norm_eps": 1e-7}),
    "roberta": ("RobertaConfig", {**SIZES, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRobertaConfig", {**SIZES, "type_vocab_size": 1}),
    "camembert": ("CamembertConfig", {**SIZES, "type_vocab_size": 1}),
    "distilbert": (
        "DistilBertConfig",
        {"vocab_size": NUM_TOKENS, "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 48, "pad_token_id": PAD_ID},
    ),
    "electra": ("ElectraConfig", {**SIZES, "embedding_size": 16}),
    "electra without projection": ("ElectraConfig", {**SIZES, "embedding_size": 32}),
    "ernie": ("ErnieConfig", SIZES),
    "modernbert": ("ModernBertConfig", MODERN),
    "modernbert with other options": (
        "ModernBertConfig",
        {**MODERN, "classifier_pooling": "mean", "norm_bias": True, "decoder_bias": False, "hidden_activation": "silu"}
        | {"global_attn_every_n_layers": 2, "tie_word_embeddings": False, "classifier_activation": "tanh"},
    ),
    "modernbert with one layer": ("ModernBertConfig", {**MODERN, "num_hidden_layers": 1}),
    "eurobert": ("EuroBertConfig", {**SIZES, "num_key_value_heads": 2, "mask_token_id": 4}),
    "eurobert with other options": (
        "EuroBertConfig",
        {**SIZES, "mask_token_id": 4, "classifier_pooling": "mean", "mlp_bias": True, "attention_bias": True},
    ),
    "eurobert with tied embeddings": ("EuroBertConfig", {**SIZES, "mask_token_id": 4, "tie_word_embeddings": True}),
}
HEADS = ("", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
HEADS = (*HEADS, "ForMultipleChoice")
CASES = [(name, head) for name in CONFIGS for head in HEADS] + [("electra", "ForPreTraining")]
CASES += [("bert", "ForPreTraining"), ("bert", "ForNextSentencePrediction")]


def random_model(name, head):
    """Returns a model of transformers whose parameters are large enough for differences to show."""
    class_name, fields = CONFIGS[name]
    num_labels = 2 if head == "ForQuestionAnswering" else 3
    config = getattr(transformers, class_name)(**fields, num_labels=num_labels)
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModel{head}").from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.tie_weights()
    return model


def rows(config):
    """Returns ids, segments and mask of a full and of a padded row. `config` is of transformers or of bertjax."""
    mask = np.array([[1] * LENGTH, [1] * 23 + [0] * (LENGTH - 23)], np.int32)
    ids = np.random.default_rng(0).integers(5, NUM_TOKENS, mask.shape, np.int32)
    has_segments = getattr(config, "type_vocab_size", 0) > 1
    return np.where(mask, ids, PAD_ID), mask * (np.arange(LENGTH, dtype=np.int32) > 9) * has_segments, mask


def torch_outputs(model, head):
    """Returns hidden states of all layers [N + 1, 2, L, D], and logits or None."""
    names = ("input_ids", "token_type_ids", "attention_mask")
    inputs = {
        name: torch.tensor(array, dtype=torch.long) for name, array in zip(names, rows(model.config), strict=True)
    }
    if not inputs["token_type_ids"].any():
        del inputs["token_type_ids"]
    if head == "ForMultipleChoice":
        inputs = {name: array[None] for name, array in inputs.items()}
    with torch.no_grad():
        outputs = model(**inputs, output_hidden_states=True)
    states = np.stack([state.reshape(2, LENGTH, -1).numpy() for state in outputs.hidden_states])
    if head == "ForQuestionAnswering":
        return states, np.stack([outputs.start_logits.numpy(), outputs.end_logits.numpy()], axis=-1)
    return states, outputs.logits.numpy() if "logits" in outputs else None


def jax_outputs(checkpoint, head):
    """Returns the outputs of `torch_outputs`, computed in bertjax."""
    config, params = checkpoint.config, unflatten_dict(checkpoint.params, sep="/")
    inputs = rows(config)
    batch = dict(zip(("input_ids", "segment_ids", "input_mask"), inputs, strict=True))
    encode = jax.jit(lambda params: Encoder(config).apply({"params": params}, *inputs, collect_layers=True))
    hidden, states = encode(params["encoder"])
    logits = None
    if head == "ForMaskedLM":
        table = params["encoder"]["embeddings"]["token"]
        logits = LmHead(config).apply({"params": params.get("masked_lm", {})}, hidden, table)[..., :NUM_TOKENS]
    elif "discriminator" in params:
        logits = DiscriminatorHead(config).apply({"params": params["discriminator"]}, hidden)
    elif head == "ForNextSentencePrediction":
        pooled = Pooler(config).apply({"params": params["pooler"]}, hidden[:, 0])
        logits = NextSentenceHead(config).apply({"params": params["next_sentence"]}, pooled)
    elif checkpoint.output_kind:
        if head == "ForMultipleChoice":
            batch = {name: array[None] for name, array in batch.items()}
        logits = jax.jit(checkpoint.model.apply)({"params": params}, batch)
    return states, logits


@pytest.mark.parametrize(("name", "head"), CASES)
def test_hidden_states_and_logits_equal_those_of_transformers(name, head, tmp_path):
    if not hasattr(transformers, CONFIGS[name][0].removesuffix("Config") + (head or "Model")):
        pytest.skip("transformers has no such class")
    model = random_model(name, head)
    model.save_pretrained(tmp_path / "theirs")
    checkpoint = huggingface.read(tmp_path / "theirs")
    is_token = rows(model.config)[2] > 0
    states, logits = torch_outputs(model, head)
    own_states, own_logits = jax_outputs(checkpoint, head)
    np.testing.assert_allclose(np.asarray(own_states)[:, is_token], states[:, is_token], atol=TOLERANCE)
    if logits is not None:
        per_token = head in ("ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering", "ForPreTraining")
        own_logits = np.asarray(own_logits)
        shown = (own_logits[is_token], logits[is_token]) if per_token else (own_logits, logits)
        np.testing.assert_allclose(*shown, atol=TOLERANCE)
    (tmp_path / "ours").mkdir()
    huggingface.write(dataclasses.replace(checkpoint, params=dict(checkpoint.params)), tmp_path / "ours")
    restored = getattr(transformers, f"AutoModel{head}").from_pretrained(tmp_path / "ours").state_dict()
    original = model.state_dict()
    assert restored.keys() == original.keys()
    assert all(torch.equal(restored[key], value) for key, value in original.items())
    assert huggingface.read(tmp_path / "ours").config == checkpoint.config
    architecture = json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"]
    # A masked-LM head without parameters does not show in the arrays.
    assert architecture == [type(model).__name__] or (not head and not checkpoint.config.has_lm_head_params)
    written, rate = transformers.AutoConfig.from_pretrained(tmp_path / "ours"), checkpoint.config.hidden_dropout_prob
    # DistilBERT's classification head has its own default rate, so exports must write the rate of the layers.
    assert getattr(written, "seq_classif_dropout", rate) == rate


def test_task_embeddings_of_ernie_are_added_to_its_position_embeddings(tmp_path):
    torch.manual_seed(0)
    model = transformers.ErnieModel(transformers.ErnieConfig(**SIZES, use_task_id=True)).eval()
    model.save_pretrained(tmp_path)
    checkpoint = huggingface.read(tmp_path)
    assert any(
        "task_type_embeddings.weight to ernie.embeddings.position_embeddings" in note for note in checkpoint.notes
    )
    is_token = rows(model.config)[2] > 0
    states, own_states = torch_outputs(model, "")[0], np.asarray(jax_outputs(checkpoint, "")[0])
    np.testing.assert_allclose(own_states[:, is_token], states[:, is_token], atol=TOLERANCE)
    transformers.ErnieModel(transformers.ErnieConfig(**SIZES)).save_pretrained(tmp_path / "without")
    edit_json(tmp_path / "without" / "config.json", use_task_id=True)
    with pytest.raises(UsageError, match="lacks the array .*task_type_embeddings.weight, but .* has use_task_id=true"):
        huggingface.read(tmp_path / "without")
    edit_json(tmp_path / "config.json", use_task_id=False)
    positions = huggingface.read(tmp_path).params["encoder/embeddings/position"]
    np.testing.assert_array_equal(positions, model.embeddings.position_embeddings.weight.detach())


def test_class_of_another_family_selects_the_class_with_the_same_head(tmp_path):
    model = random_model("xlm-roberta", "ForSequenceClassification")
    model.save_pretrained(tmp_path)
    expected = huggingface.read(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["RobertaForSequenceClassification"])
    read = huggingface.read(tmp_path)
    assert (read.config, read.output_kind, read.labels) == (expected.config, expected.output_kind, expected.labels)
    edit_json(tmp_path / "config.json", architectures=["XLMRobertaLMHeadModel"])
    with pytest.raises(UsageError, match="has the architecture 'XLMRobertaLMHeadModel'"):
        huggingface.read(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("suffix", [".stablehlo", ".onnx"])
def test_every_family_is_exported(name, suffix, tmp_path, monkeypatch):
    if suffix == ".onnx":
        pytest.importorskip("onnxscript", reason="needs ONNX: pip install -e '.[onnx]'")
    tokens = [*(f"[{token}]" for token in ("CLS", "PAD", "SEP", "UNK", "MASK")), *map(chr, range(97, 123))]
    tokens += [*(f"##{token}" for token in tokens[5:]), ",", ".", "1"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    vocabulary = load_vocabulary(tmp_path / "vocab.txt")
    for head in ("", "ForMaskedLM", "ForSequenceClassification"):
        folder = tmp_path / f"model{head}"
        random_model(name, head).save_pretrained(folder)
        checkpoint = dataclasses.replace(huggingface.read(folder), vocabulary=vocabulary)
        monkeypatch.setattr(export, "read_checkpoint", lambda _, checkpoint=checkpoint: checkpoint)
        export.export(str(folder), str(tmp_path / f"model{head}{suffix}"))


@pytest.mark.parametrize("pad_id", [PAD_ID, 7])
def test_padding_tokens_in_a_text_are_not_counted_in_positions(pad_id, tmp_path):
    config = transformers.RobertaConfig(**SIZES | {"pad_token_id": pad_id})
    torch.manual_seed(0)
    model = transformers.RobertaModel(config).eval()
    model.save_pretrained(tmp_path)
    checkpoint = huggingface.read(tmp_path)
    ids = np.random.default_rng(0).integers(0, 10, (1, LENGTH), np.int32)
    assert (ids == pad_id).sum() > 1
    with torch.no_grad():
        parts = [
            model(torch.tensor(part, dtype=torch.long)).last_hidden_state[0] for part in (ids[:, :15], ids[:, 15:])
        ]
    sequence_ids = np.repeat([[1, 2]], [15, LENGTH - 15], axis=1).astype(np.int32)
    position_ids = np.concatenate([np.arange(15), np.arange(LENGTH - 15)])[None].astype(np.int32)
    params = {"params": unflatten_dict(checkpoint.params, sep="/")["encoder"]}
    states = Encoder(checkpoint.config).apply(params, ids, 0 * ids, sequence_ids, position_ids)[0]
    np.testing.assert_allclose(states[0], np.concatenate(parts), atol=TOLERANCE)
    states = Encoder(checkpoint.config).apply(params, ids[:, :15], 0 * ids[:, :15], 0 * ids[:, :15] + 1)[0]
    np.testing.assert_allclose(states[0], parts[0], atol=TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_the_masked_lm_loss_equal_those_of_transformers(name, tmp_path):
    model = random_model(name, "ForMaskedLM")
    model.save_pretrained(tmp_path / "theirs")
    ids, segments, mask = rows(model.config)
    targets = np.random.default_rng(1).integers(5, NUM_TOKENS, ids.shape)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask, targets, -100)}
    inputs |= {"token_type_ids": segments} if segments.any() else {}
    model(**{name: torch.tensor(array, dtype=torch.long) for name, array in inputs.items()}).loss.backward()
    checkpoint = huggingface.read(tmp_path / "theirs")
    config = checkpoint.config

    def loss(params):
        hidden = Encoder(config).apply({"params": params["encoder"]}, ids, segments, mask)[0]
        table = params["encoder"]["embeddings"]["token"]
        logits = LmHead(config).apply({"params": params.get("masked_lm", {})}, hidden, table)[..., :NUM_TOKENS]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return (losses * mask).sum() / mask.sum()

    gradients = jax.jit(jax.grad(loss))(unflatten_dict(checkpoint.params, sep="/"))
    (tmp_path / "ours").mkdir()
    # Gradients have the layout of parameters.
    flat = {path: np.asarray(value) for path, value in flatten_dict(gradients, sep="/").items()}
    huggingface.write(dataclasses.replace(checkpoint, params=flat), tmp_path / "ours")
    # Load the file, because transformers may rename its arrays.
    written = dict(transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours").named_parameters())
    for key, parameter in model.named_parameters():
        gradient = written[key].detach()
        np.testing.assert_allclose(gradient, parameter.grad, atol=TOLERANCE, err_msg=key)


@pytest.mark.parametrize(
    ("family", "fields", "name", "expected"),
    [
        (MODERNBERT, {"global_rope_theta": 5e4}, "local_rope_theta", 10_000),
        (MODERNBERT, {"global_rope_theta": 5e4, "local_rope_theta": None}, "local_rope_theta", 5e4),
        (MODERNBERT, {"sliding_window": 5, "local_attention": 128}, "local_attention", 10),
        (EUROBERT, {"clf_pooling": "bos"}, "classifier_pooling", "cls"),
        (EUROBERT, {"clf_pooling": "bos", "classifier_pooling": "mean"}, "classifier_pooling", "mean"),
        (EUROBERT, {}, "classifier_pooling", "late"),
        (EUROBERT, {"rope_scaling": {"rope_theta": 7}, "rope_parameters": {"rope_theta": 9}}, "global_rope_theta", 7),
    ],
)
def test_other_names_of_config_fields_are_read(family, fields, name, expected, log_lines):
    assert getattr(family.model_config(REQUIRED_SIZES | fields, Path("a")), name) == expected
    is_read_as_remote_code = expected == "cls"  # transformers ignores `clf_pooling`.
    assert any("clf_pooling" in line for line in log_lines) == is_read_as_remote_code


def test_a_pooler_that_the_head_does_not_use_is_ignored(tmp_path):
    model = random_model("roberta", "ForSequenceClassification")
    model.roberta.pooler = transformers.RobertaModel(model.config).pooler
    model.save_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    logits = torch_outputs(model, "ForSequenceClassification")[1]
    own_logits = jax_outputs(huggingface.read(tmp_path), "ForSequenceClassification")[1]
    np.testing.assert_allclose(own_logits, logits, atol=TOLERANCE)


@pytest.mark.parametrize("is_configured", [True, False])
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_an_untied_decoder_keeps_its_bias(name, is_configured, tmp_path):
    class_name, fields = CONFIGS[name]
    config = getattr(transformers, class_name)(**fields, tie_word_embeddings=False)
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    with torch.no_grad():
        biases = [bias for key, bias in model.named_parameters() if key in ("cls.predictions.bias", "lm_head.bias")]
        for bias in biases:  # transformers ignores these biases.
            bias.copy_(-torch.arange(NUM_TOKENS))
        model.get_output_embeddings().bias.copy_(torch.arange(NUM_TOKENS))
    model.save_pretrained(tmp_path / "theirs")
    if not is_configured:  # transformers ties no arrays with different values.
        edit_json(tmp_path / "theirs" / "config.json", tie_word_embeddings=True)
    (tmp_path / "ours").mkdir()
    checkpoint = huggingface.read(tmp_path / "theirs")
    own_logits = np.asarray(jax_outputs(checkpoint, "ForMaskedLM")[1])
    huggingface.write(checkpoint, tmp_path / "ours")
    restored = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours").eval()
    expected, logits = (torch_outputs(each, "ForMaskedLM")[1] for each in (model, restored))
    np.testing.assert_array_equal(logits, expected)
    is_token = rows(checkpoint.config)[2] > 0
    np.testing.assert_allclose(own_logits[is_token], expected[is_token], atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_those_of_transformers(name):
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    expected = transformers.activations.ACT2FN[name](torch.tensor(x))
    np.testing.assert_allclose(activation(ModelConfig(), ACTIVATIONS[name])(x), expected, atol=1e-6)


def test_shards_and_bfloat16_weights_are_read(tmp_path):
    model = random_model("bert", "ForPreTraining")
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert_equal(huggingface.read(tmp_path / "single").params, huggingface.read(tmp_path / "shards").params)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bfloat16")
    checkpoint = huggingface.read(tmp_path / "bfloat16")
    assert "converted weights from bfloat16 to float32" in checkpoint.notes
    expected = model.bert.embeddings.position_embeddings.weight.detach().float().numpy()
    np.testing.assert_array_equal(checkpoint.params["encoder/embeddings/position"], expected)
