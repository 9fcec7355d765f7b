"""Fine-tuning on one GLUE task (sections 4.1 and A.3 of the paper).

    bertjax train --config experiments/glue.py:task=mrpc,path=glue_data --init_from runs/base --workdir runs/mrpc
    bertjax sweep --config experiments/glue.py:task=mrpc,path=glue_data --init_from runs/base --workdir runs/mrpc_sweep
    bertjax predict --checkpoint runs/mrpc --output runs/submission

Arguments:
- task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli or ax.
- path: folder of the GLUE files, `tfds:glue`, or `tfds:DIR:glue` with the data in DIR.
- size: model size for training from random parameters, without --init_from; also set `--config.data.vocabulary`.
- grid: trials of `sweep`: `glue` (four learning rates, as in the paper), `a3` (section A.3), `small` (grid for small
  models) or `one` (a single trial, for several seeds).

Training uses batch size 32, 3 epochs and learning rate 5e-5. The sweep selects the best trial on dev, as in the paper.

Hardware and time: two CPU cores, float32. Three epochs of MRPC with size L4_H256 take 2 min 41 s, and one epoch of
SST-2 with size L2_H256 takes 4 min. BASE on a TPU has not been measured.
Expected: dev results of BERT BASE (Tables 5 and 6 of the paper): MRPC 86.7, SST-2 92.7, QNLI 88.4, MNLI-m 84.4.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments, finetuning_config, make_quick


@arguments(task="mrpc", path="", size="", grid="glue", quick=False)
def get_config(args: ConfigDict) -> ConfigDict:
    """Returns the config for `task=mrpc,path=DIR,size=SIZE,grid=glue,quick=false`."""
    config = finetuning_config("glue", args.size)
    config.data.update({"task": args.task, "path": args.path})
    if args.quick:
        make_quick(config, seq_len=32)
    return config
