"""Figure 5: fine-tuning from checkpoints along pre-training (section C.1 of the paper).

    bertjax reproduce --config experiments/tables/figure5.py:corpus=CORPUS,glue=GLUE --results runs/tables --plan
    bertjax table figure5 --results runs/tables --plot figure5.png

`task` is the one that is fine-tuned, MNLI in the paper; SST-2 is what a small model shows more of. The other arguments
are those of table5.py.

Hardware and time: `--plan` says. Expected: masked LM, of which a step predicts fewer pieces, overtakes left-to-right
almost at once.
"""

from ml_collections import ConfigDict

from bertjax.presets import arguments
from bertjax.reproduce import runs, scales
from bertjax.reproduce.table import Table


@arguments(scale="small", corpus="", glue="", squad="", ner="", task="")
def get_table(given: ConfigDict) -> Table:
    """The figure for `scale=small,corpus=DIR,glue=DIR,squad=DIR,ner=DIR,task=mnli`."""
    scale = scales.get_scale(given.scale)
    task = given.task or ("mnli" if scale.name == scales.PAPER else "sst2")
    series = {
        "Masked LM": runs.bert(scale, given),
        "Left-to-right": runs.pretraining(scale, given, "ltr", *runs.LEFT_TO_RIGHT),
    }
    # The last is what other tables fine-tune from.
    taken = {step: step if step < scale.figure5_steps[-1] else 0 for step in scale.figure5_steps}
    cells = tuple(
        runs.metric_cell(f"{step:,}", name, task, runs.fine_tuning(scale, given, task, start, step=checkpoint))
        for step, checkpoint in taken.items()
        for name, start in series.items()
    )
    notes = () if task == "mnli" else (f"the paper fine-tunes on mnli, and these runs on {task}",)
    return Table("figure5", "Pre-training steps", scale.description, cells, notes)
