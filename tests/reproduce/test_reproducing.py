"""`bertjax reproduce` and `bertjax table` on a table of tiny runs: what is run, what is shown, and nothing twice."""

import json
import shlex
import shutil
import statistics
import sys
from pathlib import Path

import pytest
from running import EXPERIMENTS, refused
from several import WORKER, started

from bertjax.cli import main as cli
from bertjax.reproduce import results as outcomes
from bertjax.reproduce import runner as reproducing
from bertjax.utils.io import write_atomic


def printed(capfd, *arguments) -> tuple[str, str]:
    capfd.readouterr()
    cli.main([*map(str, arguments)])
    told = capfd.readouterr()
    return told.out, told.err


@pytest.fixture(scope="module")
def results(table, tmp_path_factory):
    """A folder with the table; tests must not change it."""
    folder = tmp_path_factory.mktemp("results")
    cli.main(["reproduce", f"--config={table}", f"--results={folder}"])
    return folder


@pytest.fixture(scope="module")
def whole(table, tmp_path_factory):
    """A folder with an ensemble and a start along the way besides."""
    folder = tmp_path_factory.mktemp("whole")
    cli.main(["reproduce", f"--config={table}:whole", f"--results={folder}"])
    return folder


def test_a_plan_runs_nothing_and_tells_order_time_and_commands(table, tmp_path, capfd):
    out, _ = printed(capfd, "reproduce", f"--config={table}:whole", f"--results={tmp_path}/r", "--plan")
    assert not (tmp_path / "r").exists()
    lines = out.splitlines()
    assert [line.split()[1] for line in lines[:-1:2]] == [
        *("pretrain/first", "cola/first", "cola/first-1", "cola/seed0", "cola/seed1", "cola/both")
    ]
    assert all("about 0:00:" in line for line in lines[:-1:2])
    assert all(line.startswith("      bertjax ") for line in lines[1:-1:2])
    assert lines[-1].startswith("6 of 6 runs to do, about 0:00:") and "40% of measured NumPy" in lines[-1]


def test_what_cannot_be_run_is_left_out_and_said(table, tmp_path, capfd):
    out, _ = printed(capfd, "reproduce", f"--config={table}:glue=,whole", f"--results={tmp_path}", "--plan")
    assert "cola/both" in out and out.count("left out: needs CoLA, in a folder given with glue=") == 5
    assert "1 of 6 runs to do" in out
    out, _ = printed(capfd, "table", "5", f"--results={tmp_path}")
    # Not of this file, which was only planned.
    assert "experiments" not in out


def test_all_is_run_once(table, results, capfd):
    assert sorted(json.loads((results / "reproduce.json").read_text())["seconds"]) == ["cola/first", "pretrain/first"]
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*.json") if path.name != "reproduce.json"}
    assert len(before) > 10
    out, err = printed(capfd, "reproduce", f"--config={table}", f"--results={results}")
    assert out.count(" done\n") == 2 and "0 of 2 runs to do" in out and "as 2 finished runs took" in out
    assert json.loads(out.splitlines()[-1])["done"] == ["cola/first", "pretrain/first"]
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_figures_are_means_and_deviations_of_seeds(results, capfd):
    out, _ = printed(capfd, "table", "5", f"--results={results}")
    seeds = [
        trial["metrics"]["accuracy"] for trial in json.loads((results / "cola/first/sweep.json").read_text())["trials"]
    ]
    perplexity = json.loads((results / "pretrain/first/results.json").read_text())["perplexity"]
    shown = f"{100 * statistics.mean(seeds):.1f} ±{100 * statistics.stdev(seeds):.1f}"
    row = next(line for line in out.splitlines() if line.startswith("BERT BASE"))
    mean = statistics.mean([perplexity, 100 * statistics.mean(seeds)])
    assert f" 92.7  {shown} " in row and row.split()[-2:] == [f"{perplexity:.1f}", f"{mean:.1f}"]
    assert "What is missing" not in out
    markdown, _ = printed(capfd, "table", "5", f"--results={results}", "--markdown")
    assert f"| 92.7 | {shown} |" in markdown and markdown.startswith("**Table 5: ")


