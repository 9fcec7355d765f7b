"""Fine-tuning on SQuAD 1.1 or 2.0, as in sections 4.2 and 4.3 of the paper.

    bertjax train --config experiments/squad.py:version=1.1,path=squad --init_from runs/base --workdir runs/squad
    bertjax predict --checkpoint runs/squad --split dev --output runs/squad/predictions

`path` is the folder with train-v1.1.json and dev-v1.1.json, or those of 2.0. SQuAD 1.1: batch 32, 5e-5, 3 epochs; 2.0:
batch 48, 5e-5, 2 epochs, and the threshold for no answer that is best on dev. Windows of 384 tokens, one every 128.

Hardware and time: 10,000 training questions, 2 epochs at size 2/256 in rows of 256 and float32, with the evaluation of
all 10,570 dev questions: 24 minutes on two CPU cores that did other work too. BASE on a TPU is not measured.
Expected: dev EM / F1 of BERT BASE on 1.1: 80.8 / 88.5; LARGE 84.1 / 90.9, on 2.0 78.7 / 81.9 (Tables 2 and 3).
"""

from typing import Any

from ml_collections import ConfigDict

from bertjax.config import parse_arguments
from bertjax.fields import finetuning_config, grid, make_quick


def get_config(arguments: str | None = None) -> ConfigDict:
    """The config for `version=1.1,path=DIR,size=SIZE,grid=a3,quick=false`."""
    given = _arguments(arguments)
    config = finetuning_config("squad", given.size)
    second = given.version == "2.0"
    config.epochs = 2 if second else 3
    config.data.path = given.path
    config.data.version = given.version
    config.data.train_file = ""  # "": train-v1.1*.json in data.path, or its 2.0
    config.data.eval_file = ""
    config.data.seq_len = 384
    config.data.batch_size = 48 if second else 32
    config.data.doc_stride = 128
    config.data.max_query_len = 64
    config.data.n_best = 20
    config.data.max_answer_len = 30
    # SQuAD 2.0: no answer where its odds are above the threshold, which is chosen on dev unless it is given.
    config.data.choose_null_threshold = True
    config.data.null_threshold = 0.0
    if given.quick:
        make_quick(config, seq_len=64)
        config.data.max_query_len = 16
        config.data.doc_stride = 32
    return config


def sweep(arguments: str | None = None) -> list[dict[str, Any]]:
    """The trials of `grid=a3`, or `one`, `glue` or `small`; see `bertjax.fields.grid`."""
    return grid(_arguments(arguments).grid)


def _arguments(text: str | None) -> ConfigDict:
    return parse_arguments(text, version="1.1", path="", size="", grid="a3", quick=False)
