"""Fine-tuning on your own sentences, or pairs of them, with a class or a number each, or with a tag for each word.

    bertjax train --config experiments/text.py:train=train.csv,dev=dev.csv --init_from runs/base --workdir runs/topic
    bertjax predict --checkpoint runs/topic --config.data.test_file=new.jsonl --output runs/topic/predictions

Files end with .tsv (quotes are text), .csv or .jsonl; `text=`, `label=` and, for a pair, `second=` name their columns.
`kind=number` is a regression. With `kind=multilabel` a row has any number of labels: a list in JSON, else with
`config.data.label_separator` between them. With `kind=tags` a row is a sentence: its words and as many tags,
lists in JSON, else separated by spaces; tags of IOB, BIOES or BILOU give the F1 of entities, others accuracy.
Rows that are not used are counted and printed with file and line. Without a dev file nothing is evaluated, and the last
checkpoint is kept; `--config.data.dev_share=0.1` cuts a dev set off the training file.

Hardware and time: whatever the data is; `bertjax bench step` with the same config gives the tokens/s of this machine.
Expected: the table at the end has the most frequent class beside the result.
"""

from ml_collections import ConfigDict

from bertjax.errors import UsageError
from bertjax.presets import arguments, finetuning_config, make_quick


@arguments(train="", dev="", text="text", second="", label="label", kind="classes", size="", grid="a3", quick=False)
def get_config(given: ConfigDict) -> ConfigDict:
    """The config for `train=FILE,dev=FILE,text=text,second=COLUMN,label=label,kind=classes`.

    And for `size=SIZE,grid=a3,quick=false`, as in the other experiments.
    """
    config = finetuning_config("text_tags" if given.kind == "tags" else "text", given.size)
    config.data.train_file = given.train
    config.data.dev_file = given.dev
    config.data.text = given.text
    config.data.label = given.label
    if given.kind != "tags":
        config.data.second_text = given.second
        config.data.kind = given.kind
    elif given.second:
        raise UsageError(f"kind=tags takes one text per row; leave second={given.second} unset")
    if given.quick:
        make_quick(config, seq_len=32)
    return config
