"""Table 4: SWAG (section 4.4 of the paper).

    bertjax reproduce --config experiments/tables/table4.py:scale=paper,corpus=CORPUS,swag=SWAG --results RESULTS
    bertjax table 4 --results RESULTS

Our scores are measured on dev. `bertjax predict` writes predictions for the test server.

`swag` is the folder with train.csv and val.csv. Other arguments: see table5.py. Hardware and time: printed by `--plan`.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments
from bertjax.reproduce import runs, scales
from bertjax.reproduce.table import Table


@arguments(scale="small", corpus="", swag="")
def get_table(args: ConfigDict) -> Table:
    """Returns the table for `scale=small,corpus=DIR,swag=DIR`."""
    scale = scales.get_scale(args.scale)
    rows = {"BERT BASE": scale.base, "BERT LARGE": scale.large}
    cells = (
        runs.metric_cell(row, "Dev", "swag", runs.fine_tuning(scale, args, "swag", runs.bert(scale, args, size)))
        for row, size in rows.items()
    )
    return Table("4", "", scale.description, tuple(cells), (f"LARGE is {scale.large}",))
