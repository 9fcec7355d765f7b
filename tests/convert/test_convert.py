"""Checkpoints keep every bit and setting through every format."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import tensorflow as tf
from checkpoints import WIDTH, assert_equal, google_checkpoint, portable, without

from bertjax.cli import main as cli
from bertjax.convert import huggingface, workdir
from bertjax.convert.convert import FORMATS, HUGGINGFACE, TENSORFLOW, as_bertjax, convert, detect, read
from bertjax.errors import UsageError
from bertjax.tasks.finetuning.output_layer import CLASSES, MULTILABEL, SPANS, TAGS
from bertjax.utils.io import temporary_name


@pytest.mark.parametrize("slots", [False, True])
def test_a_release_of_google_comes_in_and_goes_out_under_the_same_names(slots, letters, tmp_path, log_lines):
    values = google_checkpoint(letters, tmp_path / "google", slots=slots)
    convert(str(tmp_path / "google"), str(tmp_path / "ours"), "bertjax", False)
    assert any("Adam's moments" in line for line in log_lines) == slots
    convert(str(tmp_path / "ours"), str(tmp_path / "back"), TENSORFLOW, False)
    reader = tf.train.load_checkpoint(str(tmp_path / "back" / "bert_model.ckpt"))
    wanted = {name: value for name, value in values.items() if "/adam_" not in name}
    assert reader.get_variable_to_shape_map() == {name: list(value.shape) for name, value in wanted.items()}
    for name, value in wanted.items():
        np.testing.assert_array_equal(reader.get_tensor(name), value)
    assert not list((tmp_path / "back").glob("*part*"))


def test_a_parameter_is_what_the_name_says(letters, tmp_path):
    values = google_checkpoint(letters, tmp_path / "google")
    params = read(tmp_path / "google").params
    query = values["bert/encoder/layer_1/attention/self/query/kernel"]  # [in, heads * head]
    np.testing.assert_array_equal(params["encoder/layers/attention/query/kernel"][1][:, 1, 3], query[:, 8 + 3])
    output = values["bert/encoder/layer_0/attention/output/dense/kernel"]
    np.testing.assert_array_equal(params["encoder/layers/attention/output/kernel"][0][1, 3], output[8 + 3])
    np.testing.assert_array_equal(params["next_sentence/dense/kernel"], values["cls/seq_relationship/output_weights"].T)
    norm = values["bert/encoder/layer_1/output/LayerNorm/gamma"]
    np.testing.assert_array_equal(params["encoder/layers/mlp_norm/scale"][1], norm)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "output, labels, fields",
    [
        (
            "",
            (),
            {
                "hidden_act": "gelu_erf",
                "layer_norm_eps": 1e-6,
                "type_vocab_size": 3,
                "attention_probs_dropout_prob": 0.2,
            },
        ),
        (CLASSES, ("yes", "no", "perhaps"), {}),
        (CLASSES, (), {"hidden_act": "relu"}),
        (MULTILABEL, ("new", "loud", "red"), {}),
        (MULTILABEL, ("loud",), {}),
        (SPANS, (), {}),
        (TAGS, ("O", "B-PER"), {}),
    ],
)
def test_every_bit_and_every_setting_survives_a_format(form, output, labels, fields, letters, tmp_path):
    given = portable(letters, output, labels, **fields)
    before = dict(given.params)
    writer = {"bertjax": "workdir", "tensorflow": "tensorflow1"}.get(form, form)
    module = __import__(f"bertjax.convert.{writer}", fromlist=["write"])
    if form == TENSORFLOW and output in (TAGS, MULTILABEL):
        with pytest.raises(UsageError, match=f"no output layer for {output}"):
            module.write(given, tmp_path)
        return
    module.write(given, tmp_path)
    back = read(tmp_path)
    assert detect(tmp_path) == form
    assert_equal(before, back.params)
    assert back.model == given.model and back.output == output
    if form == HUGGINGFACE and output == MULTILABEL:
        problem = json.loads((tmp_path / "config.json").read_text())["problem_type"]
        assert problem == "multi_label_classification"
    assert back.labels == labels
    assert (back.vocabulary.pieces, back.vocabulary.lower_case) == (given.vocabulary.pieces, True)


def test_google_s_gelu_is_the_tanh_form_and_hugging_face_s_the_exact_one(letters, tmp_path):
    google_checkpoint(letters, tmp_path / "google")
    assert read(tmp_path / "google").model.hidden_act == "gelu_tanh"
    for form in ("bertjax", HUGGINGFACE):
        convert(str(tmp_path / "google"), str(tmp_path / form), form, False)
    config = json.loads((tmp_path / HUGGINGFACE / "config.json").read_text())
    assert config["hidden_act"] == "gelu_new" and config["attention_probs_dropout_prob"] == 0.2
    config["hidden_act"] = "gelu"
    (tmp_path / HUGGINGFACE / "config.json").write_text(json.dumps(config))
    assert read(tmp_path / HUGGINGFACE).model.hidden_act == "gelu_erf"


@pytest.mark.parametrize("form", [HUGGINGFACE, TENSORFLOW])
def test_an_architecture_that_a_format_cannot_say_is_refused_and_ours_keeps_it(form, letters, tmp_path):
    (tmp_path / "ours").mkdir()
    workdir.write(portable(letters, attention_direction="left"), tmp_path / "ours")
    assert workdir.read(tmp_path / "ours").model.attention_direction == "left"
    with pytest.raises(UsageError, match=f"attention_direction left, which the format {form} has no place for"):
        convert(str(tmp_path / "ours"), str(tmp_path / "theirs"), form, False)
    assert not (tmp_path / "theirs").exists()


def test_a_checkpoint_without_heads_says_what_is_new(letters, tmp_path, log_lines):
    google_checkpoint(letters, tmp_path / "google", without("cls/"))
    convert(str(tmp_path / "google"), str(tmp_path / "ours"), "bertjax", False)
    assert "with pooler; new where they are needed: masked-LM head, next-sentence head" in log_lines[0]
    assert read(tmp_path / "ours").parts == {"encoder", "pooler"}


def test_a_destination_is_kept_unless_told_otherwise_and_nothing_is_left_of_a_failure(letters, tmp_path, capfd):
    google_checkpoint(letters, tmp_path / "google")
    command = ["convert", str(tmp_path / "google"), str(tmp_path / "ours")]
    cli.main(command)
    assert capfd.readouterr().out.strip() == str(tmp_path / "ours")
    for arguments, says in (
        (command, "already; give --overwrite"),
        ([*command[:2], str(tmp_path / "google" / "inside")], "lie in each other"),
        ([*command, "--format=onnx"], "known: bertjax, huggingface, tensorflow"),
        (["convert", "bert-base-uncased", str(tmp_path / "other")], "names of a hub are not downloaded"),
        (["convert", str(tmp_path), str(tmp_path.parent / "other")], "no checkpoint at"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 2 and says in capfd.readouterr().err
    # The workdir of a run is never replaced, nor a folder that only looks like something.
    for name in ("run/checkpoints", "folder"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "folder" / "some.index").write_text("")
    for name in ("run", "folder"):
        with pytest.raises(SystemExit):
            cli.main([*command[:2], str(tmp_path / name), "--overwrite"])
        assert "is no checkpoint to replace" in capfd.readouterr().err
        shutil.rmtree(tmp_path / name)
    cli.main([*command, "--overwrite", "--format=huggingface"])
    assert detect(tmp_path / "ours") == HUGGINGFACE
    for arguments, code, says in (
        (["convert", command[1], "/proc/ours"], 1, "cannot write the checkpoint /proc/ours"),
        (["features", f"--checkpoint={command[1]}", "a", "--output=/proc/a"], 1, "cannot make the folder /proc/a"),
        (["features", f"--checkpoint={command[1]}", "--input=/dev/null"], 2, "/dev/null is empty"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == code and says in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["google", "ours"]


def test_no_other_spelling_of_a_place_costs_a_checkpoint(letters, tmp_path, capfd):
    google_checkpoint(letters, tmp_path / "google")
    before = sorted(path.name for path in (tmp_path / "google").iterdir())
    (tmp_path / "link").symlink_to(tmp_path / "google")
    for source, destination in (
        ("google", "other/../google"),
        ("google", "link"),
        ("link", "google"),
        ("google", "link/inside"),
    ):
        with pytest.raises(UsageError, match="lie in each other"):
            convert(str(tmp_path / source), f"{tmp_path}/{destination}", "bertjax", True)
    assert sorted(path.name for path in (tmp_path / "google").iterdir()) == before
    # A link at the destination stays, and what it leads to is replaced.
    convert(str(tmp_path / "google"), str(tmp_path / "ours"), "bertjax", False)
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    for _ in range(2):
        convert(str(tmp_path / "google"), str(tmp_path / "link"), HUGGINGFACE, True)
    assert (tmp_path / "link").is_symlink() and detect(tmp_path / "ours") == HUGGINGFACE


@pytest.mark.parametrize("form", FORMATS)
def test_what_no_conversion_wrote_is_not_replaced(form, letters, tmp_path):
    google_checkpoint(letters, tmp_path / "google")
    convert(str(tmp_path / "google"), str(tmp_path / "ours"), form, False)
    convert(str(tmp_path / "google"), str(tmp_path / "ours"), form, True)
    (tmp_path / "ours" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="is no checkpoint to replace"):
        convert(str(tmp_path / "google"), str(tmp_path / "ours"), form, True)
    assert (tmp_path / "ours" / "thesis.tex").exists()


def test_a_kept_copy_is_of_the_source_as_it_is_now(letters, tmp_path, log_lines):
    google_checkpoint(letters, tmp_path / "google")
    source, kept = str(tmp_path / "google"), tmp_path / "init_from"
    for _ in range(2):
        with as_bertjax(source, kept) as path:
            assert path == str(kept)
        # Of a run that is killed when the copy is in its place already.
        (tmp_path / temporary_name("init_from")).mkdir()
    assert sum("wrote" in line for line in log_lines) == 1
    with as_bertjax(source, kept):
        assert sorted(child.name for child in tmp_path.iterdir()) == ["google", "init_from"]
    shutil.rmtree(source)
    google_checkpoint(letters, tmp_path / "google", lambda values: {k: v + 1 for k, v in values.items()})
    with as_bertjax(source, kept):
        pass
    assert sum("wrote" in line for line in log_lines) == 2
    assert_equal(read(kept).params, read(tmp_path / "google").params)
    shutil.rmtree(source)
    with as_bertjax(source, kept) as path:
        assert path == str(kept) and "is gone" in log_lines[-1]
    # A folder of that name that no conversion made is the user's.
    google_checkpoint(letters, tmp_path / "google")
    shutil.rmtree(kept)
    kept.mkdir()
    (kept / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is no checkpoint to replace"), as_bertjax(source, kept):
        pass
    assert (kept / "notes.txt").exists()


def test_parts_that_no_class_of_theirs_has_together_are_kept_and_told(letters, tmp_path):
    given = portable(letters, SPANS)
    before = given.params | {name: array for name, array in portable(letters).params.items() if "pooler" in name}
    said = huggingface.write(dataclasses.replace(given, params=dict(before)), tmp_path)
    assert said == ["BertForQuestionAnswering does not use pooler; written all the same"]
    assert_equal(read(tmp_path).params, before)
    encoder = {name: array for name, array in before.items() if name.startswith("encoder/")}
    bare = dataclasses.replace(given, params=dict(encoder), output="")
    assert huggingface.write(bare, tmp_path) == ["BertModel will make anew what the source lacks: pooler"]
    assert_equal(read(tmp_path).params, encoder)


def test_a_foreign_checkpoint_fills_gives_features_and_starts_a_run(letters, tmp_path, capfd):
    google_checkpoint(letters, tmp_path / "google")
    convert(str(tmp_path / "google"), str(tmp_path / "theirs"), HUGGINGFACE, False)
    shown = []
    for name in ("google", "theirs"):
        capfd.readouterr()
        cli.main(["fill_mask", f"--checkpoint={tmp_path / name}", "a [MASK]", "--top=3"])
        cli.main(["features", f"--checkpoint={tmp_path / name}", "a b ||| c", f"--output={tmp_path / name}.d"])
        shown.append(capfd.readouterr().out.replace(name, ""))
    assert shown[0] == shown[1] and shown[0].count("%") == 3
    found = np.load(tmp_path / "google.d" / "00000.npz")
    assert found["hidden_states"].shape == (6, 1, WIDTH)
    assert found["segment_ids"].tolist() == [0, 0, 0, 0, 1, 1]
    (tmp_path / "train.tsv").write_text("text\tlabel\na\tx\nb\ty\n")
    experiment = f"experiments/text.py:train={tmp_path}/train.tsv,dev={tmp_path}/train.tsv,quick=true"
    command = ["train", f"--config={experiment}", f"--workdir={tmp_path / 'run'}", f"--init_from={tmp_path / 'google'}"]
    command += ["--config.steps=1", "--config.mesh.data=1", "--config.mesh.fsdp=-1"]
    with pytest.raises(SystemExit):
        cli.main([*command, "--config.epochs=0", "--config.steps=0"])
    # Before anything was converted.
    assert "config.epochs is 0" in capfd.readouterr().err and not (tmp_path / "run").exists()
    cli.main(command)
    said = capfd.readouterr().err
    assert "restored from " in said and "encoder (" in said and "initialized randomly: classifier/" in said
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["hidden_size"] == WIDTH and config["model"]["attention_probs_dropout_prob"] == 0.1
    cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--format=huggingface"])
    # Back again it is known by its labels alone, which are those of the same file.
    capfd.readouterr()
    data = f"--config=experiments/text.py:train={tmp_path}/train.tsv,dev={tmp_path}/train.tsv,quick=true"
    for checkpoint in (tmp_path / "run", tmp_path / "out"):
        cli.main(["evaluate", f"--checkpoint={checkpoint}", data, "--config.mesh.data=1", "--config.mesh.fsdp=-1"])
    before, after = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert before == after
    # A folder with a name that none of ours may have.
    (tmp_path / "out").rename(tmp_path / "out[1]")
    cli.main(
        ["evaluate", f"--checkpoint={tmp_path / 'out[1]'}", *(data, "--config.mesh.data=1", "--config.mesh.fsdp=-1")]
    )
    said = capfd.readouterr()
    assert json.loads(said.out) == after and f"of checkpoint {tmp_path}/out[1]\n" in said.err
    (tmp_path / "out[1]").rename(tmp_path / "out")
    with pytest.raises(SystemExit):
        cli.main(["evaluate", f"--checkpoint={tmp_path / 'out'}"])
    assert "give --config" in capfd.readouterr().err
    out = json.loads((tmp_path / "out" / "config.json").read_text())
    assert out["architectures"] == ["BertForSequenceClassification"] and out["id2label"] == {"0": "x", "1": "y"}
