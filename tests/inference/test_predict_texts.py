"""Predictions of fine-tuned models for texts from the command line, a file or standard input."""

import dataclasses
import functools
import io
import itertools
import json
import shutil
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from etils import epath
from flax.traverse_util import unflatten_dict
from helpers.checkpoints import edit_json, random_checkpoint
from helpers.commanding import printed, refused

import bertjax
from bertjax.cli import main as cli
from bertjax.config.mesh import MeshConfig
from bertjax.convert import huggingface
from bertjax.convert.convert import convert
from bertjax.convert.portable import write_workdir
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.errors import UsageError
from bertjax.inference import predict
from bertjax.inference.load import load_model
from bertjax.model.models import EncoderModel, build_model
from bertjax.tasks.finetuning.output_layer import CHOICES, CLASSES, SPANS, TAGS
from bertjax.tasks.records import softmax
from bertjax.training.parameters import save_params
from bertjax.training.sharding import make_mesh

LABELS = {CLASSES: ("bad", "good", "so"), TAGS: ("O", "B-X", "I-X")}


@pytest.fixture(scope="module")
def folders(letters, pretrained, tmp_path_factory):
    """Returns one Hugging Face folder per kind of output layer."""
    folders = {"": pretrained}
    for name in (CLASSES, CHOICES, TAGS, SPANS, "number"):
        folders[name] = tmp_path_factory.mktemp(name)
        kind = CLASSES if name == "number" else name
        huggingface.write(random_checkpoint(letters, kind, LABELS.get(name, ())), folders[name])
    return folders


def run_predict(capfd, folder, *arguments) -> str:
    return printed(capfd, "predict", f"--checkpoint={folder}", *arguments)


def predict_json(capfd, folder, *arguments) -> list[dict]:
    return [json.loads(line) for line in run_predict(capfd, folder, "--json", *arguments).splitlines()]


@functools.cache
def checkpoint_and_model(folder):
    """Returns the checkpoint of a folder and a jitted function from a batch to logits."""
    checkpoint = huggingface.read(folder)
    model = build_model(checkpoint.model_description, checkpoint.config)
    return checkpoint, jax.jit(functools.partial(model.apply, {"params": unflatten_dict(checkpoint.params, sep="/")}))


def logits_of(folder, *texts: str) -> np.ndarray:
    """Computes logits of one text or pair without batching and without padding. [MASK] is one token."""
    checkpoint, model = checkpoint_and_model(folder)
    vocabulary, encode = checkpoint.vocabulary, Tokenizer(checkpoint.vocabulary).encode
    ids, segments = [vocabulary.cls_id], [0]
    for segment, text in enumerate(texts):
        words = ([vocabulary.mask_id] if word == "[MASK]" else encode(word) for word in text.split())
        text_ids = [*itertools.chain(*words), vocabulary.sep_id]
        ids, segments = ids + text_ids, segments + [segment] * len(text_ids)
    batch = {"input_ids": ids, "segment_ids": segments, "input_mask": [1] * len(ids)}
    return np.asarray(model({name: np.array([row]) for name, row in batch.items()})[0])


def test_class_probabilities_do_not_depend_on_the_batch(folders, capfd):
    texts = ("the cat", "a dog ||| c", "the [MASK]", "x" * 200)
    *records, _ = predict_json(capfd, folders[CLASSES], *texts, "--logits")
    assert [(record["line"], record["text"]) for record in records] == [*enumerate(texts[:-1], 1)]
    for text, record in zip(texts, records, strict=False):
        logits = logits_of(folders[CLASSES], *text.split(" ||| "))
        assert list(record["probabilities"]) == list(LABELS[CLASSES])
        np.testing.assert_allclose(list(record["probabilities"].values()), softmax(logits), atol=1e-5)
        np.testing.assert_allclose(list(record["logits"].values()), logits, rtol=1e-4, atol=1e-5)
        assert record["prediction"] == LABELS[CLASSES][int(logits.argmax())]
    output = run_predict(capfd, folders[CLASSES], "the cat").splitlines()
    best = max(records[0]["probabilities"].items(), key=lambda pair: pair[1])
    assert output[0] == "the cat" and output[1].startswith(f"  {best[0]} {100 * best[1]:.1f} %   ")


