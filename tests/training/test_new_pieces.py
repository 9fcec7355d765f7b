"""Tests of training with vocabulary pieces that the initial checkpoint lacks."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from helpers.checkpoints import random_checkpoint
from helpers.command_runs import EXPERIMENTS, overrides, refused
from helpers.small_run import load_final_params

from bertjax.cli import main as cli
from bertjax.convert import huggingface
from bertjax.data.corpus.prepare import prepare
from bertjax.data.corpus.store import open_corpus
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import load_vocabulary
from bertjax.data.corpus.vocabulary_extension import extend_vocabulary
from bertjax.data.corpus.vocabulary_training import byte_level_bpe
from bertjax.training.new_pieces import find_new_pieces

pytestmark = pytest.mark.ci

# Two words, a continuation piece, and a character that no old piece contains.
ADDED = ("losuna", "kerona", "##rovi", "ж")


@pytest.fixture(scope="module")
def vocabularies(corpus, tmp_path_factory) -> tuple[Path, Path]:
    """Returns the vocabulary file of the corpus, and a copy with the pieces of `ADDED`."""
    old = open_corpus(corpus).vocabulary().path
    new = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    new.write_text(old.read_text() + "".join(f"{piece}\n" for piece in ADDED))
    return old, new


@pytest.fixture(scope="module")
def domain(vocabularies, tmp_path_factory) -> Path:
    """Returns a corpus with the extended vocabulary, whose text contains the new pieces."""
    folder = tmp_path_factory.mktemp("domain")
    documents = [f"losuna mite kerona\n{'misurovi ' * (count % 7)}ж lona\nbavi losuna" for count in range(60)]
    (folder / "text.txt").write_text("\n\n".join(documents))
    prepare([f"text:{folder}/text.txt"], folder / "corpus", vocabulary=vocabularies[1], heldout_fraction=0.2, workers=1)
    return folder / "corpus"


def released(vocabulary: Path, folder: Path, without: tuple[str, ...] = (), **fields) -> dict[str, np.ndarray]:
    """Writes a random Hugging Face checkpoint and returns its parameters."""
    checkpoint = random_checkpoint(vocabulary, **fields)
    for name in [name for name in checkpoint.params if name.startswith(without)]:
        del checkpoint.params[name]
    params = {name: array.copy() for name, array in checkpoint.params.items()}
    folder.mkdir()
    huggingface.write(checkpoint, folder)
    return params


def command(corpus: Path, init_from: Path, run: Path, **fields) -> list[str]:
    """Returns the arguments of `bertjax train` with a learning rate too small to change parameters."""
    values = {"steps": 1, "optimizer__warmup_steps": 1, "optimizer__learning_rate": 1e-30, **fields}
    config = f"--config={EXPERIMENTS}/adapt.py:corpus={corpus},seq_len=16,quick=true"
    return ["train", config, f"--init_from={init_from}", f"--workdir={run}", *overrides(None, **values)]


def test_new_pieces_are_split_into_pieces_of_the_old_vocabulary(vocabularies):
    old, new = (load_vocabulary(path) for path in vocabularies)
    pieces = find_new_pieces(old, new)
    assert pieces.first_id == old.size and len(pieces.parts) == len(ADDED)
    for piece, parts in zip(ADDED, pieces.parts, strict=True):
        if not piece.startswith("##"):
            assert list(parts) == Tokenizer(old).encode(piece)
    assert pieces.parts[-1] == (old.unk_id,)
    texts = [old.pieces[part] for part in pieces.parts[2]]
    assert all(text.startswith("##") for text in texts)
    assert "".join(text.removeprefix("##") for text in texts) == "rovi"


def test_only_pieces_appended_to_the_old_vocabulary_are_new(vocabularies, tmp_path):
    old, new = (load_vocabulary(path) for path in vocabularies)
    (tmp_path / "vocab.txt").write_text("\n".join([*old.pieces[:-2], old.pieces[-1], old.pieces[-2], "new"]))
    assert find_new_pieces(old, load_vocabulary(tmp_path / "vocab.txt")) is None
    assert find_new_pieces(old, old) is None
    assert find_new_pieces(new, old) is None
    assert find_new_pieces(old, load_vocabulary(vocabularies[1], lower_case=not old.lower_case)) is None


def test_pieces_of_a_tokenizer_json_are_split_by_its_model_and_added_tokens_as_text():
    base = byte_level_bpe(["the lake is blue", "a lake"] * 9, 270, False)
    old = load_vocabulary("tokenizer.json", content=base)
    extended = extend_vocabulary(old, ["the kinase of a kinase"] * 3, 20)[0].content
    engine = tokenizers.Tokenizer.from_str(extended.decode())
    engine.add_tokens(["blau größe"])
    pieces = find_new_pieces(old, load_vocabulary("tokenizer.json", content=engine.to_str().encode()))
    parts = ["".join(old.pieces[part] for part in ids) for ids in pieces.parts]
    assert "Ġkinase" in parts and parts[-1] == "".join(Tokenizer(old).pieces(Tokenizer(old).encode("blau größe")))
    # A different normalizer or other merges also change the tokens of text without new pieces.
    others = json.loads(extended), json.loads(extended)
    others[0]["normalizer"] = None
    others[1]["model"]["merges"].reverse()
    for data in others:
        changed = load_vocabulary("tokenizer.json", content=json.dumps(data).encode())
        assert changed.pieces[: old.size] == old.pieces and find_new_pieces(old, changed) is None


def assert_new_rows_are_means(vocabularies, before, after):
    old, new = (load_vocabulary(path) for path in vocabularies)
    np.testing.assert_allclose(after[: old.size], before[: old.size], atol=1e-6)
    means = [before[list(parts)].mean(axis=0) for parts in find_new_pieces(old, new).parts]
    np.testing.assert_allclose(after[old.size : new.size], means, atol=1e-6)
    np.testing.assert_array_equal(after[new.size :], 0)


def test_embeddings_of_new_pieces_start_as_means_of_old_embeddings(vocabularies, domain, tmp_path):
    # 8 makes the new embedding table larger than the old one. With 128, the default, both have the same shape.
    before = released(vocabularies[0], tmp_path / "released", pad_vocab_to_multiple_of=8)
    cli.main(command(domain, tmp_path / "released", tmp_path / "run"))
    after = load_final_params(tmp_path / "run")
    for name in before:
        if name in ("encoder/embeddings/token", "masked_lm/bias"):
            assert_new_rows_are_means(vocabularies, before[name], after[name])
        else:
            np.testing.assert_allclose(after[name], before[name], atol=1e-6, err_msg=name)


def test_missing_masked_lm_head_is_initialized_randomly(vocabularies, domain, tmp_path, log_lines):
    before = released(vocabularies[0], tmp_path / "released", ("masked_lm", "next_sentence"))
    cli.main(command(domain, tmp_path / "released", tmp_path / "run", steps=2))
    assert any("initialized randomly: masked_lm/bias" in line for line in log_lines)
    assert any("initialized 4 new vocabulary pieces" in line for line in log_lines)
    after = load_final_params(tmp_path / "run")
    assert "masked_lm/bias" in after
    assert_new_rows_are_means(vocabularies, *(params["encoder/embeddings/token"] for params in (before, after)))


def test_only_pretraining_accepts_a_checkpoint_without_the_new_pieces(vocabularies, domain, tmp_path, capfd):
    released(vocabularies[0], tmp_path / "released")
    adapt = f"--config={EXPERIMENTS}/adapt.py:corpus={domain},seq_len=16,quick=true"
    error = refused(capfd, "evaluate", f"--checkpoint={tmp_path}/released", adapt)
    assert "differs from the data's vocabulary" in error
    table = tmp_path / "table.tsv"
    table.write_text("text\tlabel\nlosuna\ta\nkerona\tb\n")
    config = f"--config={EXPERIMENTS}/text.py:train={table},dev={table},quick=true"
    start = [f"--init_from={tmp_path}/released", f"--workdir={tmp_path}/run"]
    error = refused(capfd, "train", config, *start, *overrides(vocabularies[1]))
    assert "differs from the data's vocabulary" in error and error.endswith("omit config.data.vocabulary")
