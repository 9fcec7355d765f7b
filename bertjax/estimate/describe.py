"""Description of a config as text: parameters, FLOPs, batches and schedule."""

import dataclasses
import math
from collections import Counter
from typing import Any

import flax.linen as nn
import jax

from bertjax.config.optimizer import SCHEDULES
from bertjax.model.config import ABSOLUTE, AUTO, LSTM, Architecture, ModelConfig
from bertjax.model.partitioning import resolve_auto
from bertjax.tasks.task import Task
from bertjax.training.cost import cost_before
from bertjax.training.freezing import trainable_shapes
from bertjax.training.optimizer import describe_head_steps, make_schedule
from bertjax.training.sharding import list_devices

# Architecture fields that `_describe_model` does not list as options, because the description prints them elsewhere.
_SIZES = {
    *("encoder", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("pad_vocab_to_multiple_of", "local_attention", "global_attn_every_n_layers"),
    *("global_rope_theta", "local_rope_theta"),
}
# Descriptions of architecture fields that differ from BERT's; {} is the field's value.
_WORDS = {
    "model_type": "family {}",
    "embedding_size": "embeddings of width {}",
    "embedding_norm": "no norm of the embeddings",
    "norm": "norm {}",
    "norm_bias": "norms without bias",
    "norm_first": "norms before the sub-layers",
    "first_attention_norm": "no norm before the first attention",
    "position_embedding_type": "{} positions",
    "num_key_value_heads": "{} key-value heads",
    "attention_bias": "attention without biases",
    "mlp_bias": "feed-forward without biases",
    "gated_mlp": "gated feed-forward",
    "lm_head": "{} language-model head",
    "tie_word_embeddings": "untied decoder",
    "decoder_bias": "decoder without bias",
    "head_bias": "head without bias",
    "pooler_act": "pooler with {}",
    "pooler_norm": "norm after the pooler",
    "token_pooler": "pooler before token-level outputs",
    "classifier_pooling": "pooling {}",
}


def describe_task(task: Task) -> str:
    """Describes a task as text: parameter counts by module, model, optimizer, schedule and total FLOPs."""
    model, optimizer = task.objective.model.config, task.config.optimizer
    params = _abstract_params(task)
    counts = parameter_counts(params, model.first_attention_norm)
    encoder = sum(count for name, count in counts.items() if name.startswith(("encoder", "pooler")))
    clipping = f"gradient clipping to norm {optimizer.clip_norm:g}" if optimizer.clip_norm else "no gradient clipping"
    sums = {**counts, "encoder and pooler": encoder, "total": sum(counts.values())}
    lines = [
        "parameters",
        *(f"  {name:<24}{count:>14,}" for name, count in sums.items()),
        f"vocabulary: {model.vocab_size:,} tokens, padded to {model.padded_vocab_size:,} embedding rows",
        f"model: {_describe_model(model)}",
        *task.notes,
        *describe_head_steps(optimizer),
        f"optimizer: {optimizer.name}, learning rate {optimizer.learning_rate:g}, weight decay "
        f"{optimizer.weight_decay:g}, {clipping}",
        *_describe_schedule(task),
    ]
    if optimizer.freeze_layers or optimizer.freeze:
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trainable_shapes(params, optimizer)))
        lines.append(f"trainable: {count:,} parameters; all others are frozen")
    return "\n".join(lines)


def _abstract_params(task: Task) -> Any:
    """Returns the shapes of a task's parameters, without vocabulary padding."""
    model = task.objective.model
    model = model.clone(config=dataclasses.replace(model.config, pad_vocab_to_multiple_of=1))
    list_devices()
    objective = dataclasses.replace(task.objective, model=model)
    return nn.unbox(jax.eval_shape(objective.init_params, jax.random.key(0)))


def parameter_counts(params: Any, first_attention_norm: bool) -> dict[str, int]:
    """Returns the number of parameters of each module, at most two levels deep."""
    counts: Counter[str] = Counter()
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        names = [entry.key for entry in path]
        # Without `first_attention_norm`, the stacked norms include an unused norm of the first layer.
        unused = math.prod(leaf.shape[1:]) if "attention_norm" in names and not first_attention_norm else 0
        counts["/".join(names[:2])] += math.prod(leaf.shape) - unused
    return counts


def _describe_model(model: ModelConfig) -> str:
    """Describes a model: layers, dtype, and architecture fields (except sizes) that differ from BERT's defaults."""
    layers, width = model.num_hidden_layers, model.hidden_size
    shape = (
        f"{layers} LSTMs per direction, hidden size {width} (sum of both directions)"
        if model.encoder == LSTM
        else f"{layers} layers, hidden size {width}, {model.num_attention_heads} heads of {model.head_size}, "
        f"feed-forward {model.intermediate_size}"
    )
    dtype = f"{resolve_auto(model).dtype} ({AUTO})" if model.dtype == AUTO else model.dtype
    defaults = vars(Architecture())
    changed = {name: getattr(model, name) for name in defaults if getattr(model, name) != defaults[name]}
    options = [_WORDS.get(name, f"{name} {{}}").format(value) for name, value in changed.items() if name not in _SIZES]
    if model.local_attention:
        num_local = sum(model.local_layers)
        options.append(f"local attention in a window of {model.local_attention} in {num_local} of {layers} layers")
    if not model.local_attention and model.position_embedding_type != ABSOLUTE:
        options.append(f"theta {model.global_rope_theta:,.0f}")
    elif model.local_attention:
        options.append(f"theta {model.global_rope_theta:,.0f}, in local layers {model.local_rope_theta:,.0f}")
    return ", ".join([shape, f"dtype {dtype}", *options])


def _describe_schedule(task: Task) -> list[str]:
    """Returns the lines that describe steps, warm-up and total FLOPs, or [] if `task.has_schedule` is False."""
    if not task.has_schedule:
        return []
    # Raise the same errors as training if the schedule is invalid.
    make_schedule(task.config.optimizer, task.warmup_steps, task.phase_schedule)
    cost = cost_before(task, task.total_steps)
    start = f" from step {task.config.optimizer.head_steps:,}" if task.config.optimizer.head_steps else ""
    shape = SCHEDULES[task.config.optimizer.schedule]
    return [
        f"schedule: {task.total_steps:,} steps, {task.warmup_steps:,} of them warm-up{start}, then {shape} to 0",
        f"run: {cost.rows:,} rows, {cost.positions:,} positions, {cost.flops:.3g} model FLOPs (forward and backward, "
        "matrix products)",
    ]