def test_regression_model_predicts_a_number(folders, capfd):
    (record,) = predict_json(capfd, folders["number"], "the cat")
    assert record["prediction"] == pytest.approx(float(logits_of(folders["number"], "the cat")[0]), rel=1e-4)
    assert run_predict(capfd, folders["number"], "the cat") == f"the cat\n  {record['prediction']:g}\n"


def test_multiple_choice_accepts_any_number_of_endings(folders, capfd):
    records = predict_json(capfd, folders[CHOICES], "he ||| ran ||| sat down ||| is", "she ||| b ||| c")
    for record in records:
        beginning, *endings = record["text"].split(" ||| ")
        scores = np.array([logits_of(folders[CHOICES], beginning, ending)[0] for ending in endings])
        np.testing.assert_allclose(record["probabilities"], softmax(scores), atol=1e-5)
        assert record["prediction"] == int(scores.argmax())


def test_every_word_of_a_text_longer_than_a_row_is_tagged(folders, capfd):
    words = [f"w{index}" for index in range(60)]
    short, empty, long = predict_json(capfd, folders[TAGS], "a dog", " ", " ".join(words))
    assert long["words"] == words and len(long["prediction"]) == len(long["probabilities"]) == 60
    assert (empty["words"], empty["prediction"]) == ([], [])
    # The row is [CLS] a d ##o ##g [SEP], and the first token of each word determines the tag.
    logits = logits_of(folders[TAGS], "a dog")[[1, 2]]
    assert short["prediction"] == [LABELS[TAGS][tag] for tag in logits.argmax(axis=-1)]
    np.testing.assert_allclose([list(p.values()) for p in short["probabilities"]], softmax(logits), atol=1e-5)
    output = run_predict(capfd, folders[TAGS], "a dog").splitlines()
    assert [line.split()[0] for line in output[1:]] == ["a", "dog"]
    assert [line.split()[1] for line in output[1:]] == short["prediction"]


def test_answer_is_the_best_span_of_the_context(folders, capfd, tmp_path):
    context = "Jo saw Al."
    (tmp_path / "passage.txt").write_text(context + "\n")
    (record,) = predict_json(capfd, folders[SPANS], "who?", f"--context={context}")
    # A context that looks like a URL is ordinary text.
    url = "http://a.example/"
    assert predict_json(capfd, folders[SPANS], "who?", f"--context={url}")[0]["prediction"] in url
    assert predict_json(capfd, folders[SPANS], "who?", f"--context_file={tmp_path / 'passage.txt'}") == [record]
    logits = logits_of(folders[SPANS], "who?", context)
    # Start and end characters by token position in the row [CLS] w ##h ##o ? [SEP] J ##o s ##a ##w A ##l . [SEP].
    spans = {6: (0, 1), 7: (1, 2), 8: (3, 4), 9: (4, 5), 10: (5, 6), 11: (7, 8), 12: (8, 9), 13: (9, 10)}
    first, last = max(
        itertools.combinations_with_replacement(spans, 2), key=lambda pair: logits[pair[0], 0] + logits[pair[1], 1]
    )
    assert record["prediction"] == context[spans[first][0] : spans[last][1]]
    assert (record["start"], record["end"]) == (spans[first][0], spans[last][1])
    assert 0 < record["probability"] <= 1
    assert run_predict(capfd, folders[SPANS], "who?", f"--context={context}").splitlines()[1].endswith(" %")
    # An empty answer has no character offsets.
    loaded = load_model(folders[SPANS])
    loaded = dataclasses.replace(loaded, defaults=dataclasses.replace(loaded.defaults, null_threshold=-1e9))
    (record,) = predict.predict_texts(loaded, [("who?",)], context=context)
    assert (record["prediction"], record["start"], record["end"]) == ("", None, None)


