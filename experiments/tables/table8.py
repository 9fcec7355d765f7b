"""Table 8: what masked pieces are replaced by (section C.2 of the paper).

    bertjax reproduce --config experiments/tables/table8.py:corpus=CASED,ner=CONLL --results runs/tables --plan
    bertjax table 8 --results runs/tables

The arguments are those of table5.py. Hardware and time: `--plan` says. Expected: fine-tuning hardly depends on it;
the feature-based approach suffers where all are [MASK], which it never sees.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments
from bertjax.reproduce import runs, scales
from bertjax.reproduce.table import Table

_COLUMNS = {"MNLI fine-tuning": "mnli", "SST-2 fine-tuning": "sst2", "NER fine-tuning": "ner"}
_FIELDS = ("mask_prob", "keep_prob", "random_prob")
_ROWS = ("80/10/10", "100/0/0", "80/0/20", "80/20/0", "0/20/80", "0/0/100")


@arguments(scale="small", corpus="", glue="", ner="")
def get_table(given: ConfigDict) -> Table:
    """The table for `scale=small,corpus=DIR,glue=DIR,ner=DIR`."""
    scale = scales.get_scale(given.scale)
    cells = []
    for row in _ROWS:
        shares = [
            f"--config.data.masking.{name}={int(share) / 100}"
            for name, share in zip(_FIELDS, row.split("/"), strict=True)
        ]
        name = f"mask_{row.replace('/', '_')}"
        usual = row == _ROWS[0]
        start = runs.bert(scale, given) if usual else runs.pretraining(scale, given, name, *shares)
        for column, task in _COLUMNS.items():
            cells.append(runs.metric_cell(row, column, task, runs.fine_tuning(scale, given, task, start)))
        on_top = runs.feature_based(scale)
        run = runs.fine_tuning(scale, given, "ner", start, variant=on_top.features, feature_head=on_top)
        cells.append(runs.metric_cell(row, "NER feature-based", "ner", run))
        cells.append(runs.perplexity_cell(row, start))
    notes = (
        "SST-2 and perplexity are not in the paper's table; perplexity is of text masked by the row's own shares",
        runs.PERPLEXITY_NOTE,
    )
    return Table("8", "", scale.description, tuple(cells), notes)
