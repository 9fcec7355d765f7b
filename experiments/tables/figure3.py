"""Figure 3: comparison of BERT, OpenAI GPT and ELMo on equal data (the paper has no such comparison).

    bertjax reproduce --config experiments/tables/figure3.py:corpus=CASED,glue=GLUE,ner=CONLL \\
      --results runs/tables --plan
    bertjax table figure3 --results runs/tables

All models are pre-trained on the same text. A left-to-right model predicts every token, which takes more FLOPs than
predicting 15 % of them. So it is trained at BERT's width (equal data) and at a smaller width (equal FLOPs). The
LSTMs also have equal FLOPs. Each model is evaluated in two ways: with fine-tuning, and with a weighted sum of all
layers as features, as in ELMo.

Arguments: see table5.py. Hardware and time: printed by `--plan`.
"""

from ml_collections import ConfigDict

from bertjax.model.feature_head import SUM_ALL
from bertjax.presets import arguments
from bertjax.reproduce import runs, scales
from bertjax.reproduce.table import Table

_COLUMNS = {"SST-2": "sst2", "NER": "ner"}


@arguments(scale="small", corpus="", glue="", ner="")
def get_table(args: ConfigDict) -> Table:
    """Returns the table for `scale=small,corpus=DIR,glue=DIR,ner=DIR`."""
    scale = scales.get_scale(args.scale)
    left_to_right_size, lstm_size = scale.equal_flops
    rows = {
        "BERT": runs.pretraining(scale, args),
        "Left-to-right, as wide": runs.pretraining(scale, args, "ltr", *runs.LEFT_TO_RIGHT),
        "Left-to-right, equal FLOPs": runs.pretraining(
            scale, args, "ltr_equal_flops", *runs.LEFT_TO_RIGHT, size=left_to_right_size
        ),
        "LSTMs both ways, equal FLOPs": runs.pretraining(scale, args, "elmo", *runs.LSTMS, size=lstm_size),
    }
    cells = []
    head = runs.feature_based(scale, SUM_ALL)
    for row, start in rows.items():
        cells.append(runs.perplexity_cell(row, start))
        for column, task in _COLUMNS.items():
            tuned = runs.fine_tuning(scale, args, task, start)
            on_features = runs.fine_tuning(scale, args, task, start, variant=SUM_ALL, feature_head=head)
            cells.append(runs.metric_cell(row, f"{column} fine-tuned", task, tuned))
            cells.append(runs.metric_cell(row, f"{column} on features", task, on_features))
    flops = ", ".join(f"{row} {start.flops:.3g}" for row, start in rows.items())
    notes = (
        f"FLOPs of pre-training: {flops}",
        f"{runs.PERPLEXITY_NOTE}; BERT predicts masked tokens, and the other models predict all tokens",
    )
    return Table("figure3", "BERT, OpenAI GPT and ELMo on equal data", scale.description, tuple(cells), notes)
