"""Correctness before speed: a candidate that is wrong is not timed.

The bar: errors against float64 at most twice those that PyTorch makes in the same type, plus one unit of rounding of the
largest value. PyTorch is plain SDPA, and for a preset also its own formula written out densely, whichever errs more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cases import DTYPES, Call, Candidate, inputs, sdpa

_LABELS = ("output", "d query", "d key", "d value")


def wrong_preset(candidate: Candidate, dtype: str, device: str, width: int = 64, last_query: bool = False) -> str:
    """What is wrong with output or gradients on an odd length; an empty string if nothing is."""
    leaves = inputs(321, dtype, device, 1, 2, width)
    if last_query:
        leaves[0] = leaves[0].detach()[:, :, -1:].requires_grad_()
    exact = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]
    probe = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1)).to(device, DTYPES[dtype])
    plain, truth = sdpa(candidate.is_causal), candidate.truth or sdpa(candidate.is_causal)
    compute = _with_gradients if candidate.has_backward else _without
    want, plain_want = (compute(run, exact, probe.double().cpu()) for run in (truth, plain))
    got, eager_got, plain_got = (compute(run, leaves, probe) for run in (candidate.run, truth, plain))
    columns = zip(got, want, eager_got, plain_got, plain_want, strict=True)
    for label, (ours, wanted, eager, stock, stock_exact) in zip(_LABELS, columns, strict=False):
        if told := _beyond(ours, wanted, (eager, wanted), (stock, stock_exact)):
            return f"{label} {told}"
    return ""


@torch.no_grad()
def wrong_output(candidate: Candidate, leaves: list[Tensor]) -> str:
    """The same for the first head of the output that will be timed: nothing is compiled for the check alone."""
    plain, truth = sdpa(candidate.is_causal), candidate.truth or sdpa(candidate.is_causal)
    leaves = [leaf.detach() for leaf in leaves]
    head = [leaf[:1, :1] for leaf in leaves]
    exact = [leaf.double().cpu() for leaf in head]
    told = _beyond(candidate.run(*leaves)[:1, :1], truth(*exact), (plain(*head), plain(*exact)))
    return told and f"output {told}"


def _with_gradients(run: Call, leaves: list[Tensor], probe: Tensor) -> list[Tensor]:
    output = run(*leaves)
    return [output, *torch.autograd.grad((output * probe).sum(), leaves)]


@torch.no_grad()
def _without(run: Call, leaves: list[Tensor], probe: Tensor) -> list[Tensor]:
    return [run(*leaves)]


def _beyond(got: Tensor, want: Tensor, *pytorch: tuple[Tensor, Tensor]) -> str:
    error = _error(got, want)
    rounding = torch.finfo(got.dtype).eps * want.abs().max().item()
    allowed = 2 * max(_error(*pair) for pair in pytorch) + rounding
    return "" if error <= allowed else f"errs {error:.2e}, allowed {allowed:.2e}"


def _error(got: Tensor, exact: Tensor) -> float:
    return (got.double().cpu() - exact).abs().max().item()
