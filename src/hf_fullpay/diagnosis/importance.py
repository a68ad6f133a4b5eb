"""Which heads of a model matter, and how far gradients flow: one pass back from the model's own loss.

Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?": the importance of a head is |output . gradient of
the loss|, mean over inputs. Here the product is taken token by token, and where there are no labels the loss is a random
projection of the last hidden states.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hf_fullpay.diagnosis.inputs import Batch
from hf_fullpay.diagnosis.report import Curve, Findings, Table
from hf_fullpay.diagnosis.settings import Settings
from hf_fullpay.diagnosis.states import States, record
from hf_fullpay.diagnosis.texts import cut_rows, real_slots
from hf_fullpay.hf.unwrap import body_of
from hf_fullpay.hf.watch import watch

DEAD = 0.01  # of the mean importance of a layer's heads


def check_heads(model: nn.Module, batches: list[Batch], settings: Settings) -> Findings:
    """`importance` [L][H], over the mean of a layer's heads; `dead_heads`, the share under a hundredth of it, and a table
    that names them; `gradient_norm` [L] at the input of every layer, and the curve "gradient_flow".

    Args:
        model: in eval mode; left as it was.
        batches: keyword arguments of the model, with labels where its own loss is to be taken; the first
            `settings.documents` rows are used.
        settings: documents, seed.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    totals: list[Tensor] = []
    norms: list[Tensor] = []  # (sum, tokens) of every block
    notes: dict[str, None] = {}
    for inputs in cut_rows(model, batches, settings.documents):
        outputs: list[Tensor] = []
        called = model if "labels" in inputs else body_of(model)
        with watch(called, lambda seen, outputs=outputs: outputs.append(seen.output)):  # type: ignore[misc]
            states = record(called, inputs, graph=True)
        loss, of = _loss(states, inputs, generator)
        if not loss.isfinite():
            return Findings(notes=[f"Heads were left out: {of} is {float(loss)}."])
        notes[f"Importance of heads and gradient flow are those of {of}."] = None
        gradients = torch.autograd.grad(loss, [*outputs, *states.inputs], allow_unused=True)
        by_head = [
            _importance(output, gradient, _real(inputs, states, output, block))
            for output, gradient, block in zip(outputs, gradients, states.layers, strict=False)
        ]
        by_block = [
            _norm(hidden, gradient, _real(inputs, states, hidden, block))
            for block, (hidden, gradient) in enumerate(zip(states.inputs, gradients[len(outputs) :], strict=True))
        ]
        totals = [a + b for a, b in zip(totals, by_head, strict=True)] if totals else by_head
        norms = [a + b for a, b in zip(norms, by_block, strict=True)] if norms else by_block
    importance = [_relative(total).tolist() for total in totals]
    flow = [float(total / tokens) for total, tokens in norms]
    heads = [
        (layer, head, number)
        for layer, row in enumerate(importance)
        for head, number in enumerate(row)
        if not math.isnan(number)
    ]
    dead = [[layer, head, number] for layer, head, number in heads if number < DEAD]
    found = Findings(
        values={"importance": importance, "gradient_norm": states.by_layer(flow)},
        curves={
            "gradient_flow": Curve(
                "Gradient at the input of every layer", "layer", "norm, mean over tokens",
                [float(layer) for layer in range(len(flow))], {"gradient norm": flow},
                log_y=all(number > 0 for number in flow),
            )
        },
        notes=list(notes),
    )  # fmt: skip
    if heads:
        found.values["dead_heads"] = len(dead) / len(heads)
    if dead:
        found.tables["dead_heads"] = Table("Dead heads", ["layer", "head", "importance"], dead)
    return found


@torch.enable_grad()
def _loss(states: States, inputs: Batch, generator: torch.Generator) -> tuple[Tensor, str]:
    """The model's own loss, or a random projection of the last hidden states of all real tokens; and its name."""
    own = getattr(states.result, "loss", None) if "labels" in inputs else None
    if own is not None:
        return own, "the model's own loss"
    last = states.outputs[-1]
    real = real_slots(inputs, last.shape[1])
    shown = last.flatten(0, 1) if real is None else last[real]  # padding may hold anything, NaN too
    direction = torch.randn(shown.shape, generator=generator).to(shown)
    return (shown * direction).sum(), "a random projection, for want of labels"


def _real(inputs: Batch, states: States, tensor: Tensor, block: int) -> Tensor:
    """Which tokens of a tensor (B, N, ...) count, (B, N) bool."""
    real = real_slots(inputs, tensor.shape[1], decoder=block in states.stack)
    if real is None or len(real) != len(tensor):  # the windows of a Swin
        return torch.ones(tensor.shape[:2], dtype=torch.bool, device=tensor.device)
    return real.to(tensor.device)


def _importance(output: Tensor, gradient: Tensor | None, real: Tensor) -> Tensor:
    """(H,) of (B, N, H, D), FP64."""
    if gradient is None:
        return torch.full((output.shape[2],), math.nan, dtype=torch.float64)
    product = (output.detach().double() * gradient).sum(-1).abs()
    return product[real].sum(0).cpu()


def _norm(hidden: Tensor, gradient: Tensor | None, real: Tensor) -> Tensor:
    """Sum of the norms of tokens (B, N, width), and their number."""
    if gradient is None:
        return torch.full((2,), math.nan, dtype=torch.float64)
    norms = torch.linalg.vector_norm(gradient[real], dim=-1, dtype=torch.float64)
    return torch.tensor([float(norms.sum()), len(norms)], dtype=torch.float64)


def _relative(total: Tensor) -> Tensor:
    """Over the mean; zeros where no head of a layer matters."""
    return total / total.mean() if total.any() else total
