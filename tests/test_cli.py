"""The command line as a user meets it: exit codes, errors of one line, examples that work."""

import argparse
import json
import logging
import os
import re
import shlex
import shutil
import threading
from pathlib import Path

import jax.numpy as jnp
import pytest
from commanding import commands, ends, refused

from bertjax.cli import main as cli
from bertjax.cli.arguments import PATHS, parser
from bertjax.config.load import load_config
from bertjax.errors import UsageError
from bertjax.reproduce.runner import load_table
from bertjax.tasks.build import parse_config

ROOT = Path(__file__).parents[1]
EXPERIMENT = ROOT / "experiments" / "pretrain.py"
GLUE = ROOT / "experiments" / "glue.py"
TINY = f"{EXPERIMENT}:size=L1_H16,quick=true"

COMMANDS = list(commands(parser()))


@pytest.mark.parametrize("arguments", [(), ("nosuch",), ("bench",), ("bench", "steps")])
def test_a_missing_or_unknown_command_is_wrong_use_and_the_known_ones_are_shown(capfd, arguments):
    code, error = ends(capfd, *arguments)
    assert code == 2
    assert "Traceback" not in error
    if arguments and arguments[-1] in ("nosuch", "steps"):
        known = {words[len(arguments) - 1] for words in COMMANDS if words[: len(arguments) - 1] == arguments[:-1]}
        assert all(f"'{name}'" in error for name in known)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_unknown_flag_is_wrong_use(capfd, words, tmp_path):
    needed = {
        "prepare": ["--input", "docs:", "--output", tmp_path / "corpus"],
        "train": ["--config", TINY, "--workdir", tmp_path / "run"],
        "sweep": ["--config", TINY, "--workdir", tmp_path / "run"],
        "evaluate": ["--config", TINY, "--checkpoint", tmp_path],
        "predict": ["--config", f"{GLUE}:size=L1_H16", "--checkpoint", tmp_path, "--output", tmp_path / "run"],
        "reproduce": ["--config", "tables/table5", "--results", tmp_path],
        "table": ["5", "--results", tmp_path],
        "ensemble": ["--checkpoint", tmp_path, "--output", tmp_path / "run"],
        "submission": ["--predictions", tmp_path, "--output", tmp_path / "run"],
        "fill_mask": ["--checkpoint", tmp_path, "a [MASK]"],
        "features": ["--checkpoint", tmp_path, "a text"],
        "convert": [tmp_path, tmp_path / "run"],
    }
    (tmp_path / "params").mkdir()
    error = refused(capfd, *words, *needed.get(words[0], ["--config", TINY]), "--nosuch=1")
    assert "nosuch" in error
    assert not (tmp_path / "run").exists() and not (tmp_path / "corpus").exists()


def test_an_unknown_config_argument_is_refused_with_the_known_ones(capfd):
    error = refused(capfd, "describe", "--config", f"{EXPERIMENT}:sise=base")
    assert "'sise'" in error
    assert "known: size, seq_len, objective, corpus, phases, batch, quick" in error


