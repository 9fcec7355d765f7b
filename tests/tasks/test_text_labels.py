"""Labels of user data: spellings, order, and the outputs of a checkpoint."""

import json
import re

import numpy as np
import pytest
from helpers.checkpoints import edit_json
from helpers.command_runs import EXPERIMENTS, evaluate, load_task, overrides, refused
from helpers.small_run import load_final_params

from bertjax.cli import main as cli
from bertjax.convert.convert import convert
from bertjax.errors import UsageError
from bertjax.tasks.finetuning.output_layer import CLASSES, MULTILABEL, TAGS, OutputLayer, saved_labels
from bertjax.training import compatibility


@pytest.mark.parametrize(
    ("tag", "warns"), [("b-x", True), ("B_X", True), ("PER-B", True), ("3", True), ("NOUN", False), ("B-X", False)]
)
def test_unscored_tags_that_may_mark_entities_log_a_warning(tag, warns, letters, tmp_path, log_lines):
    outside = "0" if tag == "3" else "O"
    (tmp_path / "train.tsv").write_text("text\tlabel\n" + f"zu ba\t{tag} {outside}\n" * 4)
    load_task(f"text.py:train={tmp_path}/train.tsv,kind=tags", letters, data__eval_split="none")
    warnings = [line for line in log_lines if "entities of" in line and "are not scored" in line]
    example = "0" if tag == "3" else tag
    assert bool(warnings) == warns and all(f"such as '{example}';" in line for line in warnings)


@pytest.mark.parametrize(
    ("outputs", "labels", "order"),
    [
        (("GOOD", "bad"), ("bad", "good"), [1, 0]),
        (("b", "B"), ("B", "b"), [1, 0]),
        (("LABEL_0", "LABEL_1"), ("0", "1"), []),
        # Spans have no labels.
        ((), (), []),
        # The outputs may be those of another task.
        (("LABEL_0", "LABEL_1"), ("bad", "good"), None),
        (("no", "yes"), ("no", "yes", "unknown"), None),
    ],
)
def test_outputs_have_the_names_of_the_labels_except_for_case(outputs, labels, order):
    assert compatibility._output_order(outputs, labels) == order


@pytest.fixture
def converted(topics, tmp_path):
    """Returns a conversion of `topics`, whose outputs are bad and good."""
    convert(str(topics), f"{tmp_path}/hf", "huggingface", overwrite=False)
    return tmp_path / "hf"


def test_training_keeps_the_outputs_of_a_checkpoint_in_the_order_of_the_labels(topics, converted, tmp_path):
    edit_json(converted / "config.json", id2label={"0": "GOOD", "1": "bad"})
    (tmp_path / "data.csv").write_text("text,topic\nzu lo,bad\nzu lo,good\n")
    config = f"--config={EXPERIMENTS}/text.py:train={tmp_path}/data.csv,label=topic,quick=true"
    fields = {"steps": 1, "data__batch_size": 2, "data__eval_split": "none", "optimizer__learning_rate": 0.0}
    cli.main(["train", config, *overrides(None, **fields), f"--init_from={converted}", f"--workdir={tmp_path}/run"])
    before, after = (load_final_params(path)["classifier/kernel"] for path in (topics, tmp_path / "run"))
    np.testing.assert_array_equal(after, before[:, [1, 0]])


@pytest.mark.ci
def test_evaluation_matches_outputs_to_labels_by_name_or_numbers_by_position(topics, converted, tmp_path, capfd):
    data, labels_file = tmp_path / "data.csv", tmp_path / "labels.json"
    experiment = f"--config={EXPERIMENTS}/text.py:dev={data},label=topic,quick=true"
    from_file = [experiment, f"--config.data.labels={labels_file}"]
    from_training_data = [experiment.replace(":", f":train={data},")]

    def command(outputs, labels, flags):
        edit_json(converted / "config.json", id2label=dict(enumerate(outputs)))
        edit_json(labels_file, labels=labels)
        data.write_text("text,topic\nzu lo,{1}\npa ke,{0}\nzu,{0}\n".format(*labels))
        return ["evaluate", f"--checkpoint={converted}", *flags, *overrides(None)]

    generic, numbers, names = ("LABEL_0", "LABEL_1"), ("0", "1"), ("bad", "good")
    command(generic, names, from_file)
    expected = evaluate(capfd, topics, f"--config.data.dev_file={data}")
    position, warning = "by position", "by position; check that outputs and labels agree"
    for outputs, labels, flags, log in (
        (generic, names, from_training_data, position),
        (("no", "yes"), numbers, from_file, warning),
        # Without a training file, generic names stand for numbers.
        (generic, numbers, [experiment], ""),
        (("BAD", "GOOD"), names, from_file, ""),
    ):
        cli.main(command(outputs, labels, flags))
        output = capfd.readouterr()
        assert json.loads(output.out) == pytest.approx(expected)
        assert [text in output.err for text in (position, warning)] == [text in log for text in (position, warning)]
    # The other order of the names exchanges the two classes.
    cli.main(command(names[::-1], names, from_file))
    assert json.loads(capfd.readouterr().out)["accuracy"] == pytest.approx(1 - expected["accuracy"])
    assert "trained with labels no, yes, but" in refused(capfd, *command(("no", "yes"), names, from_file))
    assert "which is not a label; use one of LABEL_0" in refused(capfd, *command(generic, names, [experiment]))


