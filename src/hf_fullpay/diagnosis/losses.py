"""The loss of a task, measured beside what a check compares."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hf_fullpay.core.errors import wrong
from hf_fullpay.diagnosis.inputs import Batch, real_tokens

Loss = str | Callable[[Any, Batch], Tensor] | None
Measured = tuple[float, float] | None  # a mean, and of how many


def labelled(model: nn.Module, batch: Batch, loss: Loss) -> tuple[Batch, Callable[[Any], Measured]]:
    """The arguments to call a model with, and how to read the loss off what it gives.

    Args:
        loss: None (labels where there are any), "task" (there must be), "lm" (labels are the inputs), or a function.

    Raises:
        ValueError: for labels that are asked for and missing, or a model that takes none.
    """
    if callable(loss):
        size = float(next(tensor.shape[0] for tensor in batch.values() if tensor.ndim))
        return batch, lambda output: (float(loss(output, batch)), size)
    if loss not in (None, "task", "lm"):
        raise wrong("loss", 'None, "task", "lm" or a function of output and batch', loss)
    if "labels" not in inspect.signature(type(model).forward).parameters:
        if loss is not None:
            raise wrong("loss", "a model with a head that takes labels", type(model).__name__)
        return {name: value for name, value in batch.items() if name != "labels"}, lambda output: None
    causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    if loss == "lm":
        if not causal:
            raise wrong('loss="lm"', "a causal language model", type(model).__name__)
        batch = batch | {"labels": _next_tokens(batch)}
    labels = batch.get("labels")
    if labels is None:
        if loss is not None:
            raise wrong('loss="task"', "labels in every batch", sorted(batch))
        return batch, lambda output: None
    weight = _weight(labels, causal)
    return batch, lambda output: (float(output.loss), weight)


def _next_tokens(batch: Batch) -> Tensor:
    """The inputs as labels, but for padding and for the first token after it, which nothing predicts."""
    if "input_ids" not in batch:
        raise wrong('loss="lm"', "batches with input_ids", sorted(batch))
    real, ids = real_tokens(batch), batch["input_ids"]
    if real is None:
        return ids
    return ids.masked_fill(~(real & real.roll(1, 1)), -100)


def _weight(labels: Tensor, causal: bool) -> float:
    """How many labels a mean goes over: -100 counts for nothing, nor does the first token, which nothing predicts."""
    if labels.is_floating_point():
        return float(labels.numel())
    return float((labels[:, 1:] if causal else labels).ne(-100).sum())
