"""Figure 5: fine-tuning from intermediate pre-training checkpoints (section C.1 of the paper).

    bertjax reproduce --config experiments/tables/figure5.py:corpus=CORPUS,glue=GLUE --results runs/tables --plan
    bertjax table figure5 --results runs/tables --plot figure5.png

`task` is the fine-tuning task. The default is `mnli` at the paper's scale. At the small scale it is `sst2`, because the
SST-2 scores of small models differ more. Other arguments: see table5.py. Hardware and time: printed by `--plan`.

Expected: masked LM overtakes left-to-right after few steps, although it predicts fewer tokens per step.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments
from bertjax.reproduce import runs, scales
from bertjax.reproduce.table import Table


@arguments(scale="small", corpus="", glue="", squad="", ner="", task="")
def get_table(args: ConfigDict) -> Table:
    """Returns the figure for `scale=small,corpus=DIR,glue=DIR,squad=DIR,ner=DIR,task=mnli`."""
    scale = scales.get_scale(args.scale)
    task = args.task or ("mnli" if scale.name == scales.PAPER else "sst2")
    series = {
        "Masked LM": runs.pretraining(scale, args),
        "Left-to-right": runs.pretraining(scale, args, "ltr", *runs.LEFT_TO_RIGHT),
    }
    # Step 0 selects the last checkpoint, so that its runs have the same names as in other tables.
    checkpoints = {step: step if step < scale.figure5_steps[-1] else 0 for step in scale.figure5_steps}
    cells = tuple(
        runs.metric_cell(f"{step:,}", name, task, runs.fine_tuning(scale, args, task, start, step=checkpoint))
        for step, checkpoint in checkpoints.items()
        for name, start in series.items()
    )
    notes = () if task == "mnli" else (f"the paper fine-tunes on mnli; these runs fine-tune on {task}",)
    return Table("figure5", "Pre-training steps", scale.description, cells, notes)
