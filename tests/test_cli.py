"""The command line as a user meets it: exit codes, errors of one line, examples that work, and what each prints."""

import argparse
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from bertjax import cli
from bertjax.arguments import PATHS, parser
from bertjax.building import settings_of
from bertjax.config import load_config
from bertjax.corpus.tokenizer import load_vocabulary
from bertjax.data.share import WHOLE
from bertjax.errors import UsageError
from bertjax.tasks import pretraining
from bertjax.terminal import say

ROOT = Path(__file__).parents[1]
EXPERIMENT = ROOT / "experiments" / "pretrain.py"
GLUE = ROOT / "experiments" / "glue.py"
TINY = f"{EXPERIMENT}:size=L1_H16,quick=true"
BATCH_KEYS = {
    "input_ids",
    "input_mask",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "masked_lm_weights",
    "next_sentence_labels",
}


def commands(
    parser: argparse.ArgumentParser, name: tuple[str, ...] = ()
) -> dict[tuple[str, ...], argparse.ArgumentParser]:
    """Every command that does something, by its words, such as ("bench", "step")."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        return {name: parser}
    return {
        key: sub for word, child in groups[0].choices.items() for key, sub in commands(child, (*name, word)).items()
    }


COMMANDS = list(commands(parser()))


def ends(capfd, *arguments) -> tuple[int, str]:
    """Exit code and stderr of a command that does not succeed."""
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return end.value.code, capfd.readouterr().err


def refused(capfd, *arguments, code: int = 2) -> str:
    """The error of a command that ends with `code`, after checking that it is one line."""
    found, error = ends(capfd, *arguments)
    assert found == code, error
    assert re.fullmatch(r"bertjax: [^\n]+\n", error), error
    return error


def printed(capfd, *arguments) -> str:
    """The stdout of a command that succeeds."""
    capfd.readouterr()
    cli.main([str(argument) for argument in arguments])
    return capfd.readouterr().out


@pytest.fixture(scope="module")
def workdir(corpus, tmp_path_factory) -> Path:
    """A run of four steps, evaluated and saved at 0, 2 and 4; tests must not change it."""
    path = tmp_path_factory.mktemp("cli") / "run"
    every = [f"--config.{name}={value}" for name, value in (("steps", 4), ("eval_every", 2), ("checkpoint_every", 2))]
    rate = ["--config.optimizer.warmup_steps=0", "--config.optimizer.learning_rate=1e-2"]
    cli.main(["train", f"--config={TINY},corpus={corpus},seq_len=16", f"--workdir={path}", *every, *rate])
    return path


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
        "submission": ["--predictions", tmp_path, "--output", tmp_path / "run"],
        "fill": ["--checkpoint", tmp_path, "a [MASK]"],
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
        (["--config", f"{EXPERIMENT}:phases=3"], "phases=3"),
        (["--config", f"{EXPERIMENT}:batch=rows"], "'rows'; known: tokens, sequences"),
        (["--config", TINY, "--config.steps=many"], "--config.steps=many"),
        (["--config", TINY, "--config.steps=0"], "config.steps is 0"),
        (["--config", f"{TINY},quick=false"], "config argument quick is given twice"),
        (["--config", TINY, "--config.steps=1e6"], "--config.steps=1e6: it must be a whole number"),
        (["--config", TINY, "--config.data.masking.whole_word=maybe"], "whole_word=maybe: it must be true or false"),
        (["--config", TINY, "--config.optimizer.eps=small"], "--config.optimizer.eps=small: it must be a number"),
        (["--config", TINY, "--config.model=3"], "--config.model is a section of fields; set one of them: activation"),
        (
            ["--config", TINY, "--config.mesh.data=0"],
            "mesh.data=0, mesh.fsdp=1, mesh.tensor=1: each must be at least 1",
        ),
        (["--config", TINY, "--config.data.objective=sop"], "config.data.objective is 'sop'; known: nsp, none"),
        (["--config", TINY, "--config.data.masking.rate=2.0"], "masking rate is 2.0"),
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
    assert len(fields) > 20 and {"steps", "data.batch_size", "model.vocab_multiple"} <= {*fields}
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
    monkeypatch.setattr("bertjax.loading.load_trained", lambda *_, **__: None)
    monkeypatch.setattr("bertjax.inference.fill.fill", lambda *_: [[(obeyed, 0.5)]])
    monkeypatch.setattr("bertjax.tasks.pretraining.format_example", lambda *_, **__: f"A: ä\t{obeyed}")
    cli.main(["fill", "--checkpoint=x", "a [MASK]"])
    cli.main(["inspect", f"--config={TINY},corpus={corpus}", "--rows=1"])
    say(f"labels {obeyed}")
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
    code = "from ml_collections import ConfigDict\nfrom bertjax.experiment import pretraining_config\n"
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
    # The same while a command works on it.
    monkeypatch.setattr("etils.epath.gpath.PosixGPath.exists", lambda _: True)
    monkeypatch.setattr("bertjax.commands.evaluate", fails)
    assert refused(capfd, *command, code=1) == error


def test_storage_that_does_not_answer_is_not_waited_for(capfd, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr("etils.epath.gpath.PosixGPath.exists", lambda _: answer.wait())
    monkeypatch.setattr("bertjax.addresses._WAIT_SECONDS", 0)
    error = refused(capfd, "fill", "--checkpoint", "gs://nosuch/run", "a [MASK]", code=1)
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


def test_a_damaged_checkpoint_is_a_failure_and_not_wrong_use(capfd, workdir, tmp_path):
    shutil.copytree(workdir, tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints" / "4" / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    error = ends(capfd, "evaluate", "--checkpoint", tmp_path / "run")
    assert error[0] == 1
    assert "checkpoints/4 is damaged" in error[1].splitlines()[-1]
    assert "Traceback" not in error[1]


def damaged(workdir: Path, folder: Path) -> Path:
    """A copy of a run whose parameters' files are not what was saved; libraries find that in threads of their own."""
    shutil.copytree(workdir, folder)
    for file in (folder / "checkpoints" / "4" / "params").rglob("d/*"):
        file.write_bytes(bytes(byte ^ (index % 64 == 0) for index, byte in enumerate(file.read_bytes())))
    return folder


