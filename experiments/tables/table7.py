"""Table 7: named entities, fine-tuned and feature-based (section 5.3 of the paper).

    bertjax reproduce --config experiments/tables/table7.py:corpus=CASED,ner=CONLL --results runs/tables --plan
    bertjax table 7 --results runs/tables

A cased corpus. Feature-based: the encoder is frozen, and a BiLSTM of two layers stands on some of its layers, whose
states are computed once. The arguments are those of table5.py; ours are of dev, and `bertjax evaluate
--config.data.eval_split=test` has the test set.

Hardware and time: `--plan` says. Expected: fine-tuning best, and of the features the last four layers together.
"""

from ml_collections import ConfigDict

from bertjax.model import feature_head
from bertjax.presets import arguments
from bertjax.reproduce import runs, scales
from bertjax.reproduce.table import Table

_FEATURES = {
    "Embeddings": feature_head.EMBEDDINGS,
    "Second-to-Last Hidden": feature_head.SECOND_TO_LAST,
    "Last Hidden": feature_head.LAST,
    "Weighted Sum Last Four Hidden": feature_head.SUM_LAST_FOUR,
    "Concat Last Four Hidden": feature_head.CONCAT_LAST_FOUR,
    "Weighted Sum All 12 Layers": feature_head.SUM_ALL,
}


@arguments(scale="small", corpus="", ner="")
def get_table(given: ConfigDict) -> Table:
    """The table for `scale=small,corpus=DIR,ner=DIR`."""
    scale = scales.get_scale(given.scale)
    base, large = runs.bert(scale, given), runs.bert(scale, given, scale.large)
    rows = {
        "Fine-tuning BERT LARGE": runs.fine_tuning(scale, given, "ner", large),
        "Fine-tuning BERT BASE": runs.fine_tuning(scale, given, "ner", base),
    }
    for row, which in _FEATURES.items():
        on_top = runs.feature_based(scale, which)
        rows[row] = runs.fine_tuning(scale, given, "ner", base, variant=which, feature_head=on_top)
    cells = tuple(runs.metric_cell(row, "Dev", "ner", run) for row, run in rows.items())
    notes = (f"LARGE is {scale.large}; BiLSTMs of {scale.lstm_size} units in each direction",)
    return Table("7", "", scale.description, cells, notes)
