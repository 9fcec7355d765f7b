"""Tests of the pre-training objectives without next-sentence prediction."""

import json

import numpy as np
import pytest
from running import overrides, refused

from bertjax.cli import main as cli
from bertjax.data.shard import SINGLE_SHARD
from bertjax.tasks.build import build_task, parse_config
from bertjax.training.checkpoint_config import experiment_config


def config_of(corpus, objective):
    return f"pretrain:size=L1_H16,seq_len=16,objective={objective},corpus={corpus},quick=true"


@pytest.mark.parametrize("packing", [False, True])
def test_pairs_equal_next_sentence_rows_without_labels(packing, corpus):
    given = overrides(None, data__packing=str(packing).lower())
    with_it, without = (
        build_task(parse_config(experiment_config(config_of(corpus, objective), given)))
        for objective in ("nsp", "pairs")
    )
    for rows in (
        lambda task: next(task.train_batches(3, SINGLE_SHARD)),
        lambda task: next(task.eval_batches(SINGLE_SHARD)),
    ):
        labelled, unlabelled = rows(with_it), rows(without)
        assert (labelled.pop("next_sentence_labels") >= 0).any()
        assert (unlabelled.pop("next_sentence_labels") == -1).all()
        assert labelled.keys() == unlabelled.keys()
        for name, values in labelled.items():
            np.testing.assert_array_equal(values, unlabelled[name])


def test_pairs_train_masked_lm_only(corpus, tmp_path):
    given = overrides(None, steps=2, eval_every=2, checkpoint_every=2)
    cli.main(["train", f"--config={config_of(corpus, 'pairs')}", f"--workdir={tmp_path}", *given])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    assert logged and all(line["loss"] == line["mlm_loss"] for line in logged)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["loss"] == results["mlm_loss"] > 0
    assert not [name for line in [*lines, results, results["baseline"]] for name in line if "nsp" in name]


def test_pairs_need_two_segments(corpus, tmp_path, capfd):
    config = f"--config={config_of(corpus, 'pairs')}"
    assert "config.model.type_vocab_size=1 is too small for sentence pairs" in refused(
        capfd, "train", config, f"--workdir={tmp_path}", *overrides(None), "--config.model.type_vocab_size=1"
    )
