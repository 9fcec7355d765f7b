"""Tokenizers of other families give the ids of transformers, and their models are trained and written back."""

import json

import numpy as np
import pytest
from commanding import printed
from made_up_text import write_text

from bertjax.cli import main as cli
from bertjax.convert.huggingface_tokenizer import read_tokenizer
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary_training import byte_level_bpe
from bertjax.data.finetuning.examples import encode_pair

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


def roberta(lines, folder):
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    engine.train_from_iterator(lines, trainer)
    merges = [tuple(merge) for merge in json.loads(engine.to_str())["model"]["merges"]]
    transformers.RobertaTokenizer(vocab=engine.get_vocab(), merges=merges).save_pretrained(folder)


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


def eurobert(lines, folder):
    """Saves a tokenizer that names neither [CLS], [SEP] nor [UNK]."""
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    engine.train_from_iterator(lines, trainer)
    engine.add_special_tokens(["<bos>", "<eos>", "<|mask|>", "<|pad|>"])
    special = [(token, engine.token_to_id(token)) for token in ("<bos>", "<eos>")]
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> $B:1 <eos>:1", special_tokens=special
    )
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "mask_token": "<|mask|>", "pad_token": "<|pad|>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=engine, **names).save_pretrained(folder)


KINDS = {
    "roberta": roberta,
    "xlm-roberta": unigram("XLMRobertaTokenizer"),
    "camembert": unigram("CamembertTokenizer"),
    "modernbert": modernbert,
    "eurobert": eurobert,
}


@pytest.mark.parametrize("model_type", KINDS)
def test_ids_of_texts_and_pairs_equal_those_of_transformers(model_type, lines, tmp_path):
    KINDS[model_type](lines, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "type_vocab_size": 1}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    vocabulary, notes = read_tokenizer(tmp_path)
    tokenizer = Tokenizer(vocabulary)
    assert not notes
    for text in lines:
        assert tokenizer.encode_with_special(text) == theirs(text, add_special_tokens=False)["input_ids"], text
    for first, second in zip(lines[:-1:9], lines[1::9], strict=True):
        ids = map(tokenizer.encode_with_special, (first, second))
        assert encode_pair(*ids, 10_000, vocabulary)["input_ids"] == theirs(first, second)["input_ids"]
    for name in ("cls", "sep", "pad", "mask"):
        expected = getattr(theirs, f"{name}_token_id")
        if expected is not None:
            assert getattr(vocabulary, f"{name}_id") == expected
    # A word of a sentence that is split already follows a space.
    ids = [index for word in WORDS for index in tokenizer.encode_word(word)]
    assert ids == tokenizer.encode(f" {' '.join(WORDS)}")


def test_spans_of_pieces_are_those_of_the_words_without_spaces(lines, tmp_path):
    roberta(lines, tmp_path)
    tokenizer = Tokenizer(read_tokenizer(tmp_path)[0])
    text = "ba na  kero"
    _, spans = tokenizer.encode_with_offsets(text)
    assert "".join(text[start:end] for start, end in spans.tolist()) == "banakero"


def test_byte_level_bpe_is_deterministic_and_marks_special_tokens(lines):
    content = byte_level_bpe(lines, 400, lower_case=False)
    assert content == byte_level_bpe(lines, 400, lower_case=False)
    assert content != byte_level_bpe(lines, 400, lower_case=True)
    engine = tokenizers.Tokenizer.from_str(content.decode())
    assert engine.encode("a [MASK] b").tokens[:1] == ["[CLS]"] and engine.get_vocab_size() <= 400


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


def test_modernbert_is_adapted_fine_tuned_and_written_back(folder, tmp_path, capfd):
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
    inputs = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")("ba [MASK] ke", return_tensors="pt")
    capfd.readouterr()
    filled = printed(capfd, "fill_mask", f"--checkpoint={adapted}", "--top=1", "ba [MASK] ke")
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    position = int((inputs["input_ids"][0] == model.config.mask_token_id).nonzero()[0, 0])
    best = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported").convert_ids_to_tokens(
        int(logits[position].argmax())
    )
    assert best in filled
    (tmp_path / "train.tsv").write_text("text\tsecond\tlabel\n" + "ba na\tke ro\ta\nlo su\tmi vi\tb\n" * 4)
    table = f"text:train={tmp_path}/train.tsv,dev={tmp_path}/train.tsv"
    fields = {"steps": 2, "data__second_text": "second", "data__seq_len": 16, "data__batch_size": 8}
    # The architecture is that of the checkpoint.
    cli.main(
        [
            *("train", f"--config={table}", f"--init_from={adapted}", f"--workdir={tmp_path}/topic"),
            *(f"--config.{name.replace('__', '.')}={value}" for name, value in fields.items()),
        ]
    )
    cli.main(["convert", f"{tmp_path}/topic", f"{tmp_path}/classifier", "--format=huggingface"])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier").eval()
    pair = transformers.AutoTokenizer.from_pretrained(tmp_path / "classifier")("ba", "ke", return_tensors="pt")
    with torch.no_grad():
        expected = torch.softmax(model(**pair).logits[0], -1).numpy()
    (record,) = json.loads(f"[{printed(capfd, 'predict', f'--checkpoint={tmp_path}/topic', '--json', 'ba ||| ke')}]")
    np.testing.assert_allclose([record["probabilities"][name] for name in "ab"], expected, atol=1e-5)
