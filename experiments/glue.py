"""Fine-tuning on one task of GLUE, as in section 4.1 and A.3 of the paper.

    bertjax train --config experiments/glue.py:task=mrpc,path=glue_data --init_from runs/base --workdir runs/mrpc
    bertjax sweep --config experiments/glue.py:task=mrpc,path=glue_data --init_from runs/base --workdir runs/mrpc_sweep
    bertjax predict --checkpoint runs/mrpc --output runs/submission

Tasks: cola sst2 mrpc stsb qqp mnli qnli rte wnli ax. `path` is the folder of GLUE's own files; or `tfds:glue`, or
`tfds:DIR:glue` with the data in DIR. Batch 32, 3 epochs, one of the paper's learning rates; the sweep takes the best on
dev of all four, as the paper does (`grid=a3`: of section A.3's grid). `size` and `--config.data.vocabulary` start from
random parameters instead of a checkpoint.

Hardware and time: to be measured with a pre-trained checkpoint; the table in the README has what was.
Expected: BERT BASE on dev (Table 5 and 6 of the paper): MRPC 86.7 accuracy, SST-2 92.7, QNLI 88.4, MNLI-m 84.4.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from bertjax.config import parse_arguments
from bertjax.errors import UsageError
from bertjax.fields import finetuning_config, make_quick


def get_config(arguments: str | None = None) -> ConfigDict:
    """The config for `task=mrpc,path=DIR,size=SIZE,grid=glue,quick=false`."""
    given = _arguments(arguments)
    config = finetuning_config("glue", given.size)
    config.data.task = given.task
    config.data.path = given.path
    if given.quick:
        make_quick(config, seq_len=32)
    return config


def sweep(arguments: str | None = None) -> Iterator[dict[str, Any]]:
    """`grid=glue` is section 4.1's four learning rates, `grid=a3` the whole grid of section A.3."""
    grid = _arguments(arguments).grid
    if grid == "glue":
        for rate in (5e-5, 4e-5, 3e-5, 2e-5):
            yield {"optimizer.learning_rate": rate}
    elif grid == "a3":
        for batch, rate, epochs in itertools.product((16, 32), (5e-5, 3e-5, 2e-5), (2, 3, 4)):
            yield {"data.batch_size": batch, "optimizer.learning_rate": rate, "epochs": epochs}
    else:
        raise UsageError(f"grid={grid}; known: glue, a3")


def _arguments(text: str | None) -> ConfigDict:
    return parse_arguments(text, task="mrpc", path="", size="", grid="glue", quick=False)
