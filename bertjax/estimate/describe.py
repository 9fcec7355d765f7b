"""A config in words and numbers: parameters, FLOPs, batch and schedule."""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax

from bertjax.config.run import RunConfig
from bertjax.model.config import LSTM, ModelConfig
from bertjax.tasks.task import Task
from bertjax.training.freezing import Frozen, check_frozen, count_trainable
from bertjax.training.optimizer import make_optimizer


def _abstract_params(task: Task) -> Any:
    model = task.objective.model
    model = model.clone(config=dataclasses.replace(model.config, pad_vocab_to_multiple_of=1))
    objective = dataclasses.replace(task.objective, model=model)
    return nn.unbox(jax.eval_shape(objective.init_params, jax.random.key(0)))


def parameter_counts(task: Task) -> dict[str, int]:
    """Parameters by module (two levels), the vocabulary's padding left out."""
    counts: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(_abstract_params(task))[0]:
        name = "/".join(entry.key for entry in path[:2])
        counts[name] = counts.get(name, 0) + math.prod(leaf.shape)
    return counts


def _layers(model: ModelConfig) -> str:
    if model.encoder == LSTM:
        return f"{model.num_hidden_layers} LSTMs in each direction, width {model.hidden_size} of both together"
    heads = f"{model.num_attention_heads} heads of {model.head_size}"
    return (
        f"{model.num_hidden_layers} layers, width {model.hidden_size}, {heads}, feed-forward {model.intermediate_size}"
    )


def describe_task(settings: RunConfig, task: Task) -> str:
    """Several lines for a person."""
    model = task.objective.model.config
    counts = parameter_counts(task)
    body = sum(count for name, count in counts.items() if name.startswith(("encoder", "pooler")))
    lines = ["parameters"]
    lines += [f"  {name:<24}{count:>14,}" for name, count in counts.items()]
    lines += [
        f"  {'encoder and pooler':<24}{body:>14,}",
        f"  {'all':<24}{sum(counts.values()):>14,}",
        f"vocabulary: {model.vocab_size:,} pieces, the table padded to {model.padded_vocab_size:,} rows",
        f"model: {_layers(model)}, dtype {model.dtype}",
    ]
    work = task.cost_before(task.total_steps)
    optimizer = settings.optimizer
    lines += [
        *task.notes,
        f"optimizer: {optimizer.name}, learning rate {optimizer.learning_rate:g} after {task.warmup_steps:,} "
        f"steps of warm-up, linear to 0 at step {task.total_steps:,}; weight decay {optimizer.weight_decay:g}, "
        f"clipped to norm {optimizer.clip_norm:g}",
        f"the whole run: {work.rows:,} rows, {work.positions:,} positions, {work.flops:.3g} FLOPs, forwards and "
        "backwards, matrix products only",
    ]
    frozen = make_optimizer(optimizer).frozen
    if frozen != Frozen():
        check_frozen(_abstract_params(task), frozen)
        count = count_trainable(_abstract_params(task), frozen)
        lines.append(f"trained: {count:,} parameters, the others stay as they are")
    return "\n".join(lines)
