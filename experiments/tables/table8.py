"""Table 8: effect of the masking strategy (section C.2 of the paper).

    bertjax reproduce --config experiments/tables/table8.py:corpus=CASED,ner=CONLL --results runs/tables --plan
    bertjax table 8 --results runs/tables

Arguments: see table5.py. Hardware and time: printed by `--plan`. Expected: fine-tuning scores hardly change. The
feature-based score is lower with 100 % [MASK], because the inputs of the frozen encoder never contain [MASK].
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments
from bertjax.reproduce import runs, scales
from bertjax.reproduce.table import Table

_COLUMNS = {"MNLI fine-tuning": "mnli", "SST-2 fine-tuning": "sst2", "NER fine-tuning": "ner"}
_FIELDS = ("mask_prob", "keep_prob", "random_prob")
_ROWS = ("80/10/10", "100/0/0", "80/0/20", "80/20/0", "0/20/80", "0/0/100")


@arguments(scale="small", corpus="", glue="", ner="")
def get_table(args: ConfigDict) -> Table:
    """Returns the table for `scale=small,corpus=DIR,glue=DIR,ner=DIR`."""
    scale = scales.get_scale(args.scale)
    cells = []
    for row in _ROWS:
        masking = [
            f"--config.data.masking.{name}={int(percent) / 100}"
            for name, percent in zip(_FIELDS, row.split("/"), strict=True)
        ]
        name = f"mask_{row.replace('/', '_')}"
        start = runs.pretraining(scale, args, name, *masking) if row != _ROWS[0] else runs.pretraining(scale, args)
        for column, task in _COLUMNS.items():
            cells.append(runs.metric_cell(row, column, task, runs.fine_tuning(scale, args, task, start)))
        head = runs.feature_based(scale)
        run = runs.fine_tuning(scale, args, "ner", start, variant=head.features, feature_head=head)
        cells.append(runs.metric_cell(row, "NER feature-based", "ner", run))
        cells.append(runs.perplexity_cell(row, start))
    notes = (
        "SST-2 and perplexity are not in the paper's table; perplexity is measured with each row's own masking",
        runs.PERPLEXITY_NOTE,
    )
    return Table("8", "", scale.description, tuple(cells), notes)
