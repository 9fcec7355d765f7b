"""From BERT to a modern encoder: the effect of one change per row, at equal training FLOPs.

    bertjax reproduce --config experiments/tables/modern.py:corpus=CASED,glue=GLUE,ner=CONLL \\
      --results runs/tables --plan
    bertjax table modern --results runs/tables

Each row is BERT with one change, so the effect of a change is the difference between its row and BERT. Local
attention and "BERT at 512" train half of their steps on rows of 512 tokens. The number of steps of each row is chosen
so that all rows have as many training FLOPs as BERT (`bertjax describe` prints them).

Models of running text are evaluated on running text. All others are evaluated on the same sentence pairs of 128 tokens,
with the same masks on 15 % of the tokens. The text is from the same held-out documents. Each fine-tuning run has the
seed of its pre-training run. The runs of the first seed are trained first.

Arguments: see table5.py. `helped` lists the changes of the last row, such as `helped=rotary+geglu`, by the names in
`_CHANGES`. At the scale `medium`, the table contains only BERT and the last row.

Hardware and time: printed by `--plan`.
"""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from bertjax.errors import UsageError
from bertjax.model.config import size_fields
from bertjax.model.flops import flops_per_position
from bertjax.presets import arguments
from bertjax.reproduce import runs, scales
from bertjax.reproduce.table import Cell, Run, Table
from bertjax.training.checkpoint_config import experiment_config

_COLUMNS = {"SST-2": "sst2", "MRPC": "mrpc", "QNLI": "qnli", "NER": "ner"}
_DROPOUT = ("model.hidden_dropout_prob", "model.attention_probs_dropout_prob")
# The scales pre-train without dropout, but in this table, all rows have the paper's dropout by default.
_BERT = dict.fromkeys(_DROPOUT, 0.1)
_AT_512 = {"phases": ({"share": 0.5}, {"share": 0.5, "seq_len": 512})}
# Replaced-token detection trains on rows of running text, which are not packed. As in the paper, the generator replaces
# all masked tokens.
_TEXT = {"data.objective": "none", "data.packing": False}
_ALL_MASKED = {"data.masking.mask_prob": 1.0, "data.masking.keep_prob": 0.0, "data.masking.random_prob": 0.0}
_REPLACED = {**_TEXT, **_ALL_MASKED, "data.objective": "rtd"}
# ModernBERT uses theta 10,000 for rows of up to 1,024 tokens.
_ROTARY = {"model.position_embedding_type": "rotary", "model.global_rope_theta": 10_000}
_BIASES = ("attention_bias", "mlp_bias", "norm_bias", "head_bias")
# Label and changed fields of each row.
_CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BERT", {}),
    "no_nsp": ("without NSP", {"data.objective": "pairs"}),
    "masks_30": ("30 % masks", {"data.masking.rate": 0.3}),
    "pre_norm": ("pre-norm", {"model.norm_first": True}),
    "rotary": ("rotary", _ROTARY),
    "geglu": ("GeGLU", {"model.gated_mlp": True}),
    "no_biases": ("no biases", {f"model.{name}": False for name in _BIASES}),
    "no_dropout": ("no dropout", dict.fromkeys(_DROPOUT, 0.0)),
    "stable_adamw": (
        "StableAdamW, constant/decay",
        {"optimizer.name": "stable_adamw", "optimizer.schedule": "warmup_stable_decay"},
    ),
    "bert_512": ("BERT at 512", _AT_512),
    "local_512": ("local/global at 512", {**_AT_512, "model.local_attention": 128}),
    "text": ("running text", _TEXT),
    "replaced": ("replaced tokens", _REPLACED),
    # With learned positions, models of running text learn too slowly to be compared.
    "rotary_text": ("rotary, running text", {**_ROTARY, **_TEXT}),
    "rotary_replaced": ("rotary, replaced tokens", {**_ROTARY, **_REPLACED}),
    # With learned positions, models of rows of 512 tokens also learn too slowly.
    "rotary_512": ("rotary at 512", {**_ROTARY, **_AT_512}),
    "rotary_local_512": ("rotary, local/global at 512", {**_ROTARY, **_AT_512, "model.local_attention": 128}),
}
_BEST = "all that helped"
_EVAL_ROWS = 4096


