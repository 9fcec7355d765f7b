"""Table 3: SQuAD 2.0 (section 4.3 of the paper).

    bertjax reproduce --config experiments/tables/table3.py:scale=paper,corpus=CORPUS,squad2=SQUAD --results RESULTS
    bertjax table 3 --results RESULTS

Our scores are measured on dev, because the labels of the test set are on the SQuAD server.

`large`: see table1.py. `squad2` is the folder with train-v2.0.json and dev-v2.0.json. Other arguments: see table5.py.
Hardware and time: printed by `--plan`.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments
from bertjax.reproduce import runs
from bertjax.reproduce.table import Table

_COLUMNS = {"Dev EM": "exact_match", "Dev F1": "f1"}


@arguments(scale="", corpus="", large="", squad2="")
def get_table(args: ConfigDict) -> Table:
    """Returns the table for `large=CKPT,scale=SCALE,corpus=DIR,squad2=DIR`."""
    scale = runs.scale_of(args)
    run = runs.fine_tuning(scale, args, "squad2", runs.start(scale, args, "large"))
    cells = (
        runs.metric_cell("BERT LARGE (Single)", column, "squad2", run, metric=metric)
        for column, metric in _COLUMNS.items()
    )
    return Table("3", "", runs.scale_note(scale, args), tuple(cells), tuple(runs.model_notes(scale, args)[1:]))
