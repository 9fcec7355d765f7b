"""Table 5: what next-sentence prediction and seeing both sides are good for (section 5.1 of the paper).

    bertjax reproduce --config experiments/tables/table5.py:corpus=CORPUS,glue=GLUE --results runs/tables --plan
    bertjax table 5 --results runs/tables

`scale=paper` is the paper's, for a pod; `scale=small` is what two CPU cores finish in some hours. `corpus` is what
`bertjax prepare` wrote, `glue` and `squad` are the folders of the data sets, `ner` that of CoNLL-2003; a column whose
folder is not given is left out. The left-to-right Transformer stays one in fine-tuning; the BiLSTM on top of it is
random at first.

Hardware and time: `--plan` says. Expected: each row of the paper at or below the one before it, by a little without
next-sentence prediction, by much without the right side.
"""

from ml_collections import ConfigDict

from bertjax.model.feature_head import FeatureHead
from bertjax.presets import arguments
from bertjax.reproduce import runs, scales
from bertjax.reproduce.table import Table

_COLUMNS = {"MNLI-m": "mnli", "QNLI": "qnli", "MRPC": "mrpc", "SST-2": "sst2", "SQuAD": "squad", "NER": "ner"}


@arguments(scale="small", corpus="", glue="", squad="", ner="")
def get_table(given: ConfigDict) -> Table:
    """The table for `scale=small,corpus=DIR,glue=DIR,squad=DIR,ner=DIR`."""
    scale = scales.get_scale(given.scale)
    seeds = range(1, scale.pretraining_seeds + 1)
    bert = [runs.bert(scale, given, seed=seed) for seed in seeds]
    without_nsp = [runs.pretraining(scale, given, "no_nsp", *runs.WITHOUT_NSP, seed=seed) for seed in seeds]
    left = [runs.pretraining(scale, given, "ltr", *runs.LEFT_TO_RIGHT, seed=seed) for seed in seeds]
    rows = {"BERT BASE": bert, "No NSP": without_nsp, "LTR & No NSP": left, "+ BiLSTM": left}
    cells = []
    for row, starts in rows.items():
        on_top = {"variant": "bilstm", "feature_head": FeatureHead("", 1, scale.lstm_size)} if row == "+ BiLSTM" else {}
        for column, task in _COLUMNS.items():
            tuned = [runs.fine_tuning(scale, given, task, start, **on_top) for start in starts]
            # The paper gives accuracy for MRPC here.
            cells.append(runs.metric_cell(row, column, task, *tuned, metric="accuracy" if task == "mrpc" else ""))
        if not on_top:
            cells.append(runs.perplexity_cell(row, *starts))
    notes = (
        "NER (F1) and perplexity are not in the paper's table; perplexity is of masked pieces for masked LM and of all "
        "pieces for LTR, which is not the same question",
        runs.PERPLEXITY_NOTE,
    )
    return Table("5", "", scale.description, tuple(cells), notes)
