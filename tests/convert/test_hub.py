"""Checkpoints on the Hugging Face Hub: downloads, pinned commits and uploads, with a fake HTTP API."""

import dataclasses
import json
import os
import shutil

import huggingface_hub.constants
import numpy as np
import pytest
from helpers import hub_server
from helpers.checkpoints import random_checkpoint
from helpers.command_runs import overrides, refused
from helpers.commanding import printed

import bertjax
from bertjax.cli import main as cli
from bertjax.convert import huggingface
from bertjax.convert.model_card import model_card
from bertjax.errors import BertjaxError, UsageError
from bertjax.tasks.embedding.sentence_embedder import SentenceEmbedder
from bertjax.training.workdir import pinned_address
from bertjax.utils import hub

ADDRESS = "hf:org/bert"
POOLING_FILES = ("1_Pooling/config.json", "modules.json")


@pytest.fixture
def server(monkeypatch, tmp_path):
    with hub_server.serve(monkeypatch, tmp_path / "cache") as server:
        yield server


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_table(path):
    path.parent.mkdir(exist_ok=True)
    path.write_text("text\tlabel\n" + "zu ba\tgood\npa ke\tbad\n" * 8)
    return path


def train(workdir, table, *arguments):
    config = f"--config=text:train={table},dev={table},quick=true"
    flags = overrides(None, steps=2, eval_every=2, checkpoint_every=1)
    # The checkpoint determines the model.
    flags = [flag for flag in flags if not flag.startswith("--config.model.")]
    cli.main(["train", config, *flags, f"--workdir={workdir}", *arguments])


def test_checkpoint_and_tokenizer_load_from_a_hub_address(server, pretrained, tmp_path):
    files = files_of(pretrained)
    server.push("org/bert", {**files, "pytorch_model.bin": b"x" * 5000, "onnx/model.onnx": b"y"})
    by_name, local = bertjax.load(ADDRESS), bertjax.load(pretrained)
    np.testing.assert_array_equal(by_name.encode(["ab c"]).pooled, local.encode(["ab c"]).pooled)
    assert bertjax.load_tokenizer(ADDRESS).encode("ab c") == local.tokenizer.encode("ab c")
    assert not any("pytorch_model.bin" in request or "onnx" in request for request in server.requests)
    # Loading a tokenizer does not download weights.
    server.push("org/other", files)
    bertjax.load_tokenizer("hf:org/other")
    assert not any("/org/other/" in request and "safetensors" in request for request in server.requests)


@pytest.mark.ci
def test_run_from_a_hub_address_is_uploaded_and_resumed_with_its_original_commit(
    server, pretrained, letters, tmp_path, capsys
):
    table, run = write_table(tmp_path / "t.tsv"), tmp_path / "run"
    commit = server.push("org/bert", files_of(pretrained))
    train(run, table, f"--init_from={ADDRESS}")
    data = json.loads((run / "data.json").read_text())
    assert data["init_from"] == {"source": f"{ADDRESS}@{commit}", "address": ADDRESS}
    upload = ("convert", run, "hf:me/topic")
    assert printed(capsys, *upload).endswith("/me/topic\n")
    results = json.loads((run / "results.json").read_text())
    uploaded = hub.download("hf:me/topic", ["*"])
    card = (uploaded / "README.md").read_text()
    for text in (
        "pipeline_tag: text-classification",
        "base_model: org/bert",
        f"| accuracy | {results['accuracy']:.4f} | {results['baseline']['accuracy']:.4f} |",
        f"--init_from {ADDRESS}@{commit} ",
        str(table),
    ):
        assert text in card
    assert (uploaded / "bertjax_config.json").read_bytes() == (run / "config.json").read_bytes()
    assert bertjax.load("hf:me/topic").predict(["zu", "pa ke"])[1]["prediction"] in ("good", "bad")
    assert "hf:me/topic contains a model; use --overwrite" in refused(capsys, *upload)
    printed(capsys, *upload, "--overwrite")
    # The branch gets a new commit, and the server fails.
    (tmp_path / "new").mkdir()
    huggingface.write(random_checkpoint(letters, initializer_range=0.1), tmp_path / "new")
    assert server.push("org/bert", files_of(tmp_path / "new")) != commit
    server.requests.clear()
    server.status = 500
    shutil.rmtree(tmp_path / "cache")
    (run / "results.json").unlink()
    train(run, table, f"--init_from={ADDRESS}")
    assert not server.requests
    # Without a cached conversion, as in a workdir at gs://, the commit is read from data.json.
    assert pinned_address(ADDRESS, str(run)) == f"{ADDRESS}@{commit}"
    assert pinned_address("hf:org/other", str(run)) == "hf:org/other"
    assert pinned_address(ADDRESS, str(tmp_path / "none")) == ADDRESS


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_folder_with_other_files_is_rejected_before_the_download(server, pretrained, tmp_path, capfd, command):
    server.push("org/bert", files_of(pretrained))
    table = write_table(tmp_path / "own" / "t.tsv")
    options = [f"--config=text:train={table},dev={table},quick=true", f"--init_from={ADDRESS}"]
    error = refused(capfd, command, *options, f"--workdir={tmp_path / 'own'}")
    assert "own contains unrelated files: t.tsv; choose another --workdir" in error
    assert not server.requests and os.listdir(tmp_path / "own") == ["t.tsv"]


