"""Tokenizers of other families return the token ids of transformers. Their models are trained and exported."""

import dataclasses
import json

import numpy as np
import pytest
from helpers.checkpoints import edit_json
from helpers.made_up_text import write_text
from helpers.tiny_config import tiny_config
from safetensors.numpy import load_file

import bertjax
from bertjax.cli import main as cli
from bertjax.convert.huggingface_tokenizer import read_tokenizer, write_tokenizer
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary_training import byte_level_bpe
from bertjax.data.finetuning.examples import encode_pair
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.tasks.build import build_task
from bertjax.training.checkpoint import find_checkpoint
from bertjax.training.checkpoint_config import experiment_config

REASON = "needs PyTorch and transformers: pip install -e '.[parity]', which `make test-all` does"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)
tokenizers = pytest.importorskip("tokenizers")

ODD_TEXTS = [
    *("", " ", "  two  spaces ", "Hello,world!", "tab\tand\nnewline", "naïve café", "日本語のテキスト", "ok 😀"),
    *("zero\u200bwidth", "İstanbul ẞ", "\x00null", "ﬁ ligature", "x" * 300, "1,000.5 %", "don't I'll"),
    *("a<mask>b", "a <mask> b", "<s>x</s>", "a [MASK] b", "[CLS][SEP]"),
]
WORDS = ["EU", "rejects", "German", "call"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> list[str]:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    write_text(file)
    return [line for line in file.read_text().splitlines() if line] + ODD_TEXTS


def byte_level(lines, special=()):
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    engine.train_from_iterator(lines, trainer)
    return engine


def roberta(lines, folder):
    engine = byte_level(lines, ("<s>", "<pad>", "</s>", "<unk>", "<mask>"))
    merges = [tuple(merge) for merge in json.loads(engine.to_str())["model"]["merges"]]
    transformers.RobertaTokenizer(vocab=engine.get_vocab(), merges=merges).save_pretrained(folder)


def old_roberta(lines, folder):
    """Saves a tokenizer as old versions of transformers do."""
    roberta(lines, folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{' '.join(merge)}\n" for merge in model["merges"]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def unigram(class_name):
    def save(lines, folder):
        engine = tokenizers.Tokenizer(tokenizers.models.Unigram())
        engine.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        trainer = tokenizers.trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
        )
        engine.train_from_iterator(lines, trainer)
        vocab = [*map(tuple, json.loads(engine.to_str())["model"]["vocab"]), ("<mask>", 0.0)]
        getattr(transformers, class_name)(vocab=vocab).save_pretrained(folder)

    return save


def modernbert(lines, folder):
    engine = tokenizers.Tokenizer.from_str(byte_level_bpe(lines, 400, lower_case=False).decode())
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=engine, **names).save_pretrained(folder)


def eurobert(lines, folder, single="<bos> $A <eos>", pair="<bos> $A <eos> $B:1 <eos>:1"):
    """Saves a tokenizer that sets none of cls_token, sep_token and unk_token."""
    engine = byte_level(lines)
    engine.add_special_tokens(["<bos>", "<eos>", "<|mask|>", "<|pad|>"])
    special = [(token, engine.token_to_id(token)) for token in ("<bos>", "<eos>")]
    engine.post_processor = tokenizers.processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "mask_token": "<|mask|>", "pad_token": "<|pad|>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=engine, **names).save_pretrained(folder)


