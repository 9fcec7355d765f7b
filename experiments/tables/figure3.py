"""The architectures of Figure 3 beside each other: BERT's, OpenAI GPT's and ELMo's (a table that the paper lacks).

    bertjax reproduce --config experiments/tables/figure3.py:corpus=CASED,glue=GLUE,ner=CONLL \\
      --results runs/tables --plan
    bertjax table figure3 --results runs/tables

All are pre-trained on the same text by the same loop. A left-to-right model predicts every piece, which costs more
FLOPs than a seventh of them does; it is there once as wide as BERT (equal data), and once narrower, so that FLOPs are
equal too, as they are for the LSTMs. Fine-tuned, and feature-based on the weighted sum of all layers, as ELMo is used.
The arguments are those of table5.py.

Hardware and time: `--plan` says.
"""

from ml_collections import ConfigDict

from bertjax.model.feature_head import SUM_ALL
from bertjax.presets import arguments
from bertjax.reproduce import runs, scales
from bertjax.reproduce.table import Table

_COLUMNS = {"SST-2": "sst2", "NER": "ner"}


@arguments(scale="small", corpus="", glue="", ner="")
def get_table(given: ConfigDict) -> Table:
    """The table for `scale=small,corpus=DIR,glue=DIR,ner=DIR`."""
    scale = scales.get_scale(given.scale)
    narrow, lstms = scale.equal_flops
    rows = {
        "BERT": runs.bert(scale, given),
        "Left-to-right, as wide": runs.pretraining(scale, given, "ltr", *runs.LEFT_TO_RIGHT),
        "Left-to-right, equal FLOPs": runs.pretraining(
            scale, given, "ltr_equal_flops", *runs.LEFT_TO_RIGHT, size=narrow
        ),
        "LSTMs both ways, equal FLOPs": runs.pretraining(scale, given, "elmo", *runs.LSTMS, size=lstms),
    }
    cells = []
    for row, start in rows.items():
        cells.append(runs.perplexity_cell(row, start))
        for column, task in _COLUMNS.items():
            on_top = runs.feature_based(scale, SUM_ALL)
            tuned = runs.fine_tuning(scale, given, task, start)
            on_features = runs.fine_tuning(scale, given, task, start, variant=SUM_ALL, feature_head=on_top)
            cells.append(runs.metric_cell(row, f"{column} fine-tuned", task, tuned))
            cells.append(runs.metric_cell(row, f"{column} on features", task, on_features))
    flops = ", ".join(f"{row} {start.flops:.3g}" for row, start in rows.items())
    notes = (
        f"FLOPs of pre-training: {flops}",
        f"{runs.PERPLEXITY_NOTE}, of masked pieces for BERT, and of all pieces otherwise",
    )
    return Table("figure3", "BERT, OpenAI GPT and ELMo on equal data", scale.description, tuple(cells), notes)
