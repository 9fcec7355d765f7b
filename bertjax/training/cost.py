"""Cost of training steps without the backward pass of frozen layers. Used for token counts, MFU and time left."""

import dataclasses

from bertjax.model.encoder import ENCODER
from bertjax.tasks.objectives.step_cost import StepCost
from bertjax.tasks.task import Task


def cost_before(task: Task, step: int) -> StepCost:
    """Returns the total cost of all steps before `step`."""
    head = task.unfrozen_cost_before(min(step, task.config.optimizer.head_steps))
    return _trained_cost(task, head, head_only=True) + _trained_cost(task, task.unfrozen_cost_before(step) - head)


def cost_of_step(task: Task, step: int) -> StepCost:
    """Returns the cost of step `step`, as if `optimizer.head_steps` were 0."""
    return _trained_cost(task, task.unfrozen_cost_before(step + 1) - task.unfrozen_cost_before(step))


def _trained_cost(task: Task, cost: StepCost, head_only: bool = False) -> StepCost:
    """Subtracts the backward pass of frozen layers from `cost`, the cost of steps that train all parameters.

    A dense layer spends a third of its FLOPs on each of output, input gradient and weight gradient. Attention products
    have no weights. Frozen layers compute only the output or, if the embeddings below them are trained, also input
    gradients. With `head_only`, for the first `optimizer.head_steps` steps, only the head is trained. The backward pass
    of the head itself is not counted.
    """
    if task.uses_frozen_features:
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