def test_an_unknown_field_is_refused_with_the_known_ones(capfd):
    error = refused(capfd, "describe", "--config", TINY, "--config.optimizer.lr=1")
    assert "'optimizer.lr'" in error
    assert re.search(r"known: .*learning_rate.*warmup_steps", error)
    assert "known: " in refused(capfd, "describe", "--config", TINY, "--config.seed.deep=1")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--config", f"{EXPERIMENT}:seq_len=long"], "seq_len='long' is not of type int"),
        (["--config", f"{EXPERIMENT}:quick=maybe"], "quick='maybe' is not of type bool"),
        (["--config", f"{EXPERIMENT}:seq_len=0"], "seq_len is 0"),
        (["--config", f"{EXPERIMENT}:phases=2", "--config.long_phase.seq_len=0"], "config.long_phase.seq_len is 0"),
        (["--config", f"{EXPERIMENT}:phases=3"], "phases=3"),
        (["--config", f"{EXPERIMENT}:batch=rows"], "'rows'; known: tokens, sequences"),
        (["--config", TINY, "--config.steps=many"], "--config.steps=many"),
        (["--config", TINY, "--config.steps=0"], "config.steps is 0"),
        (["--config", f"{TINY},quick=false"], "config argument quick is given twice"),
        (["--config", TINY, "--config.steps=1e6"], "--config.steps=1e6: it must be a whole number"),
        (["--config", TINY, "--config.data.masking.whole_word=maybe"], "whole_word=maybe: it must be true or false"),
        (["--config", TINY, "--config.optimizer.eps=small"], "--config.optimizer.eps=small: it must be a number"),
        (["--config", TINY, "--config.model=3"], "--config.model is a section of fields; set one of them: attention"),
        (
            ["--config", TINY, "--config.mesh.data=0"],
            "mesh.data=0, mesh.fsdp=1, mesh.tensor=1, mesh.slices=-1: each must be at least 1",
        ),
        (["--config", TINY, "--config.data.objective=sop"], "config.data.objective is 'sop'; known: nsp, pairs, none"),
        (["--config", TINY, "--config.data.masking.rate=2.0"], "masking rate is 2.0"),
        (
            ["--config", TINY, "--config.model.hidden_dropout_prob=0.999999"],
            "hidden_dropout_prob is 0.999999; it must be in [0, 0.",
        ),
        (["--config", TINY, "--config.task=nosuch"], "'nosuch'"),
        (["--config", TINY, "stray"], "'stray'"),
        (["--config", "nosuch.py"], "no config file nosuch.py"),
        (["--config", TINY, "--flagfile=nosuch"], "unknown argument --flagfile=nosuch"),
        (["--config", TINY, "--flagfile"], "unknown argument --flagfile"),
        ([], "needs --config"),
    ],
)
def test_a_wrong_value_is_named_before_anything_is_done(capfd, arguments, named):
    assert named in refused(capfd, "describe", *arguments)


def test_an_unknown_flag_points_to_the_help_of_its_command(capfd):
    assert "see `bertjax bench step --help`" in refused(capfd, "bench", "step", "--config", TINY, "--nosuch")
    assert "see `bertjax describe --help`" in refused(capfd, "describe", "--config", TINY, "--nosuch")
    assert "--steps: '1.5' is no whole number" in refused(capfd, "bench", "step", "--config", TINY, "--steps", "1.5")
    assert "`bertjax bench step` needs --config" in refused(capfd, "bench", "step")


def integer_fields(node, prefix="") -> list[str]:
    """Names of all integers of a config."""
    found = []
    for name, value in node.items():
        if hasattr(value, "items"):
            found += integer_fields(value, f"{prefix}{name}.")
        elif type(value) is int:
            found.append(prefix + name)
    return found


@pytest.mark.parametrize("experiment", ["pretrain.py", "glue.py"])
def test_a_number_beyond_all_use_is_refused_in_every_field_before_a_workdir_is_made(capfd, tmp_path, experiment):
    arguments = "size=L1_H16" if experiment == "pretrain.py" else "task=rte,path=nowhere,size=L1_H16"
    config = f"{EXPERIMENT.parent / experiment}:{arguments}"
    fields = integer_fields(load_config(config, []))
    assert len(fields) > 20 and {"steps", "data.batch_size", "model.pad_vocab_to_multiple_of"} <= {*fields}
    for field in fields:
        error = refused(capfd, "train", "--config", config, f"--config.{field}={10**12}", "--workdir", tmp_path / "run")
        # What a value is at odds with may be told before.
        assert field in error or field.rpartition(".")[2] in error or "do not fit" in error, (field, error)
    assert not (tmp_path / "run").exists()


