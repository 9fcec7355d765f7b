"""Which runs `bertjax reproduce` begins, in which order, and what it does after one that stops or fails."""

import json

import pytest
from running import refused

from bertjax.cli import main as cli
from bertjax.reproduce import results as outcomes
from bertjax.reproduce import runner as reproducing
from bertjax.reproduce.formatting import figure_of, shown
from bertjax.reproduce.table import Cell, Run, Table

NAMES = ["cola/both", "cola/first", "cola/first-1", "cola/seed0", "cola/seed1", "pretrain/first"]


@pytest.fixture
def executed(monkeypatch):
    """Names of the runs that were begun, none of which takes any time; `stops` and `fails` are names of such as do, and
    `odd` of such whose results are refused."""
    calls, done, ends = [], {}, {"stops": set(), "fails": set(), "odd": set()}

    def execute(run, place):
        calls.append(run.name)
        assert all((place, earlier.name) in done for earlier in run.needs)
        if run.name in ends["fails"]:
            raise outcomes.BertjaxError("the loss is not finite")
        if run.name in ends["stops"]:
            return {"stopped": True}
        done[place, run.name] = outcomes.Outcome(({},))
        return {"stopped": False}

    def outcome(results, run):
        if run.name in ends["odd"] and run.name in calls:
            raise outcomes.UsageError(f"{run.name} has results of other settings")
        return done.get((results.place, run.name))

    monkeypatch.setattr(reproducing, "_execute", execute)
    monkeypatch.setattr(outcomes.Results, "outcome", outcome)
    return calls, ends


def test_a_run_that_is_stopped_goes_on_and_what_is_finished_is_not_repeated(table, tmp_path, capfd, executed):
    calls, ends = executed
    command = ["reproduce", f"--config={table}:whole", f"--results={tmp_path}"]
    ends["stops"] = {"cola/first"}
    with pytest.raises(SystemExit) as end:
        cli.main(command)
    assert end.value.code == 42 and calls == ["pretrain/first", "cola/first"]
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert told == {"stopped": True, "done": ["pretrain/first"], "failed": {}}
    ends["stops"] = set()
    cli.main(command)
    assert calls[2:] == ["cola/first", "cola/first-1", "cola/seed0", "cola/seed1", "cola/both"]


@pytest.mark.parametrize(
    ("how", "which", "failed"),
    [
        ("fails", "cola/seed0", {"cola/seed0": "the loss is not finite", "cola/both": "cola/seed0 failed"}),
        ("odd", "cola/first", {"cola/first": "cola/first has results of other settings"}),
    ],
)
def test_one_that_fails_or_is_refused_does_not_keep_the_others_from_being_run(
    table, tmp_path, capfd, executed, how, which, failed
):
    calls, ends = executed
    ends[how] = {which}
    with pytest.raises(SystemExit) as end:
        cli.main(["reproduce", f"--config={table}:whole", f"--results={tmp_path}"])
    assert end.value.code == 1
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert told["failed"] == failed and told["done"] == sorted(set(NAMES) - failed.keys())
    assert ("cola/both" in calls) == ("cola/both" not in failed)


def test_tables_that_are_under_way_in_one_folder_are_all_remembered(table, tmp_path, executed, monkeypatch):
    calls, _ = executed
    other = tmp_path / "other.py"
    other.write_text(table.read_text().replace('Table("5"', 'Table("mine"'))
    execute = reproducing._execute

    def with_another(run, place):
        if not calls:
            calls.append("another")
            cli.main(["reproduce", f"--config={other}", f"--results={tmp_path}/r"])
        return execute(run, place)

    monkeypatch.setattr(reproducing, "_execute", with_another)
    cli.main(["reproduce", f"--config={table}", f"--results={tmp_path}/r"])
    asked = json.loads((tmp_path / "r/reproduce.json").read_text())
    assert asked["tables"] == {"5": str(table), "mine": str(other)}
    assert asked["seconds"].keys() == {"pretrain/first", "cola/first"}


def test_time_is_reckoned_by_runs_that_were_not_interrupted(table, tmp_path, capfd, executed):
    _, ends = executed
    ends["stops"] = {"cola/first"}
    command = ["reproduce", f"--config={table}:whole", f"--results={tmp_path}"]
    with pytest.raises(SystemExit):
        cli.main(command)
    (tmp_path / "cola/first").mkdir(parents=True)
    ends["stops"] = set()
    cli.main(command)
    # The one that went on took less than it would have.
    assert "cola/first" not in json.loads((tmp_path / "reproduce.json").read_text())["seconds"]


def test_nothing_is_begun_and_nothing_noted_where_the_data_for_all_of_it_is_lacking(tmp_path, capfd):
    for given, named in (
        ("", "a corpus of `bertjax prepare`"),
        (f":corpus={tmp_path}/none", f"{tmp_path}/none/manifest"),
    ):
        error = refused(capfd, "reproduce", f"--config=tables/table5{given}", f"--results={tmp_path}/r")
        assert f"nothing of tables/table5{given} can be run: it needs {named}" in error
    assert not (tmp_path / "r").exists()


def test_a_mean_over_columns_tells_how_much_of_them_is_there(executed, tmp_path, monkeypatch):
    runs = [Run(f"cola/{n}") for n in range(3)]
    monkeypatch.setattr(
        outcomes.Results, "outcome", lambda _, run: outcomes.Outcome(({"accuracy": 0.5},)) if run != runs[2] else None
    )
    cells = (
        Cell("row", "CoLA", (runs[0],), "accuracy"),
        Cell("row", "SST-2", (runs[1], runs[2]), "accuracy"),
        Cell("row", "mean", (), "", mean_of=("CoLA", "SST-2")),
    )
    found = shown(Table("mine", "", "tiny", cells), outcomes.read(str(tmp_path)))
    assert [ours for _, ours in found.rows["row"]] == ["50.0", "50.0 (1 of 2)", "50.0 (1 of 2)"]


def test_data_that_only_finished_runs_needed_is_lacking_no_more(executed, tmp_path):
    start = Run("pretrain/first", lacks="a corpus")
    tuned, other = Run("cola/first", start=start), Run("sst2/first", start=start, lacks="SST-2")
    cell, results = Cell("row", "CoLA", (tuned, other), "accuracy"), outcomes.read(str(tmp_path))
    before = reproducing.Plan((start, tuned, other), frozenset(), 1.0, "")
    assert before.left == [] and before.lacking(other) == figure_of(cell, results).lacks == "a corpus; SST-2"
    reproducing._execute(start, results.place)
    after = reproducing.Plan((start, tuned, other), frozenset({start.name}), 1.0, "")
    assert after.left == [tuned] and after.lacking(other) == figure_of(cell, results).lacks == "SST-2"
    assert figure_of(cell, results).missing == (tuned, other)
