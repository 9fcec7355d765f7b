"""Table 2: SQuAD 1.1 (section 4.2 of the paper).

    bertjax reproduce --config experiments/tables/table2.py:scale=paper,corpus=CORPUS,squad=SQUAD,triviaqa=TRIVIAQA \\
      --results RESULTS --plan
    bertjax table 2 --results RESULTS

The table contains single models and ensembles, with and without prior fine-tuning on TriviaQA. The members of an
ensemble have different seeds for pre-training and fine-tuning: seven members at the paper's scale, three at the small
scale. Our scores are measured on dev, because the labels of the test set are on the SQuAD server.

`triviaqa` is the folder with qa/wikipedia-train.json and evidence/wikipedia. Other arguments: see table5.py. Hardware
and time: printed by `--plan`.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments
from bertjax.reproduce import runs, scales
from bertjax.reproduce.table import Cell, Run, Table

_COLUMNS = {"Dev EM": "exact_match", "Dev F1": "f1"}


@arguments(scale="small", corpus="", squad="", triviaqa="")
def get_table(args: ConfigDict) -> Table:
    """Returns the table for `scale=small,corpus=DIR,squad=DIR,triviaqa=DIR`."""
    scale = scales.get_scale(args.scale)
    base = runs.bert(scale, args)
    larges = [runs.bert(scale, args, scale.large, seed=seed) for seed in range(1, scale.ensemble_size + 1)]
    trivia = [runs.fine_tuning(scale, args, "triviaqa", large, seed=seed) for seed, large in enumerate(larges)]

    def fine_tuned(starts: list[Run], variant: str = "") -> list[Run]:
        return [
            runs.fine_tuning(scale, args, "squad", start, variant=variant, seed=seed)
            for seed, start in enumerate(starts)
        ]

    single, after_triviaqa = fine_tuned(larges), fine_tuned(trivia, "triviaqa")
    rows = {
        "BERT BASE (Single)": runs.fine_tuning(scale, args, "squad", base),
        "BERT LARGE (Single)": runs.fine_tuning(scale, args, "squad", larges[0]),
        "BERT LARGE (Ensemble)": runs.ensemble("squad", "ensemble", single),
        "BERT LARGE (Sgl.+TriviaQA)": after_triviaqa[0],
        "BERT LARGE (Ens.+TriviaQA)": runs.ensemble("squad", "ensemble-triviaqa", after_triviaqa),
    }
    cells: list[Cell] = [
        runs.metric_cell(row, column, "squad", run, metric=metric)
        for row, run in rows.items()
        for column, metric in _COLUMNS.items()
    ]
    return Table(
        "2",
        "",
        scale.description,
        tuple(cells),
        (f"LARGE is {scale.large}; ensembles have {scale.ensemble_size} members",),
    )