def path_options() -> list[tuple[list[str], str]]:
    """Each command with each of its options or arguments that name a file or a folder."""

    def walk(parser, words):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, sub in action.choices.items():
                    yield from walk(sub, [*words, name])
            elif (action.metavar or "").partition("[")[0] in PATHS:
                yield words, action.option_strings[0] if action.option_strings else action.dest

    return list(walk(parser(), []))


@pytest.mark.parametrize(("words", "name"), path_options())
def test_an_empty_path_is_refused_wherever_a_path_is_taken(capfd, words, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for empty in ("", " "):
        given = [empty, "x"] if name == "source" else ["x", empty] if name == "destination" else [f"{name}={empty}"]
        given = [name, empty, "x"] if name == "--compare" else given
        error = refused(capfd, *words, *given)
        assert "the path is empty" in error and (name in error or name in ("source", "destination"))
    assert not list(tmp_path.iterdir())


def test_all_options_that_look_like_paths_are_tried():
    tried = {(words[0], name) for words, name in path_options()}
    assert len(tried) >= 25
    assert {
        ("train", "--workdir"),
        ("evaluate", "--checkpoint"),
        ("prepare", "--vocab"),
        ("features", "--output"),
    } <= tried


def test_what_a_terminal_would_obey_is_shown_as_its_code(capfd, corpus, monkeypatch):
    """Pieces and labels of files that others made, and what errors and notes quote of them."""
    obeyed = "\x1b[31mred\x9b2J\u202e\r"
    monkeypatch.setattr("bertjax.inference.load.load_trained", lambda *_, **__: None)
    monkeypatch.setattr("bertjax.inference.fill_mask.fill_mask", lambda *_: [[(obeyed, 0.5)]])
    monkeypatch.setattr("bertjax.tasks.pretraining.format_example", lambda *_, **__: f"A: ä\t{obeyed}")
    cli.main(["fill_mask", "--checkpoint=x", "a [MASK]"])
    cli.main(["inspect", f"--config={TINY},corpus={corpus}", "--rows=1"])
    logging.getLogger("bertjax").info(f"labels {obeyed}")
    shown = capfd.readouterr()
    error = ends(capfd, "describe", "--config", f"{obeyed}.py")[1]
    for text in (shown.out, shown.err, error):
        assert r"\x1b[31mred\x9b2J" in text and not re.search("[\x1b\x9b\u202e\r]", text)
    assert "\nA: ä\t" in shown.out


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ("ConfigDict({'task': 'pretraining'})", "has no data or no model; begin with the defaults, see bertjax/exp"),
        (
            "ConfigDict(pretraining_config().to_dict() | {'task': 5})",
            "config.task is 5; known: glue, ner",
        ),
        (
            "ConfigDict(pretraining_config().to_dict() | {'data': 'x'})",
            "has no data or no model",
        ),
        ("ConfigDict(pretraining_config().to_dict() | {'steps': None})", "config.steps is None; .* a whole number"),
    ],
)
def test_a_config_that_is_none_of_ours_is_refused_with_the_field(capfd, tmp_path, returned, named):
    code = "from ml_collections import ConfigDict\nfrom bertjax.presets import pretraining_config\n"
    (tmp_path / "own.py").write_text(f"{code}def get_config(arguments=None):\n    return {returned}\n")
    assert re.search(named, refused(capfd, "describe", "--config", tmp_path / "own.py"))


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ("None", "yields None, which is no trial"),
        ("5", "yields 5, which is no trial"),
        ("['ab']", "yields 'ab', which is no trial"),
        ("[{5: 1}]", "yields {5: 1}, which is no trial"),
        ("[]", "yields no trials"),
        ("1 / 0", "cannot be run: ZeroDivisionError: division by zero"),
    ],
)
def test_a_sweep_that_gives_no_trials_is_refused(capfd, tmp_path, returned, named):
    code = f"import runpy\nget_config = runpy.run_path({str(EXPERIMENT)!r})['get_config']\n"
    (tmp_path / "own.py").write_text(f"{code}def sweep(arguments):\n    return {returned}\n")
    config = f"{tmp_path}/own.py:size=L1_H16,quick=true"
    assert named in refused(capfd, "sweep", "--config", config, "--workdir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_storage_that_cannot_be_reached_is_one_line(capfd, monkeypatch):
    class Lost(Exception):
        __module__ = "tensorflow.python.framework.errors_impl"

    def fails(_):
        raise Lost("Could not resolve host\nand more")

    command = ["evaluate", "--checkpoint", "gs://nosuch/run"]
    monkeypatch.setattr("etils.epath.gpath.PosixGPath.exists", fails)
    error = refused(capfd, *command, code=1)
    assert "cannot use gs://nosuch/run (Could not resolve host); check its name, the network" in error
    # Also of an argument that may be given several times.
    assert refused(capfd, "table", "5", "--results=runs", "--results=gs://nosuch/run", code=1) == error
    # The same while a command works on it.
    monkeypatch.setattr("etils.epath.gpath.PosixGPath.exists", lambda _: True)
    monkeypatch.setattr("bertjax.cli.commands.evaluate", fails)
    assert refused(capfd, *command, code=1) == error


@pytest.mark.parametrize("command", ["fill_mask", "features", "predict"])
def test_a_text_that_is_an_address_is_a_text(capfd, tmp_path, command):
    error = refused(capfd, command, "--checkpoint", tmp_path / "nosuch", "gs://nosuch/run")
    assert "cannot use" not in error and ("there is nothing at" in error or "no [MASK] in 'gs://nosuch/run'" in error)


def test_storage_that_does_not_answer_is_not_waited_for(capfd, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr("etils.epath.gpath.PosixGPath.exists", lambda _: answer.wait())
    monkeypatch.setattr("bertjax.utils.storage._WAIT_SECONDS", 0)
    error = refused(capfd, "fill_mask", "--checkpoint", "gs://nosuch/run", "a [MASK]", code=1)
    answer.set()
    assert "cannot use gs://nosuch/run (no answer" in error


def test_a_run_without_a_corpus_is_refused_and_leaves_no_workdir(capfd, tmp_path):
    assert "no corpus" in refused(capfd, "train", "--config", TINY, "--workdir", tmp_path / "run")
    missing = f"{TINY},corpus={tmp_path}/nothing"
    assert f"{tmp_path}/nothing" in refused(capfd, "train", "--config", missing, "--workdir", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert "no corpus" in refused(capfd, "inspect", "--config", TINY)
    assert "needs a corpus" in refused(capfd, "bench", "input", "--config", TINY)


@pytest.mark.parametrize("file", ["train.tokens.bin", "heldout.documents.bin", "manifest.json"])
def test_a_damaged_corpus_is_refused_with_the_file(capfd, corpus, tmp_path, file):
    shutil.copytree(corpus, tmp_path / "corpus")
    damaged = tmp_path / "corpus" / file
    damaged.write_bytes(damaged.read_bytes()[:-1] if file != "manifest.json" else b'{"format": 1')
    config = f"{TINY},corpus={tmp_path}/corpus"
    error = refused(capfd, "train", "--config", config, "--workdir", tmp_path / "run")
    assert file in error and "damaged" in error
    assert not (tmp_path / "run").exists()


def test_a_flipped_bit_of_a_corpus_is_a_failure_with_its_block(capfd, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "corpus")
    damaged = tmp_path / "corpus" / "train.tokens.bin"
    data = bytearray(damaged.read_bytes())
    data[77] ^= 4
    damaged.write_bytes(data)
    for command in (["train", "--workdir", tmp_path / "run"], ["inspect"], ["bench", "input"]):
        code, error = ends(capfd, *command, "--config", f"{TINY},corpus={tmp_path}/corpus")
        assert code == 1 and f"train.tokens.bin, block 0 (bytes 0 to {len(data) - 1:,}) does not match" in error
        assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_debug_shows_the_traceback(capfd):
    with pytest.raises(UsageError, match=r"no config file nosuch\.py"):
        cli.main(["describe", "--debug", "--config", "nosuch.py"])


def test_an_unexpected_error_is_one_line_and_tells_of_debug(capfd, monkeypatch):
    def broken(args):
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("bertjax.cli.commands.describe", broken)
    error = refused(capfd, "describe", code=1)
    assert "RuntimeError: first" in error and "--debug" in error
    with pytest.raises(RuntimeError):
        cli.main(["describe", "--debug"])


def test_ctrl_c_is_told_apart_from_a_failure(capfd, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("bertjax.cli.commands.describe", interrupted)
    assert refused(capfd, "describe", code=130) == "bertjax: interrupted\n"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_an_example_that_is_valid(capfd, monkeypatch, words):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--help"])
    assert end.value.code == 0
    example = re.search(r"^example:\n  (bertjax .+)$", capfd.readouterr().out, re.MULTILINE)
    assert example, "no example"
    program, *arguments = shlex.split(example[1])
    args, overrides = parser().parse_known_args(arguments)
    assert tuple(arguments[: len(words)]) == words
    if args.command == "reproduce":
        assert load_table(args.config).runs() and overrides == []
    elif getattr(args, "config", None):
        parse_config(load_config(args.config, overrides))
    else:
        assert overrides == []


def test_a_config_is_what_its_file_says_now_and_leaves_nothing_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    file = tmp_path / "own.py"
    for steps in (111, 222):
        code = "from bertjax.presets import pretraining_config\n"
        file.write_text(f"{code}def get_config(_):\n  c = pretraining_config()\n  c.steps = {steps}\n  return c\n")
        # Of one time and one size.
        os.utime(file, (10**9, 10**9))
        assert load_config(f"{file}:", []).steps == steps
    assert [*tmp_path.iterdir()] == [file]


def test_a_config_file_that_is_not_python_is_one_line_with_its_place(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("\ndef get_config(:\n")
    with pytest.raises(SystemExit) as exit_:
        cli.main(["describe", "--config", str(tmp_path / "broken.py")])
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert "broken.py" in said and "line 2" in said and said.count("\n") == 1


def nowhere(query, *_, **__):
    return query * jnp.nan


def test_bench_step_says_which_phase_it_times_and_what_is_not_finite(capfd):
    own = (
        "--config.data.seq_len=16",
        "--config.long_phase.keep_tokens_per_batch=false",
        f"--config.model.attention={__name__}.nowhere",
    )
    cli.main(["bench", "step", "--config", f"{TINY},phases=2", "--steps=1", *own])
    out, error = capfd.readouterr()
    assert re.search(r"the first phase is timed, \d+ rows of 16; the second has \d+ of 512", error)
    assert re.search("not finite: .*mlm_loss", error)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(out.splitlines()[-1], parse_constant=refuse)
    assert found["losses"]["mlm_loss"] is None and found["seconds_per_step"] > 0


def test_a_long_phase_of_all_steps_is_the_only_one():
    config = load_config(
        TINY, ["--config.steps=20", "--config.long_phase.share=0.99", "--config.long_phase.seq_len=64"]
    )
    (phase,) = parse_config(config).phases
    assert (phase.seq_len, phase.start_step, phase.stop_step) == (64, 0, 20)


def test_phases_of_fewer_rows_are_shown_too(corpus, capsys):
    phases = ("--config.data.seq_len=16", "--config.data.batch_size=8", "--config.long_phase.share=0.5")
    cli.main(
        [
            *("inspect", f"--config=pretrain:size=L1_H16,corpus={corpus},quick=true", "--config.steps=4", *phases),
            *("--config.long_phase.seq_len=64", "--rows=8", "--steps=4"),
        ]
    )
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    rows = [*(f"step {step}, row {row}" for step in (0, 1) for row in range(8))]
    assert shown == [*rows, *(f"step {step}, row {row}" for step in (2, 3) for row in range(2))]