def mmbert(lines, folder):
    """Saves Gemma's tokenizer, whose class transformers ignores for ModernBERT."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    engine.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Split("\u2581", "merged_with_next")
    special += [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    engine.train_from_iterator([line for line in lines if line.isascii()], trainer)
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> $B <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "mask_token": "<mask>", "pad_token": "<pad>"}
    names |= {"unk_token": "<unk>", "cls_token": "<bos>", "sep_token": "<eos>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=engine, **names).save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="GemmaTokenizerFast", add_bos_token=False)


KINDS = {
    "roberta": roberta,
    "old_roberta": old_roberta,
    "xlm-roberta": unigram("XLMRobertaTokenizer"),
    "camembert": unigram("CamembertTokenizer"),
    "modernbert": modernbert,
    "eurobert": eurobert,
    "mmbert": mmbert,
}


def save_tokenizer(kind, lines, folder):
    """Saves a tokenizer and a config. Returns the model type."""
    KINDS[kind](lines, folder)
    model_type = {"mmbert": "modernbert", "old_roberta": "roberta"}.get(kind, kind)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "type_vocab_size": 1}))
    return model_type


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_texts_and_pairs_equal_those_of_transformers(kind, lines, tmp_path):
    save_tokenizer(kind, lines, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    vocabulary, _, notes = read_tokenizer(tmp_path)
    tokenizer = Tokenizer(vocabulary)
    assert not notes
    for text in lines:
        assert tokenizer.encode_with_special(text) == theirs(text, add_special_tokens=False)["input_ids"], text
    for first, second in zip(lines[:-1:9], lines[1::9], strict=True):
        ids = map(tokenizer.encode_with_special, (first, second))
        assert encode_pair(*ids, 10_000, vocabulary)["input_ids"] == theirs(first, second)["input_ids"]
    for name in ("cls", "sep", "pad", "mask"):
        assert getattr(theirs, f"{name}_token_id") in (None, getattr(vocabulary, f"{name}_id"))
    # Words that are already split are encoded as if each of them followed a space.
    ids = [index for word in WORDS for index in tokenizer.encode_word(word)]
    assert ids == tokenizer.encode(f" {' '.join(WORDS)}")


def test_normalizer_that_prepends_the_word_marker_needs_no_other_prefix(lines, tmp_path):
    save_tokenizer("mmbert", lines, tmp_path)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    normalizers = [{"type": "Prepend", "prepend": "\u2581"}, replace]
    fields = {"normalizer": {"type": "Sequence", "normalizers": normalizers}, "pre_tokenizer": None}
    edit_json(tmp_path / "tokenizer.json", **fields)
    tokenizer = Tokenizer(read_tokenizer(tmp_path)[0])
    ids = [index for word in WORDS for index in tokenizer.encode_word(word)]
    assert not tokenizer.missing_prefix and ids == tokenizer.encode(" ".join(WORDS))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ids == theirs(WORDS, is_split_into_words=True, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_exported_tokenizer_encodes_split_words_as_in_training(kind, lines, tmp_path):
    model_type = save_tokenizer(kind, lines, tmp_path)
    original = transformers.AutoTokenizer.from_pretrained(tmp_path)
    vocabulary, *_ = read_tokenizer(tmp_path)
    words = [*WORDS, "1,000.5", "ok😀", "日本", "don't", "a[MASK]b", "[CLS]", "<mask>", "x<s>y"]
    expected = [Tokenizer(vocabulary).encode_word(word) for word in WORDS]
    vocabulary = dataclasses.replace(vocabulary, prefix=Tokenizer(vocabulary).missing_prefix)
    tokenizer, exported = Tokenizer(vocabulary), tmp_path / "exported"
    assert not tokenizer.missing_prefix and expected == [tokenizer.encode_word(word) for word in WORDS]
    exported.mkdir()
    write_tokenizer(vocabulary, tiny_config(vocabulary.size, model_type=model_type), exported)
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    ids = [index for word in words for index in tokenizer.encode_word(word)]
    assert theirs(words, is_split_into_words=True)["input_ids"] == [vocabulary.cls_id, *ids, vocabulary.sep_id]
    for name in "bos", "eos":
        assert getattr(original, f"{name}_token_id") in (None, getattr(theirs, f"{name}_token_id"))
    reread = read_tokenizer(exported)[0]
    assert Tokenizer(reread).encode("ba na") == tokenizer.encode("ba na")


@pytest.mark.parametrize(
    ("single", "pair", "has_pairs"),
    [
        ("<bos> $A", "<bos> $A <eos> $B", True),
        ("<bos> $A", "<bos> $A $B", False),
        ("<bos> $A <eos>", "<bos> $A <eos> <eos> $B <eos>", True),
        ("<bos> $A <eos>", "<bos> $B <eos> $A <eos>", False),
    ],
)
def test_rows_follow_the_template_of_the_post_processor(single, pair, has_pairs, lines, tmp_path):
    eurobert(lines, tmp_path, single, pair)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "eurobert"}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    vocabulary, _, notes = read_tokenizer(tmp_path)
    assert bool(notes) != has_pairs
    first, second = map(Tokenizer(vocabulary).encode, ("ba na", "ke"))
    assert encode_pair(first, None, 10_000, vocabulary)["input_ids"] == theirs("ba na")["input_ids"]
    limit = len(theirs("ba na")["input_ids"]) - 1
    truncated = theirs("ba na", truncation=True, max_length=limit)["input_ids"]
    assert encode_pair(first, None, limit, vocabulary)["input_ids"] == truncated
    if has_pairs:
        assert encode_pair(first, second, 10_000, vocabulary)["input_ids"] == theirs("ba na", "ke")["input_ids"]
    else:
        with pytest.raises(UsageError, match="pairs"):
            encode_pair(first, second, 10_000, vocabulary)


@pytest.mark.parametrize("names", [None, ["input_ids", "token_type_ids", "attention_mask"]])
def test_texts_of_a_pair_have_segment_0_in_a_roberta_with_two_segments(names, lines, tmp_path):
    """`RobertaConfig` has two segments by default. Its tokenizer returns none, or only segment 0."""
    folder, run, back = (tmp_path / name for name in ("roberta", "run", "back"))
    roberta(lines, folder)
    if names:
        edit_json(folder / "tokenizer_config.json", model_input_names=names)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    sizes = {"vocab_size": len(theirs), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.RobertaConfig(**sizes, intermediate_size=32, max_position_embeddings=66)
    reference = transformers.RobertaModel(config).eval()
    reference.save_pretrained(folder)
    with torch.inference_mode():
        expected = reference(**theirs("ba na", "ke", return_tensors="pt")).last_hidden_state.numpy()
    bertjax.load(folder).save(run)
    bertjax.load(run).save(back, format="huggingface")
    for path in (folder, run, back):
        bert = bertjax.load(path)
        batch = bert.batch([("ba na", "ke")])
        ids, segments, mask = (batch[name] for name in ("input_ids", "segment_ids", "input_mask"))
        hidden, _ = bertjax.Encoder(bert.config).apply({"params": bert.params["encoder"]}, ids, segments, mask)
        np.testing.assert_allclose(hidden[:, : expected.shape[1]], expected, atol=1e-5)
    name = "embeddings.token_type_embeddings.weight"
    np.testing.assert_array_equal(*(load_file(path / "model.safetensors")[name] for path in (folder, back)))


def test_segments_that_an_exported_tokenizer_lacks_are_noted(lines, tmp_path):
    roberta(lines, tmp_path / "roberta")
    vocabulary = read_tokenizer(tmp_path / "roberta")[0]
    for pair_segments in (True, False):
        notes = write_tokenizer(vocabulary, ModelConfig(pair_segments=pair_segments), tmp_path)
        assert bool(notes) == pair_segments and all("both texts of a pair have segment 0" in note for note in notes)


@pytest.mark.parametrize("class_name", ["XLMRobertaTokenizer", "CamembertTokenizer"])
def test_sentencepiece_tokenizers_follow_bos_eos_and_the_id_of_unknown_pieces(class_name, lines, tmp_path):
    unigram(class_name)(lines, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlm-roberta", "type_vocab_size": 1}))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    # Make the unknown token the first piece, and let two other pieces start and end the rows.
    vocab = content["model"]["vocab"]
    index = [piece for piece, _ in vocab].index("<unk>")
    vocab[0], vocab[index] = vocab[index], vocab[0]
    content["model"]["unk_id"] = 0
    ids = {piece: index for index, (piece, _) in enumerate(vocab)}
    content["added_tokens"] = [
        token | {"id": ids.get(token["content"], token["id"])} for token in content["added_tokens"]
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("added_tokens_decoder", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<pad>", "eos_token": "<mask>"}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    vocabulary, *_ = read_tokenizer(tmp_path)
    for text in ("ba na", "\u2603 ba \u2603"):
        expected = theirs(text)["input_ids"]
        assert encode_pair(Tokenizer(vocabulary).encode(text), None, 10_000, vocabulary)["input_ids"] == expected
    assert expected[0] == theirs.pad_token_id != theirs.cls_token_id


def test_byte_level_bpe_is_deterministic_and_may_be_uncased(lines):
    cased, again, uncased = (byte_level_bpe(lines, 400, lower_case) for lower_case in (False, False, True))
    assert cased == again
    assert "".join(tokenizers.Tokenizer.from_str(uncased.decode()).encode("BA").tokens) == "[CLS]ba[SEP]"


@pytest.fixture(scope="module")
def folder(lines, tmp_path_factory):
    """Returns a folder with a random ModernBERT and its tokenizer."""
    folder = tmp_path_factory.mktemp("modernbert")
    modernbert(lines, folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    special = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    config = transformers.ModernBertConfig(vocab_size=400, local_attention=8, **sizes, **special)
    torch.manual_seed(0)
    transformers.ModernBertForMaskedLM(config).save_pretrained(folder)
    return folder


def test_exported_tagging_model_has_the_token_ids_of_its_training(folder, tmp_path, capfd):
    sentences = [["ba", "na", "kero"], ["losu", "ba"]]
    rows = [json.dumps({"text": words, "label": ["O"] * len(words)}) for words in sentences]
    (tmp_path / "train.jsonl").write_text("".join(f"{row}\n" for row in rows))
    checkpoint, run = tmp_path / "checkpoint", tmp_path / "run"
    cli.main(["convert", str(folder), str(checkpoint)])
    experiment = f"text:kind=tags,train={tmp_path}/train.jsonl"
    flags = [f"--config.{field}" for field in ("steps=1", "data.seq_len=16", "data.batch_size=8")]
    cli.main(["train", f"--config={experiment}", f"--init_from={folder}", f"--workdir={run}", *flags])
    assert capfd.readouterr().err.count("adding a space before each word") == 1
    task = build_task(experiment_config(experiment, flags, find_checkpoint(checkpoint)), train=True)
    trained = task.train_examples
    ids = np.split(trained.tokens["input_ids"], trained.offsets[1:-1])
    cli.main(["convert", str(run), str(tmp_path / "exported"), "--format=huggingface"])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    for words, row in zip(sentences, ids, strict=True):
        assert theirs(words, is_split_into_words=True)["input_ids"] == row.tolist()
    # The tagger starts with the prediction head of the masked-LM model, as in transformers.
    heads = [
        transformers.ModernBertForTokenClassification.from_pretrained(path).head.dense.weight
        for path in (folder, tmp_path / "exported")
    ]
    torch.testing.assert_close(*heads, rtol=0, atol=1e-3)
    # A published model has the same tokenizer after conversion.
    cli.main(["convert", str(checkpoint), str(tmp_path / "back"), "--format=huggingface"])
    original, back = map(transformers.AutoTokenizer.from_pretrained, (folder, tmp_path / "back"))
    assert original(sentences[0], is_split_into_words=True)["input_ids"] != ids[0].tolist()
    for text in ("ba na", " ba"):
        assert original(text)["input_ids"] == back(text)["input_ids"]


def test_modernbert_is_adapted_and_written_back(folder, tmp_path):
    write_text(tmp_path / "text.txt")
    prepare = ["prepare", f"--input=text:{tmp_path}/text.txt", f"--vocab={folder}", f"--output={tmp_path}/corpus"]
    cli.main([*prepare, "--heldout=0.1", "--workers=1"])
    flags = ["--config.data.batch_size=8", "--config.data.eval_rows=8", "--config.model.dtype=float32"]
    experiment = f"--config=adapt:corpus={tmp_path}/corpus,steps=2,seq_len=24"
    adapted = tmp_path / "adapted"
    cli.main(["train", experiment, f"--init_from={folder}", f"--workdir={adapted}", *flags])
    assert np.isfinite(json.loads((adapted / "results.json").read_text())["mlm_loss"])
    cli.main(["convert", str(adapted), str(tmp_path / "exported"), "--format=huggingface"])
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "exported").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    inputs = tokenizer("ba [MASK] ke", return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    position = int((inputs["input_ids"][0] == model.config.mask_token_id).nonzero()[0, 0])
    best = tokenizer.decode(int(logits[position].argmax()))
    pieces = [piece for piece, _ in bertjax.load(adapted).fill_mask("ba [MASK] ke", top=60)[0]]
    assert pieces[0] == best and " ba" in pieces and "Ġba" not in pieces
