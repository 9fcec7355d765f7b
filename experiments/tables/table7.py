"""Table 7: named-entity recognition, fine-tuned and feature-based (section 5.3 of the paper).

    bertjax reproduce --config experiments/tables/table7.py:corpus=CASED,ner=CONLL --results runs/tables --plan
    bertjax table 7 --results runs/tables

The checkpoints or the corpus must be cased. The feature-based rows compute hidden states of the frozen encoder once,
and train a two-layer BiLSTM on them. Our scores are measured on dev; `bertjax evaluate --config.data.eval_split=test`
evaluates on test.

`base` and `large`: see table1.py. Other arguments: see table5.py. Hardware and time: printed by `--plan`. Expected:
fine-tuning is best. The best features are the concatenation of the last four layers.
"""

from ml_collections import ConfigDict

from bertjax.model import feature_head
from bertjax.presets import arguments
from bertjax.reproduce import runs
from bertjax.reproduce.table import Table

_FEATURES = {
    "Embeddings": feature_head.EMBEDDINGS,
    "Second-to-Last Hidden": feature_head.SECOND_TO_LAST,
    "Last Hidden": feature_head.LAST,
    "Weighted Sum Last Four Hidden": feature_head.SUM_LAST_FOUR,
    "Concat Last Four Hidden": feature_head.CONCAT_LAST_FOUR,
    "Weighted Sum All 12 Layers": feature_head.SUM_ALL,
}


@arguments(scale="", corpus="", base="", large="", ner="")
def get_table(args: ConfigDict) -> Table:
    """Returns the table for `base=CKPT,large=CKPT,scale=SCALE,corpus=DIR,ner=DIR`."""
    scale = runs.scale_of(args)
    base, large = runs.start(scale, args, "base"), runs.start(scale, args, "large")
    rows = {
        "Fine-tuning BERT LARGE": runs.fine_tuning(scale, args, "ner", large),
        "Fine-tuning BERT BASE": runs.fine_tuning(scale, args, "ner", base),
    }
    for row, features in _FEATURES.items():
        head = runs.feature_based(scale, features)
        rows[row] = runs.fine_tuning(scale, args, "ner", base, variant=features, feature_head=head)
    cells = tuple(runs.metric_cell(row, "Dev", "ner", run) for row, run in rows.items())
    notes = (*runs.model_notes(scale, args), f"BiLSTMs have {scale.lstm_size} units per direction")
    return Table("7", "", runs.scale_note(scale, args), cells, notes)
