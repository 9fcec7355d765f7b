"""Command line: exit codes, one-line errors and examples of the help."""

import json
import logging
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import jax.numpy as jnp
import pytest
import tensorflow as tf
from helpers.commanding import commands, failure, refused
from helpers.valid_commands import check_command

from bertjax import errors
from bertjax.cli import main as cli
from bertjax.cli.main import build_parser, main, parse_args
from bertjax.errors import UsageError
from bertjax.training import multihost
from bertjax.training.checkpoint_config import experiment_config

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "experiments" / "pretrain.py"
TINY = f"{EXPERIMENT}:size=L1_H16,quick=true"

COMMANDS = commands(build_parser())


def test_version_is_that_of_the_package(capfd):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert not end.value.code and capfd.readouterr().out == f"bertjax {version('bertjax')}\n"


def test_distributed_connects_the_processes_without_environment_variables(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(multihost, "initialize_distributed", Mock(side_effect=UsageError("no other process")))
    command = ["train", "--config", TINY, "--workdir", tmp_path / "run", "--distributed"]
    assert "no other process" in refused(capfd, *command)


def test_word_after_a_field_is_its_value_and_not_a_text():
    args = parse_args(["predict", "--checkpoint=run", "--config.data.seq_len", "64", "a text"])
    assert (args.overrides, args.texts) == (["--config.data.seq_len=64"], ["a text"])


# Values of config fields and of arguments of the experiment that `describe` rejects.
INVALID_CONFIGS = [
    ("{TINY},seq_len=long", "seq_len=long is invalid; it must be an integer"),
    ("{TINY},quick=maybe", "quick=maybe is invalid; it must be true or false"),
    ("{TINY},seq_len=0", "seq_len=0"),
    ("{TINY} --config.phases=({{'seq_len':0}},)", r"config.phases\[\].seq_len is 0"),
    ("{TINY},phases=3", "phases=3"),
    ("{TINY},batch=rows", "unknown batch=rows; use tokens or sequences"),
    ("{TINY} --config.steps=1e6", "--config.steps=1e6 is invalid; it must be an integer"),
    ("{TINY} --config.optimizer.eps=small", "--config.optimizer.eps=small is invalid; it must be a number"),
    ("{TINY} --config.model=3", "unknown field 'model'; use one of attention, "),
    ("{TINY} --config.mesh.data=-2", "config.mesh.data is -2; it must be at least -1"),
    ("{TINY} --config.data.objective=nosuch", "config.data.objective is 'nosuch'; use one of nsp, "),
    ("{TINY} --config.model.hidden_dropout_prob=0.999999", "0.999999; it must be at most 0.9999"),
    ("{TINY} --config.task=nosuch", "config.task=nosuch cannot be overridden"),
    ("{TINY} --config.seed", "--config.seed has no value"),
    ("{TINY} stray word", "unknown argument stray; set config fields with --config.FIELD=VALUE, or see"),
    ("{TINY} --log_level=loud", "invalid choice: 'loud'"),
    ("nosuch.py", "config file not found: nosuch.py"),
]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        *((f"describe --config {words}", message) for words, message in INVALID_CONFIGS),
        ("describe", "no config; set --config"),
        ("", "are required: COMMAND; see "),
        ("bench steps", "step.*input"),
        ("nosuch", ".*".join(dict.fromkeys(words[0] for words in COMMANDS))),
        ("train --config {TINY} --workdir run --nosuch=1", "--nosuch=1; see `bertjax train --help`"),
        ("bench step --config {TINY} --nosuch=1", "--nosuch=1; see `bertjax bench step --help`"),
        ("prepare --input=text:a.txt --output=out --vocab=vocab.txt --vocab_size=9", "--vocab_size has no effect with"),
        ("train --config=text:train=a,dev=b --config.model.hidden_size=64 --workdir=run", "no initial checkpoint"),
        ("bench step --config {TINY} --steps=1.5", "argument --steps: invalid int value"),
        ("bench step --config {TINY} --steps=0", "argument --steps: .* at least 1"),
        *(
            (f"bench step --config {{TINY}} --profile={text}", f"argument --profile: '{text}' is not a range of steps")
            for text in ("5:5", "-1:3", "1:2:3")
        ),
        (f"bench step --config {{TINY}} --steps={10**30}", "argument --steps: .* at most 2,147,483,647"),
        ("train --config {TINY} --workdir run", "no corpus"),
        ("train --config {TINY},corpus=nothing --workdir run", "nothing"),
        ("inspect --config {TINY}", "no corpus"),
        ("bench input --config {TINY}", "with a corpus"),
        # A text that looks like a URL is an ordinary text.
        ("fill_mask --checkpoint nosuch gs://nosuch/run", "no checkpoint at nosuch"),
        ("train --config {TINY} --workdir=", "argument --workdir: the path is empty"),
    ],
)
def test_invalid_command_is_rejected_and_writes_nothing(capfd, command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert re.search(message, refused(capfd, *command.format(TINY=TINY).split()))
    assert not list(tmp_path.iterdir())


def test_terminal_control_characters_are_escaped(capfd, corpus, monkeypatch):
    control = "\x1b[31mred\x9b2J\u202e\r"
    monkeypatch.setattr("bertjax.inference.load.load_model", lambda *_, **__: None)
    monkeypatch.setattr("bertjax.inference.predict.fill_mask", lambda *_: [[(control, 0.5)]])
    monkeypatch.setattr("bertjax.data.inspection._paragraph", lambda *_, **__: [f"A: ä\t{control}"])
    main(["fill_mask", "--checkpoint=x", "a [MASK]"])
    main(["inspect", f"--config={TINY},corpus={corpus}", "--rows=1"])
    logging.getLogger("bertjax").info(f"labels {control}")
    output = capfd.readouterr()
    error = failure(capfd, "describe", "--config", f"{control}.py")[1]
    for text in (output.out, output.err, error):
        assert r"\x1b[31mred\x9b2J" in text and not re.search("[\x1b\x9b\u202e\r]", text)
    assert "\nA: ä\t" in output.out


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("return changed(task=5)", "config.task=5; use one of adaptation, embed, glue"),
        ("return changed(data='x')", "config.data is 'x'; it must be a dictionary of fields"),
        ("return changed(steps=None)", "config.steps is None; .* an integer"),
        ("return None", "needs a function get_config that returns a ConfigDict"),
        ("pass\ndel get_config", "needs a function get_config"),
        ("return changed()\ndef sweep(arguments):\n    return ['ab']", "yields \\['ab'\\]; yield dictionaries"),
        ("return changed()\ndef sweep(arguments):\n    return []", "yields \\[\\]; yield dictionaries"),
    ],
)
def test_invalid_custom_experiment_is_rejected(capfd, tmp_path, code, message):
    (tmp_path / "own.py").write_text(
        "from ml_collections import ConfigDict\nfrom bertjax.presets import pretraining_config\n"
        "def changed(**fields):\n    return ConfigDict(pretraining_config('L1_H16').to_dict() | fields)\n"
        f"def get_config(arguments=None):\n    {code}\n"
    )
    error = refused(capfd, "sweep", "--config", tmp_path / "own.py", "--workdir", tmp_path / "run")
    assert re.search(message, error) and not (tmp_path / "run").exists()


