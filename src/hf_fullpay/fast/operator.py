"""What passes that recompute their tiles share: two operators of torch, which a compiler takes whole, and dropout that the
backward pass draws again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def names_of(schema: str) -> list[str]:
    """Names in a schema such as "Tensor query, float scaling"."""
    return [entry.split()[1] for entry in schema.split(", ")]


def register(
    name: str,
    schema: str,
    *,
    differentiable: int,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., list[Tensor]],
    kept: Sequence[str] = (),
) -> None:
    """Register hf_fullpay::<name>_forward and its derivative <name>_backward, which has none of its own: asking for second
    derivatives raises.

    Args:
        name: of the pair.
        schema: of the inputs, tensors first.
        differentiable: number of inputs, the first ones, that get gradients.
        forward: inputs to the output, and to what is kept after it.
        fake: the same without computing.
        backward: (gradient of the output, what was kept, list of needs, inputs) to gradients, empty where not needed.
        kept: names of the outputs after the first, which the backward pass reads.
    """
    entries = schema.split(", ")
    tensors = sum(entry.startswith("Tensor") for entry in entries)

    def fake_backward(d_out: Tensor, *rest: Any) -> list[Tensor]:
        needs, given = rest[len(kept)], rest[len(kept) + 1 :]
        return [torch.empty_like(x) if need else d_out.new_empty(0) for x, need in zip(given, needs, strict=False)]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:tensors], *(output[1:] if kept else ()))
        ctx.options = inputs[tensors:]

    def differentiate(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        needs, saved = list(ctx.needs_input_grad[:differentiable]), ctx.saved_tensors
        grads = derivative(d_out, *saved[tensors:], needs, *saved[:tensors], *ctx.options)
        grads = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
        return *grads, *[None] * (len(entries) - len(grads))

    results = f"({', '.join(['Tensor'] * (1 + len(kept)))})" if kept else "Tensor"
    operator = torch.library.custom_op(
        f"hf_fullpay::{name}_forward", forward, mutates_args=(), schema=f"({schema}) -> {results}"
    )
    operator.register_fake(fake)
    operator.register_autograd(differentiate, setup_context=setup)
    before = "".join(f"Tensor {one}, " for one in ("d_out", *kept))
    derivative = torch.library.custom_op(
        f"hf_fullpay::{name}_backward", backward, mutates_args=(),
        schema=f"({before}bool[] needs, {schema}) -> Tensor[]",
    )  # fmt: skip
    derivative.register_fake(fake_backward)


class Dropout:
    """Factors of the dropout, the same in both passes, which visit their tiles in the same order.

    Args:
        seed: of the draws; None for no dropout.
        probability: of dropping a weight.
        device: where factors are drawn.
    """

    def __init__(self, seed: Tensor | None, probability: float, device: torch.device) -> None:
        self.keep = 1.0 - probability
        self.generator = None if seed is None else torch.Generator(device).manual_seed(int(seed))

    def factors(self, like: Tensor) -> Tensor | None:
        """0 or 1 / (1 - probability) for each weight; None without dropout."""
        if self.generator is None:
            return None
        return torch.empty_like(like).bernoulli_(self.keep, generator=self.generator).div_(self.keep)
