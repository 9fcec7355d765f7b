"""Table 1: GLUE (section 4.1 of the paper).

    bertjax reproduce --config experiments/tables/table1.py:base=hf:google-bert/bert-base-uncased,glue=glue_data \\
      --results RESULTS
    bertjax table 1 --results RESULTS

The paper's scores are measured on the test sets, whose labels are on the GLUE server. Our scores are measured on dev.
`bertjax predict` and `bertjax submission` write the archive for the server. The average is over nine columns: MNLI
counts twice, and WNLI is excluded.

`base` and `large` are released checkpoints of any format, or addresses `hf:ORG/NAME`; without them, the models are
pre-trained on `corpus`. Other arguments: see table5.py. Hardware and time: printed by `--plan`.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments
from bertjax.reproduce import runs
from bertjax.reproduce.table import Cell, Table

_COLUMNS = {
    "MNLI-m": ("mnli", ""),
    "MNLI-mm": ("mnli", "accuracy_mismatched"),
    "QQP": ("qqp", ""),
    "QNLI": ("qnli", ""),
    "SST-2": ("sst2", ""),
    "CoLA": ("cola", ""),
    "STS-B": ("stsb", ""),
    "MRPC": ("mrpc", ""),
    "RTE": ("rte", ""),
}


@arguments(scale="", corpus="", base="", large="", glue="")
def get_table(args: ConfigDict) -> Table:
    """Returns the table for `base=CKPT,large=CKPT,scale=SCALE,corpus=DIR,glue=DIR`."""
    scale = runs.scale_of(args)
    cells = []
    for row, model in (("BERT BASE", "base"), ("BERT LARGE", "large")):
        start = runs.start(scale, args, model)
        for column, (task, metric) in _COLUMNS.items():
            run = runs.fine_tuning(scale, args, task, start)
            cells.append(runs.metric_cell(row, column, task, run, metric=metric))
        cells.append(Cell(row, "Average", (), "", mean_of=tuple(_COLUMNS)))
    notes = ("our scores are measured on dev", *runs.model_notes(scale, args))
    return Table("1", "", runs.scale_note(scale, args), tuple(cells), notes)
