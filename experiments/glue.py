"""Fine-tuning on one task of GLUE, as in section 4.1 and A.3 of the paper.

    bertjax train --config experiments/glue.py:task=mrpc,path=glue_data --init_from runs/base --workdir runs/mrpc
    bertjax sweep --config experiments/glue.py:task=mrpc,path=glue_data --init_from runs/base --workdir runs/mrpc_sweep
    bertjax predict --checkpoint runs/mrpc --output runs/submission

Tasks: cola sst2 mrpc stsb qqp mnli qnli rte wnli ax. `path` is the folder of GLUE's own files; or `tfds:glue`, or
`tfds:DIR:glue` with the data in DIR. Batch 32, 3 epochs, one of the paper's learning rates; the sweep takes the best on
dev of all four, as the paper does (`grid=a3`: of section A.3's grid; `small`: of that for small models; `one`: no grid,
for restarts with several seeds). `size` and `--config.data.vocabulary` start from random parameters instead of a
checkpoint.

Hardware and time: MRPC, 3 epochs at size 4/256 in float32, 2 min 41 s on two CPU cores; SST-2, one epoch at
2/256, 4 min. BASE on a TPU is not measured.
Expected: BERT BASE on dev (Table 5 and 6 of the paper): MRPC 86.7 accuracy, SST-2 92.7, QNLI 88.4, MNLI-m 84.4.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments, finetuning_config, make_quick


@arguments(task="mrpc", path="", size="", grid="glue", quick=False)
def get_config(given: ConfigDict) -> ConfigDict:
    """The config for `task=mrpc,path=DIR,size=SIZE,grid=glue,quick=false`."""
    config = finetuning_config("glue", given.size)
    config.data.task = given.task
    config.data.path = given.path
    if given.quick:
        make_quick(config, seq_len=32)
    return config