@pytest.mark.ci
@pytest.mark.parametrize("command", ["inspect", "bench input"])
def test_damaged_corpus_is_an_error(capfd, corpus, tmp_path, command):
    damaged = shutil.copytree(corpus, tmp_path / "corpus") / "train.tokens.bin"
    damaged.write_bytes(damaged.read_bytes()[:-2] + bytes(2))
    error = refused(capfd, *command.split(), "--config", f"{TINY},corpus={tmp_path}/corpus", code=1, logs=True)
    assert "train.tokens.bin is damaged" in error


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (errors.shortened(f"Error writing {'x' * 5000}: No space\nleft on device"), "Error writing x.* left on device"),
        (errors.shortened("a  short\n one"), "a short one"),
        (errors.listed(["a", "b"]), "a, b"),
        (errors.listed(f"label_{index}" for index in range(10_000)), "label_0, .*, label_9, and 9,990 more"),
        (errors.listed(["x" * 80_000] * 9), "x.*"),
        (errors.quoted("\x1b[31mred" + "x" * 80_000), r"'\\x1b\[31mred.*'"),
        (errors.first_line(ValueError("no checksum [source locations='a.cc:1'] [spec='{}']\nmore")), "no checksum"),
        (errors.first_line(KeyError()), "KeyError"),
        (errors.first_line(FileNotFoundError(2, "No such file", "a.txt")), "No such file"),
    ],
)
def test_shortened_listed_and_quoted_texts_are_short(text, pattern):
    assert re.fullmatch(pattern, text) and len(text) < 1200


