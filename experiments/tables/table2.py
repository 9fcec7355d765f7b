"""Table 2: SQuAD 1.1 (section 4.2 of the paper).

    bertjax reproduce --config experiments/tables/table2.py:scale=paper,corpus=CORPUS,squad=SQUAD,triviaqa=TRIVIAQA \\
      --results RESULTS --plan
    bertjax table 2 --results RESULTS

Single models, ensembles of seven with different pre-trainings and seeds of fine-tuning, and both after a fine-tuning on
TriviaQA. `triviaqa` is the folder with qa/wikipedia-train.json and evidence/wikipedia; the other arguments are those of
table5.py. Ours are of dev; the test set is SQuAD's server's.

Hardware and time: `--plan` says.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments
from bertjax.reproduce import runs, scales
from bertjax.reproduce.table import Cell, Run, Table

_COLUMNS = {"Dev EM": "exact_match", "Dev F1": "f1"}


@arguments(scale="small", corpus="", squad="", triviaqa="")
def get_table(given: ConfigDict) -> Table:
    """The table for `scale=small,corpus=DIR,squad=DIR,triviaqa=DIR`."""
    scale = scales.get_scale(given.scale)
    base = runs.bert(scale, given)
    larges = [runs.bert(scale, given, scale.large, seed=seed) for seed in range(1, scale.ensemble_size + 1)]
    trivia = [runs.fine_tuning(scale, given, "triviaqa", large, seed=seed) for seed, large in enumerate(larges)]

    def tuned(starts: list[Run], variant: str = "") -> list[Run]:
        return [
            runs.fine_tuning(scale, given, "squad", start, variant=variant, seed=seed)
            for seed, start in enumerate(starts)
        ]

    single, after = tuned(larges), tuned(trivia, "triviaqa")
    rows = {
        "BERT BASE (Single)": runs.fine_tuning(scale, given, "squad", base),
        "BERT LARGE (Single)": runs.fine_tuning(scale, given, "squad", larges[0]),
        "BERT LARGE (Ensemble)": runs.ensemble("squad", "ensemble", single),
        "BERT LARGE (Sgl.+TriviaQA)": after[0],
        "BERT LARGE (Ens.+TriviaQA)": runs.ensemble("squad", "ensemble-triviaqa", after),
    }
    cells: list[Cell] = [
        runs.metric_cell(row, column, "squad", run, metric=metric)
        for row, run in rows.items()
        for column, metric in _COLUMNS.items()
    ]
    return Table(
        "2", "", scale.description, tuple(cells), (f"LARGE is {scale.large}, ensembles are of {scale.ensemble_size}",)
    )