@pytest.mark.parametrize(
    "kind, rows, labels",
    [
        ("classes", ["1", "0", "1.0", "0.0", "NaN", ""], ["0", "1"]),
        ("classes", ["True", "false", "true", "FALSE"], ["false", "true"]),
        ("multilabel", ["['a']", '["a", "b"]', "a", "('b',)", "None"], ["a", "b"]),
        # Numbers are sorted by value, so that they match LABEL_0, LABEL_1 and so on of a checkpoint by position.
        ("classes", [str(number) for number in range(-2, 12)], [str(number) for number in range(-2, 12)]),
        ("classes", ["10", "9.5", "b"], ["10", "9.5", "b"]),
        ("tags", ["2 10", "9 9"], ["2", "9", "10"]),
    ],
)
def test_labels_of_the_training_file_have_one_spelling(kind, rows, labels, letters, tmp_path):
    cells = [row.replace('"', '""') for row in rows]
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f'"[""zu"", ""ba""]","{cell}"\n' for cell in cells))
    task = load_task(f"text.py:train={tmp_path}/train.csv,dev={tmp_path}/train.csv,kind={kind}", letters, train=False)
    assert task.labels == labels


@pytest.mark.parametrize("label", ['"a, b"', "b'a'"])
def test_label_in_quotes_is_rejected(label, letters, tmp_path):
    (tmp_path / "train.tsv").write_text(f"text\tlabel\nzu\ta\npa\t{label}\n")
    with pytest.raises(UsageError, match="train.tsv line 3: label is .*in quotes"):
        load_task(f"text.py:train={tmp_path}/train.tsv", letters, data__eval_split="none")


@pytest.mark.parametrize(
    "kind, rows, labels",
    [
        ("classes", "zu,1\npa,2\nba,3\nke,4\n", "4 of 4 labels .* such as '1', '2', '3'"),
        ("classes", "zu,pos\n" * 4 + "pa,ba ke zu ba ke zu ba ke zu\n", "such as 'ba ke zu"),
        ("classes", "zu,pos\npa,neg\n" * 2, None),
        ("multilabel", "zu,pos\npa,pos;neg\n", "no row of .* has several labels; if .* character other than"),
        ("multilabel", 'zu,pos\npa,"pos,neg"\n', None),
        ("classes", "zu,-1\npa,0\nba,1\nke,2\n" * 2, "the classes are -1 to 2; -1 may mark missing labels"),
        ("classes", "zu,-1\npa,0\nba,1\n" * 2, None),
        ("classes", "zu,yes\npa,no\nba,-\n" * 2, "a class is named '-', which marks missing labels"),
        ("classes", "zu,+\npa,-\n" * 2, None),
        ("classes", "zu,0.5\npa,1\nba,2.5\n" * 2, "the classes are numbers with decimals; .* set kind=number"),
        ("classes", "zu,v1.5\npa,1\nba,2\n" * 2, None),
        ("classes", "zu,Yes\npa,no\nba,yes\u200b\n" * 2, "differ only in their spelling .*: 'Yes', 'yes.u200b'"),
        ("multilabel", 'zu,a; y\npa,b; y\nba,"x; z, w"\n', "labels of .* contain ';'; if .* character other than"),
    ],
)
def test_labels_that_do_not_fit_the_kind_cause_a_warning(kind, rows, labels, letters, tmp_path, log_lines):
    (tmp_path / "train.csv").write_text("text,label\n" + rows)
    load_task(f"text.py:train={tmp_path}/train.csv,kind={kind}", letters, data__eval_split="none")
    warnings = [
        line
        for line in log_lines
        if re.search("may be texts|if labels are|may mark|marks missing|decimals|spelling", line)
    ]
    assert len(warnings) == bool(labels) and (not labels or re.search(labels, warnings[0]))


@pytest.mark.parametrize(("text", "warns"), [("zu", False), ("\u6cb3 zu", True)])
def test_vocabulary_that_does_not_fit_the_texts_is_noted(text, warns, letters, tmp_path):
    (tmp_path / "train.csv").write_text(f"text,label\n{text},a\n{text},b\n")
    task = load_task(f"text.py:train={tmp_path}/train.csv", letters, data__eval_split="none")
    assert any("of the tokens are [UNK]; check that" in note for note in task.notes) == warns


@pytest.mark.parametrize("kind", ["classes", "multilabel", "tags"])
def test_labels_from_a_file_keep_their_order(kind, letters, tmp_path):
    (tmp_path / "train.csv").write_text("text,label\nzu,y\npa,x\n")
    (tmp_path / "labels.json").write_text('{"labels": ["z", "y", "x"]}')
    experiment = f"text.py:train={tmp_path}/train.csv,dev={tmp_path}/train.csv,kind={kind}"
    task = load_task(experiment, letters, data__labels=tmp_path / "labels.json")
    assert json.loads(task.workdir_files["output_layer.json"])["labels"] == ["z", "y", "x"]


def test_saved_labels_of_another_output_kind_are_rejected(tmp_path):
    file = tmp_path / "output_layer.json"
    file.write_bytes(OutputLayer(TAGS, ("O", "B-PER"), "ner").as_json())
    assert saved_labels(str(file), TAGS) == ["O", "B-PER"]
    with pytest.raises(UsageError, match="is for tags, but the task is for classes"):
        saved_labels(str(file), CLASSES, MULTILABEL)
    file.write_text('{"labels": ["neg", "pos"]}')
    assert saved_labels(str(file), CLASSES, MULTILABEL) == ["neg", "pos"]
    for content, message in (
        ('{"labels": ["neg", "pos", "neg"]}', "a label more than once"),
        ('{"labels": "neg"}', "cannot read the output layer"),
        ('{"labels": ["neg", "pos"], "id2label": {}}', "unknown fields: id2label"),
        ("{}", "no labels"),
    ):
        file.write_text(content)
        with pytest.raises(UsageError, match=message):
            saved_labels(str(file), CLASSES)
