"""Table 6: effect of the model size (section 5.2 of the paper).

    bertjax reproduce --config experiments/tables/table6.py:corpus=CORPUS,glue=GLUE --results runs/tables --plan
    bertjax table 6 --results runs/tables

Arguments: see table5.py. Hardware and time: printed by `--plan`. Expected: larger models are better, also on small data
sets.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments
from bertjax.reproduce import runs, scales
from bertjax.reproduce.table import PAPER_TABLES, Table

_COLUMNS = {"MNLI-m": "mnli", "MRPC": "mrpc", "SST-2": "sst2", "NER": "ner"}


@arguments(scale="small", corpus="", glue="", ner="")
def get_table(args: ConfigDict) -> Table:
    """Returns the table for `scale=small,corpus=DIR,glue=DIR,ner=DIR`."""
    scale = scales.get_scale(args.scale)
    cells = []
    rows = dict(zip(PAPER_TABLES["6"].rows, scale.table6_sizes, strict=True))
    for row, size in rows.items():
        start = runs.pretraining(scale, args, size=size)
        cells.append(runs.perplexity_cell(row, start))
        for column, task in _COLUMNS.items():
            run = runs.fine_tuning(scale, args, task, start)
            cells.append(runs.metric_cell(row, column, task, run, metric="accuracy" if task == "mrpc" else ""))
    sizes = ", ".join(f"{row} is {size}" for row, size in rows.items())
    notes = (f"ours: {sizes}", "NER (F1) is not in the paper's table", runs.PERPLEXITY_NOTE)
    return Table("6", "", scale.description, tuple(cells), notes)