def test_what_libraries_say_of_a_damaged_checkpoint_is_held_back_but_with_debug(workdir, tmp_path):
    path = damaged(workdir, tmp_path / "run")
    command = [sys.executable, "-m", "bertjax", "fill", "--checkpoint", path, "a [MASK]"]
    plain, debug = (
        subprocess.run([*command, *more], capture_output=True, text=True, timeout=120) for more in ([], ["--debug"])
    )
    assert plain.returncode == debug.returncode == 1
    assert re.fullmatch(rf"bertjax: checkpoint {path}/checkpoints/4 is damaged \([^\n]+\); [^\n]+\n", plain.stderr)
    assert "Traceback" in debug.stderr and "BertjaxError" in debug.stderr


def test_debug_shows_the_traceback(capfd):
    with pytest.raises(UsageError, match=r"no config file nosuch\.py"):
        cli.main(["describe", "--debug", "--config", "nosuch.py"])


def test_an_unexpected_error_is_one_line_and_tells_of_debug(capfd, monkeypatch):
    def broken(args):
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("bertjax.commands.describe", broken)
    error = refused(capfd, "describe", code=1)
    assert "RuntimeError: first" in error and "--debug" in error
    with pytest.raises(RuntimeError):
        cli.main(["describe", "--debug"])


