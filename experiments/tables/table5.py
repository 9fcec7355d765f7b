"""Table 5: effect of next-sentence prediction and bidirectional attention (section 5.1 of the paper).

    bertjax reproduce --config experiments/tables/table5.py:corpus=CORPUS,glue=GLUE --results runs/tables --plan
    bertjax table 5 --results runs/tables

Arguments:
- scale: `small` (default; hours on two CPU cores), `medium` (a day on two CPU cores) or `paper` (needs a TPU pod).
- corpus: output of `bertjax prepare`.
- glue, squad, ner: folders of GLUE, SQuAD 1.1 and CoNLL-2003; columns without a folder are skipped.

The left-to-right model remains left-to-right in fine-tuning. The BiLSTM is randomly initialized for fine-tuning.

Hardware and time: printed by `--plan`. Expected: scores drop slightly without next-sentence prediction, and clearly
with left-to-right attention.
"""

from ml_collections import ConfigDict

from bertjax.model.feature_head import FeatureHead
from bertjax.presets import arguments
from bertjax.reproduce import runs, scales
from bertjax.reproduce.table import Table

_COLUMNS = {"MNLI-m": "mnli", "QNLI": "qnli", "MRPC": "mrpc", "SST-2": "sst2", "SQuAD": "squad", "NER": "ner"}


@arguments(scale="small", corpus="", glue="", squad="", ner="")
def get_table(args: ConfigDict) -> Table:
    """Returns the table for `scale=small,corpus=DIR,glue=DIR,squad=DIR,ner=DIR`."""
    scale = scales.get_scale(args.scale)
    seeds = range(1, scale.pretraining_seeds + 1)
    bert = [runs.pretraining(scale, args, seed=seed) for seed in seeds]
    without_nsp = [runs.pretraining(scale, args, "no_nsp", *runs.WITHOUT_NSP, seed=seed) for seed in seeds]
    left = [runs.pretraining(scale, args, "ltr", *runs.LEFT_TO_RIGHT, seed=seed) for seed in seeds]
    rows = {"BERT BASE": bert, "No NSP": without_nsp, "LTR & No NSP": left, "+ BiLSTM": left}
    cells = []
    for row, starts in rows.items():
        bilstm = {"variant": "bilstm", "feature_head": FeatureHead("", 1, scale.lstm_size)} if row == "+ BiLSTM" else {}
        for column, task in _COLUMNS.items():
            tuned = [runs.fine_tuning(scale, args, task, start, **bilstm) for start in starts]
            # Unlike Table 1, the paper's Table 5 reports accuracy for MRPC.
            cells.append(runs.metric_cell(row, column, task, *tuned, metric="accuracy" if task == "mrpc" else ""))
        if not bilstm:
            cells.append(runs.perplexity_cell(row, *starts))
    notes = (
        "NER (F1) and perplexity are not in the paper's table; perplexities of LTR (all tokens) and of the other rows "
        "(masked tokens) cannot be compared",
        runs.PERPLEXITY_NOTE,
    )
    return Table("5", "", scale.description, tuple(cells), notes)
