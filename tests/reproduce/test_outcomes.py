"""What runs came to is taken for a table only where they started from what the table says."""

import pytest

from bertjax.reproduce import results as outcomes
from bertjax.reproduce import runner as reproducing
from bertjax.reproduce.table import Run


@pytest.mark.parametrize(("members", "fits"), [("ab", True), ("ac", False), ("abc", False), ("a", False)])
def test_an_ensemble_is_of_the_members_that_the_table_asks_for(members, fits):
    one, two = Run("one", "glue"), Run("two", "glue")
    both = Run("both", members=(one, two))
    found = {
        one.name: outcomes.Outcome(({},), fingerprint="a"),
        two.name: outcomes.Outcome(({},), fingerprint="b"),
        both.name: outcomes.Outcome(({},), members=tuple(members)),
    }
    asked = {"one": ["glue"], "two": ["glue"], "both": [""]}
    results = outcomes.Results("place", kept={name: (asked[name], found[name]) for name in found})
    if fits:
        assert results.outcome(both) == found["both"]
        return
    with pytest.raises(outcomes.BertjaxError, match="place/both is of other members"):
        results.outcome(both)


@pytest.mark.parametrize(("started_from", "fits"), [("a", True), ("b", False), ("", False)])
def test_what_starts_along_a_pre_training_started_from_its_checkpoint(tmp_path, monkeypatch, started_from, fits):
    one = Run("one", "pretrain")
    two = Run("two", "glue", start=one, start_step=7)
    found = {"one": outcomes.Outcome(({},), fingerprint="end"), "two": outcomes.Outcome(({},), started_from)}
    monkeypatch.setattr(outcomes.Results, "_read", lambda self, run: found[run.name])
    monkeypatch.setattr(outcomes, "saved_fingerprint", {tmp_path / "one/checkpoints/7": "a"}.__getitem__)
    results = outcomes.Results(str(tmp_path))
    # Of a checkpoint that is not kept nothing is known, and nothing can be started from it.
    assert results.outcome(two) == found["two"]
    with pytest.raises(outcomes.BertjaxError, match="one has no checkpoint of step 7 any more; move that folder away"):
        reproducing._execute(two, str(tmp_path))
    (tmp_path / "one/checkpoints/7").mkdir(parents=True)
    if fits:
        assert results.outcome(two) == found["two"]
        return
    with pytest.raises(outcomes.BertjaxError, match="two started from other parameters than one"):
        results.outcome(two)