def test_a_table_is_printed_from_the_file_in_which_its_results_are_kept(results, tmp_path, capfd):
    from_folder, _ = printed(capfd, "table", "5", f"--results={results}", f"--keep={tmp_path}/kept.json")
    assert from_folder.endswith(f"2 runs are kept in {tmp_path}/kept.json\n")
    again, _ = printed(capfd, "table", "5", f"--results={tmp_path}/kept.json")
    assert again.rstrip() == from_folder[: from_folder.rindex("2 runs")].rstrip()
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert sorted(kept["runs"]) == ["cola/first", "pretrain/first"] and len(kept["runs"]["cola/first"]["metrics"]) == 2
    assert "is a file of kept results" in refused(
        capfd, "reproduce", "--config=tables/table5", f"--results={tmp_path}/kept.json"
    )
    (tmp_path / "text.txt").write_text("mine")
    assert "is no file of results" in refused(
        capfd, "table", "5", f"--results={results}", f"--keep={tmp_path}/text.txt"
    )
    assert (tmp_path / "text.txt").read_text() == "mine"
    assert "has 2 runs that would be lost, such as cola/first" in refused(
        capfd, "table", "5", f"--results={tmp_path}/none", f"--keep={tmp_path}/kept.json"
    )
    assert json.loads((tmp_path / "kept.json").read_text()) == kept
    kept["runs"]["pretrain/first"]["asked"][-1] += "0"
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    assert "pretrain/first of other settings" in refused(capfd, "table", "5", f"--results={tmp_path}/kept.json")
    (tmp_path / "kept.json").write_text("{}")
    assert "is no file of results" in refused(capfd, "table", "5", f"--results={tmp_path}/kept.json")


def test_results_of_several_places_are_put_together(results, tmp_path, capfd):
    alone, _ = printed(capfd, "table", "5", f"--results={results}", f"--keep={tmp_path}/all.json")
    content = json.loads((tmp_path / "all.json").read_text())
    for name in content["runs"]:
        part = {**content, "runs": {name: content["runs"][name]}}
        (tmp_path / f"{Path(name).parts[0]}.json").write_text(json.dumps(part))
    first, second = f"--results={tmp_path}/pretrain.json", f"--results={tmp_path}/cola.json"
    for one in (first, second):
        half, _ = printed(capfd, "table", "5", one)
        assert "What is missing" in half and "--workdir RESULTS/" in half and ".json/" not in half
        half, _ = printed(capfd, "table", "5", one, f"--results={tmp_path}/further")
        assert f"--workdir {tmp_path}/further/" in half
    for both in ((first, second), (second, first)):
        out, _ = printed(capfd, "table", "5", *both, f"--keep={tmp_path}/again.json")
        assert out.splitlines()[:-1] == alone.splitlines()[:-1]
        assert json.loads((tmp_path / "again.json").read_text()) == content
    # Fine-tuned from another pre-training than the one that is looked up first.
    other = {**content, "runs": {"pretrain/first": {**content["runs"]["pretrain/first"], "fingerprint": "another"}}}
    (tmp_path / "other.json").write_text(json.dumps(other))
    out, _ = printed(capfd, "table", "5", first, f"--results={tmp_path}/other.json", second)
    assert out.splitlines() == alone.splitlines()[:-1]
    with pytest.raises(SystemExit) as end:
        cli.main(["table", "5", f"--results={tmp_path}/other.json", first, second])
    assert end.value.code == 1
    assert f"{tmp_path}/cola.json/cola/first started from other parameters" in capfd.readouterr().err


@pytest.mark.slow
def test_what_is_missing_is_named_with_commands_that_fill_it(table, whole, tmp_path, capfd):
    cli.main(["reproduce", f"--config={table}:glue=,whole", f"--results={tmp_path}/new"])
    out, _ = printed(capfd, "table", "5", f"--results={tmp_path}/new")
    assert "- no data: SST-2: needs CoLA" in out
    commands = [line for line in out.splitlines() if line.startswith("    bertjax ")]
    assert len(commands) == 5 and "path=GLUE" in commands[0]
    # A folder in which nothing is known of what was asked for.
    runs = reproducing.load_table(f"{table}:whole").runs()
    for run in runs:
        if run.name != "pretrain/first":
            cli.main(shlex.split(run.command(f"{tmp_path}/new"))[1:])
    capfd.readouterr()
    old, new = outcomes.read(str(whole)), outcomes.read(f"{tmp_path}/new")
    for run in runs:
        # The very same runs, seed by seed.
        assert new.outcome(run).metrics == old.outcome(run).metrics, run.name
    both = json.loads((whole / "cola/both/results.json").read_text())
    out, _ = printed(capfd, "table", "5", f"--results={whole}")
    assert f"{100 * both['accuracy']:.1f}" in next(line for line in out.splitlines() if line.startswith("ours"))
    assert "What is missing" not in out
    shutil.rmtree(tmp_path / "new/cola/both")
    cli.main([*shlex.split(runs[-1].command(f"{tmp_path}/new"))[1:], "--config.data.seq_len=8"])
    error = refused(capfd, "reproduce", f"--config={table}:whole", f"--results={tmp_path}/new", "--plan")
    assert "cola/both has results of other settings than the table asks for (data.seq_len" in error


