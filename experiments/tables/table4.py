"""Table 4: SWAG (section 4.4 of the paper).

    bertjax reproduce --config experiments/tables/table4.py:scale=paper,corpus=CORPUS,swag=SWAG --results RESULTS
    bertjax table 4 --results RESULTS

Our scores are measured on dev. `bertjax predict` writes predictions for the test server.

`base` and `large`: see table1.py. `swag` is the folder with train.csv and val.csv. Other arguments: see table5.py.
Hardware and time: printed by `--plan`.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments
from bertjax.reproduce import runs
from bertjax.reproduce.table import Table


@arguments(scale="", corpus="", base="", large="", swag="")
def get_table(args: ConfigDict) -> Table:
    """Returns the table for `base=CKPT,large=CKPT,scale=SCALE,corpus=DIR,swag=DIR`."""
    scale = runs.scale_of(args)
    rows = {"BERT BASE": "base", "BERT LARGE": "large"}
    cells = (
        runs.metric_cell(row, "Dev", "swag", runs.fine_tuning(scale, args, "swag", runs.start(scale, args, model)))
        for row, model in rows.items()
    )
    return Table("4", "", runs.scale_note(scale, args), tuple(cells), tuple(runs.model_notes(scale, args)))