@arguments(scale="small", corpus="", glue="", ner="", helped="")
def get_table(args: ConfigDict) -> Table:
    """Returns the table for `scale=small,corpus=DIR,glue=DIR,ner=DIR,helped=NAME+NAME`."""
    scale = scales.get_scale(args.scale)
    helped = args.helped.split("+") if args.helped else []
    if unknown := [name for name in helped if name not in _CHANGES]:
        raise UsageError(f"unknown change helped={unknown[0]}; use some of {', '.join(_CHANGES)}")
    rows = dict(_CHANGES)
    if helped:
        rows["_".join(["best", *helped])] = (_BEST, {k: v for name in helped for k, v in _CHANGES[name][1].items()})
    if scale.name == scales.MEDIUM:
        rows = {name: row for name, row in rows.items() if row[0] in ("BERT", _BEST)}
    seeds = range(1, (3 if scale.name == scales.SMALL else scale.pretraining_seeds) + 1)
    cells, steps = [], {}
    bert = runs.pretraining(scale, args, *_with_flags("modern_bert", _BERT))
    for name, (row, changes) in rows.items():
        fields = _changed_fields(scale, args, changes, bert)
        starts = [runs.pretraining(scale, args, *_with_flags(f"modern_{name}", fields), seed=seed) for seed in seeds]
        flops = _flops(starts[0])
        starts = [dataclasses.replace(start, flops=flops) for start in starts]
        # A discriminator has no masked-LM head.
        evaluated = [_evaluation(start, 128) for start in starts] if changes.get("data.objective") != "rtd" else []
        cells.append(Cell(row, "perplexity", tuple(evaluated), "perplexity", 1.0))
        cells.append(Cell(row, "bits per byte", tuple(evaluated), "bits_per_byte", 1.0, digits=3))
        if changes.keys() >= _AT_512.keys():
            at_512 = tuple(_evaluation(start, 512) for start in starts)
            cells.append(Cell(row, "perplexity at 512", at_512, "perplexity", 1.0))
        for column, task in _COLUMNS.items():
            tuned = [
                runs.fine_tuning(scale, args, task, start, seed=seed) for seed, start in zip(seeds, starts, strict=True)
            ]
            metric = "accuracy" if task == "mrpc" else ""
            cells.append(runs.metric_cell(row, column, task, *tuned, metric=metric))
        cells.append(Cell(row, "TFLOPs", tuple(starts[:1]), "flops", 1e-12))
        cells.append(Cell(row, "seconds", tuple(starts), "seconds", 1.0, digits=0))
        steps[row] = _config(starts[0]).steps
    notes = (
        "each row is BERT (with dropout) with one change; compare local/global with the row at 512, replaced tokens "
        "with running text, and rows with rotary positions only with each other",
        "perplexity and bits per byte are measured on the same held-out pairs of 128 tokens with 15 % masks (models of "
        "running text: on rows of running text)",
        "TFLOPs and seconds are those of pre-training; seconds include evaluations and depend on the machine's load",
        f"steps: {', '.join(f'{row} {count:,}' for row, count in steps.items())}",
        *([f"{_BEST}: {', '.join(_CHANGES[name][0] for name in helped)}"] if helped else []),
    )
    description = scale.description.replace("in float32 ", "")
    return Table("modern", "From BERT to a modern encoder, one change per row", description, tuple(cells), notes)


def _changed_fields(scale: scales.Scale, args: ConfigDict, changes: dict[str, Any], bert: Run) -> dict[str, Any]:
    """Returns the config changes of a row: `changes`, and the number of steps that BERT's FLOPs allow."""
    fields = {**_BERT, **changes}
    if fields.get("model.gated_mlp"):
        # Three matrices of two thirds of the width have as many parameters as two matrices. Round to a multiple of 8.
        fields["model.intermediate_size"] = 8 * round(size_fields(scale.base)["intermediate_size"] / 12)
    share = _flops(bert) / _flops(runs.pretraining(scale, args, *_with_flags("modern", fields)))
    if share != 1:
        config = _config(bert)
        fields["steps"] = round(share * config.steps)
        fields["optimizer.warmup_steps"] = round(share * config.optimizer.warmup_steps)
    return fields


def _with_flags(name: str, fields: dict[str, Any]) -> tuple[str, ...]:
    return name, *(f"--config.{field}={value}" for field, value in fields.items())


def _config(run: Run) -> Any:
    return experiment_config(run.config, run.overrides)


def _flops(run: Run) -> float:
    """Returns the training FLOPs of a pre-training run, as counted by its objective."""
    config = _config(run)
    objective = config.objective_class.for_model(run.model, config.data)
    return sum(objective.step_cost(phase, phase.stop_step - phase.start_step).flops for phase in config.resolved_phases)


def _evaluation(start: Run, seq_len: int) -> Run:
    """Returns a run that evaluates the last checkpoint of `start`: one step with a learning rate of 0.

    Models of running text are evaluated on running text, because they have never seen segment B.
    """
    is_text = "--config.data.objective=none" in start.overrides
    fields = {
        **(_TEXT if is_text else {"data.objective": "pairs"}),
        "data.seq_len": seq_len,
        "data.batch_size": 4096 // seq_len,
        "data.eval_rows": _EVAL_ROWS,
        "model.dtype": "float32",
        "optimizer.learning_rate": 0.0,
        "optimizer.warmup_steps": 0,
        "steps": 1,
    }
    architecture = (flag for flag in start.overrides if flag.startswith("--config.model."))
    # The run evaluates before and after its step. Evaluation has a third of the FLOPs of training.
    tokens = 2 * _EVAL_ROWS * seq_len / 3
    return Run(
        name=f"evaluate{seq_len}/{start.name.rpartition('/')[2]}",
        config=start.config,
        overrides=(*architecture, *_with_flags("", fields)[1:]),
        init_from=start,
        model=start.model,
        flops=tokens * flops_per_position(start.model, seq_len),
        missing_data=start.missing_data,
    )
