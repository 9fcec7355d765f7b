"""Fine-tuning on your own texts or text pairs: classification, regression or tagging.

    bertjax train --config experiments/text.py:train=train.csv,dev=dev.csv --init_from runs/base --workdir runs/topic
    bertjax predict --checkpoint runs/topic --config.data.test_file=new.jsonl --output runs/topic/predictions

Files are .tsv (quotes are not special), .csv or .jsonl. `text=`, `label=` and, for a pair, `second=` name the columns.

Kinds:
- classes: one label per row (default).
- number: a number per row (regression).
- multilabel: any number of labels per row, as a JSON list or separated by `config.data.label_separator`.
- tags: words and one tag per word, as JSON lists or separated by spaces. The metric is entity F1 for IOB, BIOES,
  BILOU and BMES tags, and accuracy for other tags.

The log counts skipped rows and names their file and line. Without a dev file, the run does not evaluate and keeps its
last checkpoint. `--config.data.dev_share=0.1` holds out a tenth of the training file as dev set.

Hardware and time: depends on the data; `bertjax bench step` with the same config prints the tokens/s of this machine.
Expected: depends on the data; the final table shows the score of the model and of a constant prediction, such as the
most frequent class.
"""

from ml_collections import ConfigDict

from bertjax.errors import UsageError
from bertjax.presets import arguments, finetuning_config, make_quick


@arguments(
    train="", dev="", test="", text="text", second="", label="label", kind="classes", size="", grid="a3", quick=False
)
def get_config(args: ConfigDict) -> ConfigDict:
    """Returns the config for `train=FILE,dev=FILE,test=FILE,text=text,second=COLUMN,label=label,kind=classes`.

    `size=SIZE,grid=a3,quick=false` are the same arguments as in other experiments.
    """
    config = finetuning_config("text_tags" if args.kind == "tags" else "text", args.size)
    config.data.update({"train_file": args.train, "dev_file": args.dev, "test_file": args.test})
    config.data.update({"text": args.text, "label": args.label})
    if args.kind != "tags":
        config.data.update({"second_text": args.second, "kind": args.kind})
    elif args.second:
        raise UsageError(f"kind=tags takes one text per row; leave second={args.second} unset")
    if args.quick:
        make_quick(config, seq_len=32)
    return config