def test_debug_log_level_prints_the_traceback(capfd):
    code, error = failure(capfd, "describe", "--config", "nosuch.py", "--log_level=debug")
    assert code == 2 and "Traceback" in error
    assert error.splitlines()[-1].startswith("bertjax: config file not found: nosuch.py")
    assert "Traceback" not in refused(capfd, "describe", "--config", "nosuch.py")


def test_exceptions_of_libraries_determine_the_exit_code_and_the_error_line(capfd, monkeypatch):
    in_native_code = ValueError("Exception raised while checking equality")
    in_native_code.__cause__ = KeyboardInterrupt()
    storage = tf.errors.PermissionDeniedError(None, None, "HTTP 403 gs://nosuch\nmore")
    advice = "check the path and the network, then run the same command again"
    full = "No space left on device (os error 28)"  # from the package `tokenizers`
    for error, code, line in (
        (in_native_code, 130, "bertjax: interrupted\n"),
        (storage, 1, f"bertjax: HTTP 403 gs://nosuch; {advice}\n"),
        (Exception(full), 1, f"bertjax: input or output error: {full}\n"),
    ):
        monkeypatch.setattr(cli, "_run", Mock(side_effect=error))
        assert failure(capfd, "describe") == (code, line)


def test_failed_command_does_not_wait_for_threads():
    start = "import threading, time; threading.Thread(target=time.sleep, args=(300,)).start()"
    program = f"{start}; from bertjax.cli.main import main; main()"
    command = [sys.executable, "-c", program, "describe", "--config", "nothing"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and result.stderr.startswith("bertjax: config file not found")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_example_in_help_is_valid(capfd, monkeypatch, words):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    assert end.value.code == 0
    text = capfd.readouterr().out
    example = re.search(r"^example:\n  (bertjax .+)$", text, re.MULTILINE)
    assert example, "no example"
    assert "(default: )" not in text and "(default: [])" not in text
    program, *arguments = shlex.split(example[1])
    assert tuple(arguments[: len(words)]) == words
    check_command(arguments)


def nan_attention(query, *_, **__):
    return query * jnp.nan


@pytest.mark.ci
def test_bench_step_measures_only_the_first_phase_and_reports_non_finite_losses(capfd):
    overrides = ("--config.data.seq_len=16", f"--config.model.attention={__name__}.nan_attention")
    main(["bench", "step", "--config", f"{TINY},phases=2", "--steps=1", "--json", *overrides])
    out, error = capfd.readouterr()
    assert re.search("not finite: .*mlm_loss", error)
    result = json.loads(out.splitlines()[-1], parse_constant=pytest.fail)  # NaN is not JSON.
    assert result["losses"]["mlm_loss"] is None and result["seconds_per_step"] > 0
    # Only the first phase, which has short rows, is timed.
    assert result["seq_len"] == 16 and result["rows"] == result["batch_size"]


def test_phase_whose_share_rounds_to_no_steps_is_left_out():
    fields = ["--config.steps=20", "--config.phases=({'share': 0.01}, {'share': 0.99, 'seq_len': 64})"]
    (phase,) = experiment_config(TINY, fields).resolved_phases
    assert (phase.seq_len, phase.start_step, phase.stop_step) == (64, 0, 20)