def test_files_that_do_not_match_their_hashes_are_removed(server):
    files = dict.fromkeys(("1_Pooling/config.json", "config.json", "model.safetensors"), b"{}" * 3000)
    server.push("org/bert", files)
    server.corrupt = True
    message = f"^files of {ADDRESS} do not match their hashes: {', '.join(files)}; run the same command again"
    with pytest.raises(BertjaxError, match=message):
        hub.download(ADDRESS, ["*"])
    server.corrupt = False
    folder = hub.download(ADDRESS, ["*"])
    assert all((folder / name).read_bytes() == content for name, content in files.items())


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (401, UsageError, "no access to hf:org/bert .status 401.; set HF_TOKEN"),
        (403, UsageError, "no access to hf:org/bert .status 403.; set HF_TOKEN"),
        (429, BertjaxError, "too many requests to the server of hf:org/bert; wait"),
        (500, BertjaxError, "cannot reach hf:org/bert: .*500.*; check the network, then repeat the command"),
    ],
)
def test_http_errors_become_one_line_errors_with_advice(status, error, message, server, monkeypatch):
    # Skip the waits of `huggingface_hub`, which retries requests to a busy server for minutes.
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.push("org/bert", {"config.json": b"{}"})
    server.status = status
    with pytest.raises(error, match=message) as raised:
        hub.download(ADDRESS, ["*"])
    assert type(raised.value) is error and "\n" not in str(raised.value)


def test_wrong_hub_address_is_rejected(server, pretrained):
    server.push("org/bert", files_of(pretrained))
    for address, message in (
        ("hf:org/none", "no repository hf:org/none; check the name, or set HF_TOKEN if the repository is private"),
        (f"{ADDRESS}@v9", "no revision 'v9' of hf:org/bert@v9"),
        ("hf:a/b/c", "invalid address hf:a/b/c; use hf:ORG/NAME"),
    ):
        with pytest.raises(UsageError, match=message):
            hub.download(address, ["*"])


def test_repository_without_safetensors_is_rejected(server, pretrained):
    server.push("org/pickle", {"config.json": (pretrained / "config.json").read_bytes(), "pytorch_model.bin": b"x"})
    with pytest.raises(UsageError, match="org/pickle contains no model.safetensors; .* org/pickle pickle, and copy"):
        bertjax.load("hf:org/pickle")


def test_offline_mode_uses_only_the_cache(server, pretrained, monkeypatch):
    server.push("org/bert", files_of(pretrained))
    bertjax.load(ADDRESS)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    bertjax.load(ADDRESS)
    with pytest.raises(UsageError, match="hf:org/new is not in the cache; unset HF_HUB_OFFLINE"):
        bertjax.load("hf:org/new")


def test_upload_replaces_the_pooling_of_an_older_model(server, pretrained, folder, capsys):
    pooling = b'{"pooling_mode_mean_tokens": true}'
    server.push("me/model", files_of(pretrained) | dict.fromkeys(POOLING_FILES, pooling))
    printed(capsys, "convert", pretrained, "hf:me/model", "--overwrite")
    assert not {*POOLING_FILES} & {*huggingface_hub.HfApi().list_repo_files("me/model")}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_bytes(pooling)
    for _ in range(2):
        printed(capsys, "convert", folder, "hf:me/model", "--overwrite")
        assert bertjax.load("hf:me/model").encode(["a"]).last_hidden_state is None


def test_model_card_of_a_converted_encoder_names_library_and_pipeline(pretrained):
    checkpoint = huggingface.read(pretrained)
    encoder = {name: array for name, array in checkpoint.params.items() if name.startswith("encoder/")}
    card = model_card("me/encoder", None, dataclasses.replace(checkpoint, params=encoder))
    assert "pipeline_tag: feature-extraction" in card and "BERT, 2 layers, hidden size 16, " in card
    assert "tokens, converted by bertjax." in card
    embedder = dataclasses.replace(checkpoint, params=encoder, embedder=SentenceEmbedder())
    card = model_card("me/embedder", None, embedder)
    assert "library_name: sentence-transformers" in card and "pipeline_tag: sentence-similarity" in card


def test_failed_upload_adds_no_commit(server, pretrained, tmp_path, capsys):
    server.push("org/bert", {"README.md": b"old"})
    server.token = "secret"
    assert "set HF_TOKEN" in refused(capsys, "convert", pretrained, "hf:org/bert")
    server.token = ""
    assert "no revision 'v2' of hf:org/bert@v2" in refused(capsys, "convert", pretrained, "hf:org/bert@v2")
    assert list(server.commits) == [("org/bert", server.branches["org/bert", "main"])]
