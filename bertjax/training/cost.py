"""Cost of a run's steps without the backward pass of frozen parameters, for tokens seen, MFU and remaining time."""

import dataclasses

from bertjax.model.encoder import ENCODER
from bertjax.tasks.objectives.step_cost import StepCost
from bertjax.tasks.task import Task


def cost_before(task: Task, step: int) -> StepCost:
    """Returns the total cost of all steps before `step`."""
    head = task.full_cost_before(min(step, task.config.optimizer.head_steps))
    return _trained_cost(task, head, head_only=True) + _trained_cost(task, task.full_cost_before(step) - head)


def cost_of_step(task: Task, step: int) -> StepCost:
    """Returns the cost of step `step`, as if `optimizer.head_steps` were 0."""
    return _trained_cost(task, task.full_cost_before(step + 1) - task.full_cost_before(step))


def _trained_cost(task: Task, cost: StepCost, head_only: bool = False) -> StepCost:
    """Returns the cost of steps whose full cost is `cost`, without the backward pass of frozen layers.

    The output, the input gradient and the weight gradient of a dense layer take a third of its FLOPs each. The products
    of attention have no weights. Frozen layers compute only the output or, if the embeddings below them are trained,
    also input gradients. Steps with `head_only`, the steps before `optimizer.head_steps`, train only the head, whose
    own backward pass is not counted.
    """
    if task.cost_excludes_encoder:
        return cost
    optimizer = task.config.optimizer
    frozen = optimizer.freeze_layers / task.objective.model.config.num_hidden_layers
    if head_only or ENCODER in optimizer.freeze:
        dense_share, attention_share = 1 / 3, 1 / 3
    elif f"{ENCODER}/embeddings" in optimizer.freeze:
        dense_share, attention_share = 1 - frozen * 2 / 3, 1 - frozen * 2 / 3
    else:
        dense_share, attention_share = 1 - frozen / 3, 1.0
    attention_flops = cost.attention_flops * attention_share
    flops = (cost.flops - cost.attention_flops) * dense_share + attention_flops
    return dataclasses.replace(cost, flops=flops, attention_flops=attention_flops)
