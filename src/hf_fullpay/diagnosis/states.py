"""The hidden states of one pass through a model, at the input and the output of every block."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_fullpay.hf.blocks import blocks_of, watch_blocks
from hf_fullpay.hf.unwrap import no_cache
from hf_fullpay.hf.watch import Seen, attention_modules


@dataclass
class States:
    """What passed.

    Attributes:
        inputs, outputs: hidden states (B, N, width) of every block, in the order of calls.
        paths: path of every block called.
        layers: for every attention call the number of the block call that it was part of.
        result: what the model returned.
    """

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    result: Any = None

    @property
    def stack(self) -> range:
        """Block calls of the last list of blocks: the decoder of an encoder-decoder, the last stage of a pyramid. Their
        slots are the same tokens."""
        last = len(self.inputs) - 1
        first = last
        while first and self._place(first - 1) == self._place(last):
            first -= 1
        return range(first, last + 1)

    @property
    def elsewhere(self) -> list[str]:
        """A note, where blocks of other lists ran before."""
        if self.stack.start == 0:
            return []
        return [f"Only the blocks in {self._place(-1)[0]!r} were looked at: other blocks have other tokens."]

    def by_layer(self, values: list[float]) -> list[float]:
        """Numbers of the last blocks called as numbers of attention calls; NaN for those of other blocks."""
        known = dict(zip(range(len(self.inputs) - len(values), len(self.inputs)), values, strict=True))
        return [known.get(block, math.nan) for block in self.layers]

    def _place(self, call: int) -> tuple[str, int]:
        return self.paths[call].rpartition(".")[0], self.inputs[call].shape[1]


def record(
    model: nn.Module,
    inputs: dict[str, Tensor],
    *,
    graph: bool = False,
    change: Callable[[Tensor], Tensor] | None = None,
) -> States:
    """Run a model and keep its hidden states.

    Args:
        model: any Transformers model whose attention routes.
        inputs: its keyword arguments.
        graph: whether gradients with respect to the inputs of blocks can be asked for. They end at the first block.
        change: what goes into the first block instead.

    Raises:
        ValueError: for blocks that are not given hidden states.
    """
    found = States()

    def enter(index: int, hidden: Tensor) -> Tensor:
        if index == 0 and change is not None:
            hidden = change(hidden)
        # Models may be frozen, and every tower starts anew.
        if graph and (index == 0 or not hidden.requires_grad):
            hidden = hidden.detach().requires_grad_()
        found.inputs.append(hidden)
        return hidden

    with ExitStack() as stack:
        for path, block in blocks_of(model).items():
            note: Callable[..., None] = lambda *_, path=path: found.paths.append(path)  # noqa: E731
            stack.callback(block.register_forward_pre_hook(note).remove)
        for module in attention_modules(model):
            note = lambda *_: found.layers.append(len(found.paths) - 1)  # noqa: E731
            stack.callback(module.register_forward_pre_hook(note).remove)
        stack.enter_context(watch_blocks(model, enter, lambda _, hidden: found.outputs.append(hidden)))
        stack.enter_context(torch.set_grad_enabled(graph))
        found.result = model(**inputs, **no_cache(model))
    if not len(found.inputs) == len(found.outputs) == len(found.paths):
        raise ValueError(f"{type(model).__name__}: expected blocks that read and give hidden states, found others.")
    return found


def is_cross(seen: Seen) -> bool:
    """Whether an attention call looks at another sequence, which has no order in common with the queries."""
    return bool(getattr(seen.module, "is_cross_attention", False)) or seen.query.shape[2] != seen.key.shape[2]