def test_results_of_other_runs_are_refused(table, results, tmp_path, capfd):
    cli.main(["reproduce", f"--config={table}:glue=", f"--results={tmp_path}/r"])
    shutil.copytree(results / "cola/first", tmp_path / "r/cola/first")
    for file in (tmp_path / "r/cola/first").glob("trials/*/results.json"):
        content = json.loads(file.read_text())
        file.write_text(json.dumps({**content, "started_from": "0" * 16}))
    with pytest.raises(SystemExit) as end:
        cli.main(["table", "5", f"--results={tmp_path}/r"])
    error = capfd.readouterr().err
    assert end.value.code == 1 and "cola/first started from other parameters than pretrain/first ended with" in error
    # Of one trial, whichever it is.
    *_, last = sorted((results / "cola/first").glob("trials/*/results.json"))
    shutil.copy(last, tmp_path / "r" / last.relative_to(results))
    with pytest.raises(SystemExit) as end:
        cli.main(["table", "5", f"--results={tmp_path}/r"])
    assert end.value.code == 1 and "cola/first started from different parameters" in capfd.readouterr().err
    sweep = json.loads((tmp_path / "r/cola/first/sweep.json").read_text())
    (tmp_path / "r/cola/first/sweep.json").write_text(json.dumps({**sweep, "left": 1}))
    assert "What is missing" in printed(capfd, "table", "5", f"--results={tmp_path}/r")[0]
    shutil.rmtree(tmp_path / "r/cola/first")
    shutil.copytree(results / "cola/first", tmp_path / "r/cola/first")
    shutil.rmtree(next((tmp_path / "r/cola/first/trials").iterdir()))
    assert "What is missing" in printed(capfd, "table", "5", f"--results={tmp_path}/r")[0]
    assert "--plot draws figure5, and 5 is" in refused(capfd, "table", "5", f"--results={tmp_path}/r", "--plot=a.png")
    write_atomic(tmp_path / "r/pretrain/first/results.json", "{")
    with pytest.raises(SystemExit) as end:
        cli.main(["table", "5", f"--results={tmp_path}/r"])
    assert end.value.code == 1 and "results.json: " in capfd.readouterr().err
    error = refused(capfd, "reproduce", f"--config={table}:steps=3", f"--results={results}", "--plan")
    assert "has results of other settings than the table asks for (steps: 3 -> 2)" in error


def test_a_table_is_remembered_by_a_name_that_holds_in_any_folder(table, monkeypatch):
    monkeypatch.chdir(table.parent)
    assert reproducing._from_anywhere("table.py:steps=3", "mine") == f"{table}:steps=3"
    for shipped in ("tables/table5", f"{EXPERIMENTS}/tables/table5.py"):
        assert reproducing._from_anywhere(f"{shipped}:scale=small", "5") == "tables/table5:scale=small"
    assert reproducing._from_anywhere("table.py", "5") == str(table)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("x = 1", "has no function get_table"),
        ("def get_table(text):\n    return 1", "must return a bertjax.reproduce.table.Table"),
        ("def get_table(text):\n    1 / 0", "cannot be run: ZeroDivisionError"),
    ],
)
def test_a_file_that_describes_no_table_is_refused(content, named, tmp_path, capfd):
    (tmp_path / "table.py").write_text(content)
    command = ("reproduce", f"--config={tmp_path}/table.py", f"--results={tmp_path}/r")
    assert named in refused(capfd, *command)
    assert "is for one run" in refused(capfd, *command, "--config.seed=3")
    assert "known: paper, small" in refused(capfd, "reproduce", "--config=tables/table5:scale=big", command[-1])
    assert "there is no table '9'; known: 1, 2" in refused(capfd, "table", "9", command[-1])


@pytest.mark.slow
def test_two_processes_fill_the_same_table(table, whole, tmp_path):
    command = ["reproduce", f"--config={table}:whole", f"--results={tmp_path}"]
    for process in started([sys.executable, "-c", WORKER, json.dumps([command, command])], processes=2, devices=4):
        _, said = process.communicate(timeout=500)
        assert process.returncode == 0, said.decode()[-2000:]
    old, new = outcomes.read(str(whole)), outcomes.read(str(tmp_path))
    assert sorted(new.seconds) == sorted(run.name for run in reproducing.load_table(f"{table}:whole").runs())
    for run in reproducing.load_table(f"{table}:whole").runs():
        for seed, other in zip(old.outcome(run).metrics, new.outcome(run).metrics, strict=True):
            assert seed == pytest.approx(other, rel=1e-3, abs=1e-3), run.name
