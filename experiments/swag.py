"""Fine-tuning on SWAG (section 4.4 of the paper).

    bertjax train --config experiments/swag.py:path=swag --init_from runs/base --workdir runs/swag
    bertjax predict --checkpoint runs/swag --output runs/swag/predictions

`path` is the folder with train.csv, val.csv and test.csv. It may also be `tfds:DIR:swag` for a TFDS dataset with the
same columns, or `tfds:huggingface:swag/regular`, which TFDS downloads from Hugging Face. Training uses batch size 16,
learning rate 2e-5 and 3 epochs. The model scores the four endings of each row.

Hardware and time: not measured, because the data was not available.
Expected: accuracy is 81.6 on dev with BERT BASE, and 86.6 on dev and 86.3 on test with LARGE (Table 4).
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments, finetuning_config, make_quick


@arguments(path="", size="", grid="a3", quick=False)
def get_config(args: ConfigDict) -> ConfigDict:
    """Returns the config for `path=DIR,size=SIZE,grid=a3,quick=false`."""
    config = finetuning_config("swag", args.size)
    config.data.update({"path": args.path, "batch_size": 16, "eval_batch_size": 16})
    config.optimizer.learning_rate = 2e-5
    if args.quick:
        make_quick(config, seq_len=32)
    return config
