"""Table 4: SWAG (section 4.4 of the paper).

    bertjax reproduce --config experiments/tables/table4.py:scale=paper,corpus=CORPUS,swag=SWAG --results RESULTS
    bertjax table 4 --results RESULTS

`swag` is the folder with train.csv and val.csv; the other arguments are those of table5.py. Ours are of dev; `bertjax
predict` writes what the test set's server takes.

Hardware and time: `--plan` says.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments
from bertjax.reproduce import runs, scales
from bertjax.reproduce.table import Table


@arguments(scale="small", corpus="", swag="")
def get_table(given: ConfigDict) -> Table:
    """The table for `scale=small,corpus=DIR,swag=DIR`."""
    scale = scales.get_scale(given.scale)
    rows = {"BERT BASE": scale.base, "BERT LARGE": scale.large}
    cells = (
        runs.metric_cell(row, "Dev", "swag", runs.fine_tuning(scale, given, "swag", runs.bert(scale, given, size)))
        for row, size in rows.items()
    )
    return Table("4", "", scale.description, tuple(cells), (f"LARGE is {scale.large}",))
