"""Converted checkpoints compute in bertjax what they compute in Hugging Face's PyTorch, and load there."""

import jax
import numpy as np
import pytest
from etils import epath

from bertjax.convert.convert import BERTJAX, HUGGINGFACE, convert, read
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import workdir_vocabulary
from bertjax.errors import UsageError
from bertjax.model.encoder import Encoder, Pooler
from bertjax.model.heads import MaskedLmHead, NextSentenceHead
from bertjax.training.parameters import nested

WHY = "needs PyTorch and transformers: pip install -e '.[parity]', which `make test-all` does"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)

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
HEADS = ("encoder", "pooler", "masked_lm", "next_sentence")


def hugging_face_model(letters, folder, size="tiny", kind="BertForPreTraining", **fields):
    """A random model of theirs with its tokenizer, saved as they save it. Not near zero: differences must show."""
    torch.manual_seed(0)
    settings = {"hidden_dropout_prob": 0.0, "initializer_range": 0.05, **SIZES[size], **fields}
    count = len(letters.read_text().splitlines())
    model = getattr(transformers, kind)(transformers.BertConfig(vocab_size=count, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_bytes(letters.read_bytes())
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true, "tokenizer_class": "BertTokenizer"}')
    return model


def theirs(folder):
    """Hidden states, pooled output and both logits of a folder, in PyTorch, through AutoTokenizer and AutoModel."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForPreTraining.from_pretrained(folder).eval()
    inputs = tokenizer([a for a, _ in TEXTS], [b for _, b in TEXTS], padding=True, return_tensors="pt")
    with torch.no_grad():
        found = model(**inputs, output_hidden_states=True)
        pooled = model.bert(**inputs).pooler_output
    states = np.stack([state.numpy() for state in found.hidden_states])
    return inputs, states, pooled.numpy(), found.prediction_logits.numpy(), found.seq_relationship_logits.numpy()


def ours(folder, inputs):
    portable = read(folder)
    config, params = portable.model, nested(portable.params)
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
            MaskedLmHead(config).apply({"params": params["masked_lm"]}, hidden, table)[..., : config.vocab_size],
            NextSentenceHead(config).apply({"params": params["next_sentence"]}, pooled),
        )

    return [np.asarray(array) for array in compute(params)]


def assert_same(inputs, expected, found):
    inside = inputs["attention_mask"].numpy() > 0
    assert not inside.all() and inputs["token_type_ids"].numpy().max() == 1
    states, pooled, mlm, nsp = expected
    for a, b in (
        (states[:, inside], found[0][:, inside]),
        (pooled, found[1]),
        (mlm[inside], found[2][inside]),
        (nsp, found[3]),
    ):
        assert a.shape == b.shape and np.abs(a).max() > 0.05
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_both_compute_the_same_in_both_directions(size, activation, letters, tmp_path):
    if size != "tiny" and activation != "gelu":
        pytest.skip("the activation is the same at every size; the deep model has one")
    hugging_face_model(letters, tmp_path / "theirs", size, hidden_act=activation, layer_norm_eps=1e-7)
    convert(str(tmp_path / "theirs"), str(tmp_path / "ours"), BERTJAX, False, print)
    inputs, *expected = theirs(tmp_path / "theirs")
    assert_same(inputs, expected, ours(tmp_path / "ours", inputs))
    convert(str(tmp_path / "ours"), str(tmp_path / "back"), HUGGINGFACE, False, print)
    # Their two names for the tanh form differ in the last bit; the weights may not.
    inputs, *back = theirs(tmp_path / "back")
    assert_same(inputs, expected, back)
    before, after = (
        transformers.AutoModelForPreTraining.from_pretrained(tmp_path / name) for name in ("theirs", "back")
    )
    assert before.state_dict().keys() == after.state_dict().keys()
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name]), name


@pytest.mark.parametrize(
    "kind, parts",
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
def test_every_class_goes_there_and_back(kind, parts, letters, tmp_path):
    labels = {0: "no", 1: "perhaps", 2: "yes"}
    many = kind in ("BertForSequenceClassification", "BertForTokenClassification")
    fields = {"id2label": labels, "label2id": {name: index for index, name in labels.items()}} if many else {}
    model = hugging_face_model(letters, tmp_path / "theirs", kind=kind, **fields)
    convert(str(tmp_path / "theirs"), str(tmp_path / "ours"), BERTJAX, False, print)
    assert read(tmp_path / "ours").parts == parts
    convert(str(tmp_path / "ours"), str(tmp_path / "back"), HUGGINGFACE, False, print)
    back, report = getattr(transformers, kind).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name]), name
    assert not many or back.config.id2label == labels


def test_shards_and_half_precision_are_read(letters, tmp_path):
    model = hugging_face_model(letters, tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="300KB")
    (tmp_path / "shards" / "vocab.txt").write_bytes(letters.read_bytes())
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert_equal(read(tmp_path / "whole").params, read(tmp_path / "shards").params)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    half = read(tmp_path / "half")
    assert "bfloat16" in " ".join(half.notes)
    expected = model.bert.embeddings.position_embeddings.weight.detach().float().numpy()
    np.testing.assert_array_equal(half.params["encoder/embeddings/position"], expected)


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def test_pickled_weights_are_refused_with_the_way_out(letters, tmp_path):
    model = hugging_face_model(letters, tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "theirs" / "pytorch_model.bin")
    with pytest.raises(UsageError, match="a pickle may run any code.*save_pretrained"):
        read(tmp_path / "theirs")


def test_the_tokenizer_goes_along(letters, tmp_path):
    hugging_face_model(letters, tmp_path / "theirs")
    convert(str(tmp_path / "theirs"), str(tmp_path / "ours"), BERTJAX, False, print)
    convert(str(tmp_path / "ours"), str(tmp_path / "back"), HUGGINGFACE, False, print)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    vocabulary = workdir_vocabulary(epath.Path(tmp_path / "ours"))
    assert vocabulary.lower_case
    for text, _ in TEXTS:
        assert tokenizer(text)["input_ids"][1:-1] == Tokenizer(vocabulary).encode(text)
    assert tokenizer.mask_token_id == vocabulary.mask_id and tokenizer.pad_token_id == vocabulary.pad_id