def test_ctrl_c_is_told_apart_from_a_failure(capfd, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("bertjax.commands.describe", interrupted)
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
    if getattr(args, "config", None):
        settings_of(load_config(args.config, overrides))
    else:
        assert overrides == []


@pytest.mark.parametrize(("size", "count"), [("base", "109,482,240"), ("large", "335,141,888")])
def test_describe_prints_the_papers_count(capfd, size, count):
    text = printed(capfd, "describe", "--config", f"{EXPERIMENT}:size={size}")
    assert re.search(rf"encoder and pooler +{count}$", text, re.MULTILINE)


def test_bench_step_needs_no_tensorflow_and_ends_with_json():
    code = "import sys; from bertjax.cli import main; main(sys.argv[1:]); sys.exit(3 * ('tensorflow' in sys.modules))"
    arguments = ["bench", "step", f"--config={TINY},seq_len=16", "--steps=2"]
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, f"exit code {run.returncode} (3: TensorFlow was imported)\n{run.stderr}"
    figures = json.loads(run.stdout.splitlines()[-1])
    for key in ("tokens_per_second", "mfu", "seconds_to_first_step", "peak_memory_bytes"):
        assert figures[key] > 0
    assert (figures["batch_size"], figures["seq_len"]) == (8, 16)


def test_inspect_shows_rows_and_writes_the_batches_of_the_first_steps(capfd, corpus, tmp_path):
    config = f"{TINY},corpus={corpus},seq_len=16"
    text = printed(capfd, "inspect", "--config", config, "--steps", 3, "--rows", 2, "--npz", tmp_path / "batches.npz")
    rows = re.findall(r"^step (\d), row (\d)$", text, re.MULTILINE)
    assert rows == [(str(step), str(row)) for step in range(3) for row in range(2)]
    assert text.count("A: [CLS]") == 6
    written = np.load(tmp_path / "batches.npz")
    assert set(written) == BATCH_KEYS
    assert written["input_ids"].shape == (3, 8, 16)
    task = pretraining.build(settings_of(load_config(config, [])))
    for step in range(3):
        batch = next(task.train_batches(step, WHOLE))
        for name in BATCH_KEYS:
            np.testing.assert_array_equal(written[name][step], batch[name])


def test_inspect_refuses_steps_beyond_the_run(capfd, corpus):
    assert "--steps is 21" in refused(capfd, "inspect", "--config", f"{TINY},corpus={corpus}", "--steps", 21)


def test_evaluate_prints_what_training_measured_at_that_step(capfd, workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    measured = {
        line["step"]: {key.removeprefix("eval_"): value for key, value in line.items() if key.startswith("eval_")}
        for line in lines
        if "eval_loss" in line
    }
    assert measured[2] != measured[4]
    for step, path in ((2, workdir / "checkpoints" / "2"), (4, workdir)):
        found = json.loads(printed(capfd, "evaluate", "--checkpoint", path))
        assert found == pytest.approx(measured[step], rel=1e-5)


def test_fill_prints_the_best_pieces_of_each_mask(capfd, workdir):
    text = "bana [MASK] kero [MASK]"
    lines = printed(capfd, "fill", "--checkpoint", workdir, "--top", 4, text).splitlines()
    assert lines[0] == text
    pieces = load_vocabulary(workdir / "vocab.txt").pieces
    assert len(lines) == 3
    for line in lines[1:]:
        found = [item.split(" ") for item in line.strip().split("   ")]
        assert len(found) == 4
        assert all(piece in pieces and percent == "%" for piece, _, percent in found)
        probabilities = [float(probability) for _, probability, _ in found]
        assert probabilities == sorted(probabilities, reverse=True)
        assert 0 < sum(probabilities) <= 100


def test_fill_refuses_more_pieces_than_there_are(capfd, workdir):
    error = refused(capfd, "fill", "--checkpoint", workdir, "--top", 100_000, "a [MASK]")
    assert "--top is 100000; the vocabulary has" in error


def test_a_checkpoint_of_another_vocabulary_is_refused(capfd, corpus, workdir, tmp_path):
    pieces = (corpus / "vocab.txt").read_text().split("\n")[:-1]
    (tmp_path / "vocab.txt").write_text("\n".join([*pieces[:5], *reversed(pieces[5:])]) + "\n")
    other = tmp_path / "corpus"
    given = ["--input", f"text:{corpus.parent}/text.txt", "--vocab", tmp_path / "vocab.txt", "--heldout", 0.1]
    printed(capfd, "prepare", *given, "--output", other)
    config = ["--config", f"{TINY},corpus={other},seq_len=16"]
    assert "another vocabulary" in refused(capfd, "evaluate", "--checkpoint", workdir, *config)
    started = ["train", *config, "--workdir", tmp_path / "run", "--init_from", workdir]
    assert "another vocabulary" in refused(capfd, *started)


def test_sigterm_saves_and_exits_with_0_and_the_same_command_goes_on(corpus, tmp_path):
    config = [f"--config={TINY},corpus={corpus},seq_len=16", "--config.steps=2000", "--config.eval_every=2000"]
    command = [sys.executable, "-m", "bertjax", "train", *config, f"--workdir={tmp_path}"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = []
    for line in run.stderr:
        said.append(line)
        if line.startswith("step 5/"):
            run.send_signal(signal.SIGTERM)
            break
    out, rest = run.communicate(timeout=120)
    assert run.returncode == 0, "".join(said) + rest
    assert "asked to stop" in rest and "stopped by a signal at step" in rest and "saved" in rest
    result = json.loads(out)
    assert result["stopped"] and (tmp_path / "checkpoints" / str(result["step"])).is_dir()


def test_fill_needs_a_mask_and_a_checkpoint(capfd, workdir, tmp_path):
    assert "no [MASK] in 'nothing to fill'" in refused(capfd, "fill", "--checkpoint", workdir, "nothing to fill")
    assert f"no checkpoint at {tmp_path}" in refused(capfd, "fill", "--checkpoint", tmp_path, "a [MASK]")
    assert "--top is 0" in refused(capfd, "fill", "--checkpoint", workdir, "--top", 0, "a [MASK]")


def test_a_config_file_that_is_not_python_is_one_line_with_its_place(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("\ndef get_config(:\n")
    with pytest.raises(SystemExit) as exit_:
        cli.main(["describe", "--config", str(tmp_path / "broken.py")])
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert "broken.py" in said and "line 2" in said and said.count("\n") == 1