@pytest.mark.ci
def test_lines_stream_in_order(folders, letters, monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(predict, "_CHUNK_TEXTS", 3)
    lines = [f"text {index} {'a ' * (index % 5)}" for index in range(10)]
    (tmp_path / "texts.txt").write_text("\n".join(lines) + "\n")
    records = predict_json(capfd, folders[CLASSES], f"--text={tmp_path / 'texts.txt'}")
    assert [(record["line"], record["text"]) for record in records] == list(enumerate(lines, 1))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO((tmp_path / "texts.txt").read_bytes())))
    assert predict_json(capfd, folders[CLASSES], "--text=-") == records
    # Endless input is read and predicted in chunks of three texts.
    num_read: list[int] = []
    endless = (num_read.append(index) or (f"a {index}",) for index in itertools.count())
    predictions = predict.predict_texts(load_model(folders[CLASSES]), endless)
    for count in range(1, 8):
        assert next(predictions)["prediction"] in LABELS[CLASSES]
        assert len(num_read) == -(-count // 3) * 3


def test_tagger_keeps_the_words_of_a_tuple_and_splits_text_at_punctuation(folders, capfd, monkeypatch):
    tagger, text = bertjax.load(folders[TAGS]), "Al saw [MASK]-Jo, (once)."
    (one, two) = tagger.predict([("Munich,",), ("U.S.", "a b", "")])
    assert (one["words"], one["spans"]) == (["Munich,"], [[0, 7]])
    assert (two["words"], two["spans"]) == (["U.S.", "a b", ""], [[0, 4], [5, 8], [9, 9]])
    (record,) = predict_json(capfd, folders[TAGS], text)
    assert record["words"] == ["Al", "saw", "[MASK]", "-", "Jo", ",", "(", "once", ")", "."]
    assert [text[start:end] for start, end in record["spans"]] == record["words"]
    assert record["prediction"] == tagger.predict([tuple(record["words"])])[0]["prediction"]

    tags = iter(["B-X", "O", "O", "O", "B-X", "I-X", "I-X", "O", "O", "B-X"])
    logits_of_tag = {tag: 9.0 * (np.arange(3) == index) for index, tag in enumerate(LABELS[TAGS])}
    monkeypatch.setattr(predict, "gather_words", lambda *_: [[logits_of_tag[tag] for tag in tags]])
    (record,) = predict_json(capfd, folders[TAGS], text)
    assert record["entities"] == [
        {"label": "X", "start": 0, "end": 2, "text": "Al"},
        {"label": "X", "start": 14, "end": 19, "text": "Jo, ("},
        {"label": "X", "start": 24, "end": 25, "text": "."},
    ]


def test_tags_without_scheme_have_no_entities(letters, tmp_path):
    huggingface.write(random_checkpoint(letters, TAGS, ("DET", "NOUN", "O")), tmp_path)
    (record,) = bertjax.load(tmp_path).predict(["a dog"])
    assert "entities" not in record and record["spans"] == [[0, 1], [2, 5]]


def test_truncated_texts_are_counted_once(folders, log_lines, monkeypatch):
    monkeypatch.setattr(predict, "_CHUNK_TEXTS", 2)
    classifier = bertjax.load(folders[CLASSES])
    classifier.predict(["a " * 38, ("a " * 20, "b " * 17)])
    assert log_lines == []
    classifier.predict(["a " * 39, "b", ("a " * 20, "b " * 18), "c", "d"])
    assert log_lines == ["2 of 5 texts were truncated to 40 tokens"]
    # These models split long texts into windows instead of truncating them.
    bertjax.load(folders[TAGS]).predict(["a " * 50])
    bertjax.load(folders[SPANS]).predict(["who?"], context="a " * 50)
    assert len(log_lines) == 1


def test_control_characters_of_a_text_are_escaped_in_json(folders, capfd):
    text = "a\x1b[31mb\x9b1m"
    output = run_predict(capfd, folders[CLASSES], "--json", text)
    assert output.isascii() and output.strip().isprintable() and json.loads(output)["text"] == text


def test_fill_mask_accepts_a_mask_token_with_another_name(folders, tmp_path, capfd):
    folder = shutil.copytree(folders[""], tmp_path / "model")
    for name in ("tokenizer.json", "special_tokens_map.json"):
        (folder / name).unlink()
    (folder / "vocab.txt").write_text((folder / "vocab.txt").read_text().replace("[MASK]", "<mask>"))
    (folder / "tokenizer_config.json").write_text('{"mask_token": "<mask>", "do_lower_case": true}')
    bert = bertjax.load(folder)
    expected = bertjax.load(folders[""]).fill_mask("a [MASK] b")
    assert bert.fill_mask("a <mask> b") == bert.fill_mask("a [MASK] b") == expected
    # If one text has no mask token, the command prints only an error, and no predictions for the other text.
    with pytest.raises(SystemExit):
        cli.main(["fill_mask", f"--checkpoint={folder}", "a <mask>", "b"])
    output, error = capfd.readouterr()
    assert "no <mask> in 'b'; write <mask> in place of the word" in error and not output


@pytest.mark.parametrize(
    ("name", "fields", "activation"),
    [
        ("number", {}, "torch.nn.Sigmoid"),
        ("number", {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, ""),
        ("number", {"sbert_ce_default_activation_function": "torch.nn.Tanh"}, "torch.nn.Tanh"),
        (CLASSES, {}, ""),
    ],
)
def test_activation_of_a_cross_encoder_is_noted_and_survives_conversions(name, fields, activation, folders, tmp_path):
    folder, own, back = shutil.copytree(folders[name], tmp_path / "model"), tmp_path / "own", tmp_path / "back"
    edit_json(folder / "config.json", **fields)
    checkpoint = huggingface.read(folder)
    notes = [note for note in checkpoint.notes if "CrossEncoder" in note]
    assert notes == ([f"predict does not apply {activation} to logits, unlike CrossEncoder"] if activation else [])
    convert(str(folder), str(own), "bertjax", overwrite=False)
    convert(str(own), str(back), "huggingface", overwrite=False)
    assert huggingface.read(back).activation == checkpoint.activation


def test_prompt_lower_casing_and_token_limit_of_a_cross_encoder_are_noted(folders, tmp_path):
    folder = shutil.copytree(folders[CLASSES], tmp_path / "model")
    settings = {"activation_fn": "torch.nn.ReLU", "prompts": {"q": "query: "}, "default_prompt_name": "q"}
    edit_json(folder / "config_sentence_transformers.json", **settings)
    edit_json(folder / "sentence_bert_config.json", do_lower_case=True)
    edit_json(folder / "tokenizer_config.json", model_max_length=9)
    note = "predict does not apply torch.nn.ReLU to logits and the prompt 'query: ' to texts"
    limit = "ignored model_max_length=9: texts are truncated to 40 tokens"
    assert {f"{note}, unlike CrossEncoder", limit} <= {*huggingface.read(folder).notes}
    module = {"name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
    (folder / "modules.json").write_text(json.dumps([module]))
    assert f"{note} and lower-casing to texts, unlike CrossEncoder" in huggingface.read(folder).notes


def test_wrong_usage_is_rejected(folders, capfd, tmp_path):
    workdir = tmp_path / "run"
    (tmp_path / "objects.txt").write_text('{"text": "a"}\n')
    cli.main(["convert", str(folders[TAGS]), str(workdir)])
    (workdir / "output_layer.json").unlink()
    for folder, arguments, message in (
        (folders[""], "a", "no output layer for texts (its model is 'pretraining'); fine-tune it"),
        (workdir, "a", "has no output layer"),
        (folders[SPANS], "who?", "set context to the passage"),
        (folders[CHOICES], "he|||ran", "too few endings: ('he|||ran',)"),
        (folders[CLASSES], "a --context=b", "omit context"),
        (folders[CLASSES], "", "nothing to predict; pass texts, --text FILE, or --output DIR"),
        (folders[CLASSES], "a --output=out", "--output applies to the task's data only"),
        (folders[CLASSES], "a --config.seed=1", "--config.seed=1 applies to the task's data only"),
        (folders[CLASSES], "--output=out --json", "--json applies only to texts"),
        (folders[CLASSES], "a --seq_len=41", "seq_len=41 is out of range; use 8 to 40"),
        (folders[CLASSES], "--text=nothing", "cannot read"),
        (folders[CLASSES], "--text=rows.jsonl", "rows.jsonl is a jsonl table"),
        (folders[CLASSES], f"--text={tmp_path}/objects.txt", "objects.txt contains JSON or markup, not one text per"),
    ):
        assert message in refused(capfd, "predict", f"--checkpoint={folder}", *arguments.split())
    assert "a text is empty" in refused(capfd, "predict", f"--checkpoint={folders[CLASSES]}", "")
    model = load_model(folders[CLASSES])
    own = dataclasses.replace(model, description=model.model_description | {"kind": "relations"})
    with pytest.raises(UsageError, match="model is 'relations'.*--output"):
        predict.check_model(own, "")


def mesh_of(num_devices):
    """Returns a mesh that shards parameters over the first `num_devices` devices."""
    return make_mesh(MeshConfig(data=1, fsdp=num_devices), jax.devices()[:num_devices])


@pytest.mark.devices
@pytest.mark.parametrize("kind", [CLASSES, CHOICES, SPANS])
def test_predictions_on_two_devices_equal_those_on_one(kind, letters, tmp_path):
    write_workdir(random_checkpoint(letters, kind, LABELS.get(kind, ())), tmp_path)
    inputs = [("he", "ran", "sat down")] if kind == CHOICES else [("the cat",), ("a much longer text",)]
    context = "Jo saw Al." if kind == SPANS else ""
    one, two = (
        list(predict.predict_texts(load_model(tmp_path, mesh_of(count)), inputs, context=context, logits=True))
        for count in (1, 2)
    )
    for first, second in zip(one, two, strict=True):
        assert first["prediction"] == second["prediction"]
        first_values, second_values = (
            [value for value in jax.tree.leaves(record.get("logits", record)) if isinstance(value, float)]
            for record in (first, second)
        )
        np.testing.assert_allclose(first_values, second_values, rtol=1e-3, atol=1e-4)


@pytest.mark.devices
@pytest.mark.parametrize("num_devices", [1, 2])
def test_unknown_head_loads_as_encoder_and_unknown_encoder_parameter_is_rejected(num_devices, letters, tmp_path):
    checkpoint, mesh = random_checkpoint(letters), mesh_of(num_devices)
    head = {"discriminator/kernel": np.zeros((16, 1), np.float32)}
    gate = {"encoder/layers/mlp_gate/kernel": np.zeros((2, 16, 32), np.float32)}
    for name, kind, extra in (("head", {"kind": "discriminator"}, head), ("gate", checkpoint.model_description, gate)):
        folder = epath.Path(tmp_path / name)
        folder.mkdir()
        write_workdir(random_checkpoint(letters), tmp_path / name)
        (folder / "checkpoints").rmtree()
        save_params(folder, checkpoint.params | extra, kind, checkpoint.config.architecture)
    loaded = load_model(tmp_path / "head", mesh)
    assert isinstance(loaded.model, EncoderModel) and "discriminator" in loaded.nested_params
    with pytest.raises(UsageError, match="unknown parameter .*encoder/layers/mlp_gate/kernel"):
        load_model(tmp_path / "gate", mesh)
