"""Experiment file for `bertjax reproduce` that defines a table with tiny runs."""

from pathlib import Path

from helpers.command_runs import EXPERIMENTS, overrides
from helpers.finetuning_data import glue_files

_TABLE = """
from bertjax.presets import arguments
from bertjax.reproduce.table import Cell, Run, Table

TINY = {tiny!r}

@arguments(glue={glue!r}, steps=2, all=False)
def get_table(args):
    first = Run("pretrain/first", "{experiments}/pretrain.py:size=L1_H16,seq_len=16,corpus={corpus},quick=true",
                ("--config.steps=2", "--config.eval_every=2", "--config.checkpoint_every=1", *TINY), flops=1e9)
    tuning = f"{experiments}/glue.py:task=cola,path={{args.glue or 'GLUE'}},grid=one,quick=true"
    missing = "" if args.glue else "CoLA, in a folder given with glue="
    fields = (f"--config.steps={{args.steps}}", *TINY)
    tuned = Run("cola/first", tuning, fields, first, seeds=2, flops=2e9, missing_data=missing)
    early = Run("cola/first-1", tuning, fields, first, 1, seeds=2, flops=2e9, missing_data=missing)
    singles = [
        Run(f"cola/seed{{n}}", tuning, (*fields, f"--config.seed={{n}}"), first, missing_data=missing) for n in (0, 1)
    ]
    both = Run("cola/both", members=tuple(singles), missing_data=missing)
    more = (Cell("No NSP", "SST-2", (early,), "accuracy"), Cell("ours", "SST-2", (both,), "accuracy"))
    return Table("5", "", "tiny", (
        Cell("BERT BASE", "LM perplexity", (first,), "perplexity", 1.0),
        Cell("BERT BASE", "SST-2", (tuned,), "accuracy"),
        *(more if args.all else ()),
        Cell("BERT BASE", "mean", (), "", mean_of=("LM perplexity", "SST-2")),
    ))
"""


def write_table(folder: Path, corpus: Path) -> Path:
    """Writes the experiment file of the table and its data, and returns the file."""
    tiny = [item for item in overrides(None) if "learning_rate" not in item]
    glue = glue_files(folder / "glue")
    content = _TABLE.format(tiny=tuple(tiny), glue=str(glue), experiments=EXPERIMENTS, corpus=corpus)
    (folder / "table.py").write_text(content)
    return folder / "table.py"
