"""Table 2: SQuAD 1.1 (section 4.2 of the paper).

    bertjax reproduce --config experiments/tables/table2.py:scale=paper,corpus=CORPUS,squad=SQUAD,triviaqa=TRIVIAQA \\
      --results RESULTS --plan
    bertjax table 2 --results RESULTS

The table contains single models and ensembles, with and without prior fine-tuning on TriviaQA. The members of an
ensemble have different seeds for pre-training and fine-tuning: seven members at the paper's scale, three at the small
scale. With a released checkpoint, they differ in the seed for fine-tuning only. Our scores are measured on dev, because
the labels of the test set are on the SQuAD server.

`base` and `large`: see table1.py. `triviaqa` is the folder with qa/wikipedia-train.json and evidence/wikipedia. Other
arguments: see table5.py. Hardware and time: printed by `--plan`.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments
from bertjax.reproduce import runs
from bertjax.reproduce.table import Cell, Run, Table

_COLUMNS = {"Dev EM": "exact_match", "Dev F1": "f1"}


@arguments(scale="", corpus="", base="", large="", squad="", triviaqa="")
def get_table(args: ConfigDict) -> Table:
    """Returns the table for `base=CKPT,large=CKPT,scale=SCALE,corpus=DIR,squad=DIR,triviaqa=DIR`."""
    scale = runs.scale_of(args)
    base = runs.start(scale, args, "base")
    larges = [runs.start(scale, args, "large", seed=seed) for seed in range(1, scale.ensemble_size + 1)]
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
        "BERT LARGE (Ensemble)": Run("squad/ensemble", members=tuple(single)),
        "BERT LARGE (Sgl.+TriviaQA)": after_triviaqa[0],
        "BERT LARGE (Ens.+TriviaQA)": Run("squad/ensemble-triviaqa", members=tuple(after_triviaqa)),
    }
    cells: list[Cell] = [
        runs.metric_cell(row, column, "squad", run, metric=metric)
        for row, run in rows.items()
        for column, metric in _COLUMNS.items()
    ]
    return Table(
        "2",
        "",
        runs.scale_note(scale, args),
        tuple(cells),
        (*runs.model_notes(scale, args), f"ensembles have {scale.ensemble_size} members"),
    )
