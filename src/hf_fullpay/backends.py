"""Which implementation computes an attention call: one table, one choice.

    reference   the dense formulas: N x M memory, every plan; what tests compare with
    torch       PyTorch alone: scaled_dot_product_attention, and tiles of rows where scores or weights are changed
    sdpa        as torch, but refuses what needs more than scaled_dot_product_attention
    flex        FlexAttention, compiled: needs a C++ compiler on a CPU, where it has no backward pass
    triton      the kernels of fullpay_kernels: needs a GPU
    auto        triton for changed scores and weights on a GPU, where it serves them; else torch

What a backend does not serve stands in `LACKS`, by the features of a plan and of a call. A backend that was asked for
by name and cannot serve raises with the reason; auto passes it over, with one warning where the one it takes is slower.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_fullpay.core.errors import check_choice, wrong
from hf_fullpay.core.visible import Visible
from hf_fullpay.core.warning import warn
from hf_fullpay.payment import Clamp
from hf_fullpay.plan import AttentionPlan
from hf_fullpay.reach import Band, Blocks, Full
from hf_fullpay.scores import Bounded, DelayBias

BACKENDS = ("auto", "reference", "torch", "sdpa", "flex", "triton")
VARIABLE = "HF_FULLPAY_BACKEND"

LACKS: Mapping[str, Mapping[str, str]] = {
    "reference": {},
    "torch": {},
    "sdpa": {
        "bounded": "scaled_dot_product_attention cannot squash scores",
        "clamp": "scaled_dot_product_attention cannot clamp weights",
        "delay": "scaled_dot_product_attention would need the delay bias of all pairs",
        "own reach": "this reach takes more than one call of scaled_dot_product_attention",
    },
    "flex": {
        "median": "FlexAttention sees one score at a time, a median needs the row",
        "rescale": "FlexAttention sees one score at a time, slope='rescale' needs the row",
        "clamp": "FlexAttention cannot clamp weights",
        "delay": "times and delays are not handed to FlexAttention here",
        "own reach": "there is no block mask for this reach",
        "dropout": "FlexAttention has no dropout",
        "bias": "a bias per pair is not handed to FlexAttention here",
        "float64": "FlexAttention takes no float64",
        "training on a CPU": "FlexAttention has no backward pass on a CPU",
        "no compiler": "FlexAttention needs a C++ compiler on a CPU, and none was found",
    },
    "triton": {
        "rescale": "the kernels have no slope='rescale'",
        "delay": "the kernels have no delay bias",
        "chunks and windows": "there is no kernel for chunks and windows",
        "bounded relays": "the kernel of blocks takes ordinary scores alone",
        "relays of pairs": "the kernel of blocks takes no mask or bias of pairs",
        "relays of a cache": "the kernel of blocks takes as many queries as keys, not a step with a cache",
        "dropout": "the kernels have no dropout",
        "float64": "the kernels take no float64",
        "wide heads": "the kernels take heads up to a width of 256",
        "no GPU": "the kernels run on a GPU (or on a CPU, very slowly, with TRITON_INTERPRET=1)",
        "no kernels": "Triton could not be loaded: pip install 'hf-fullpay[triton]'",
        "failed check": "the kernels failed their check on this device",
    },
}


class _Choice:
    """Process-wide, so that a backward pass on another thread finds it, and a plain object, so that torch.compile
    guards on it (it neither traces context variables nor guards on thread-locals)."""

    name = os.environ.get(VARIABLE, "auto")


check_choice(f"environment variable {VARIABLE}", _Choice.name, BACKENDS)
_choice = _Choice()
_open: list[list[str]] = [[_choice.name]]  # the blocks that have not ended, the last begun last


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Compute attention with one backend inside a `with` block, in the whole process.

    Args:
        name: "auto", "reference", "torch", "sdpa", "flex" or "triton". The environment variable HF_FULLPAY_BACKEND sets
            it for a process.

    Raises:
        ValueError: for another name. A call that the backend does not serve raises with the reason.
    """
    check_choice("backend(name)", name, BACKENDS)
    entry = [name]
    _open.append(entry)
    _choice.name = name
    try:
        yield
    finally:
        # Blocks of threads and generators do not end in the order in which they began.
        _open[:] = [other for other in _open if other is not entry]
        _choice.name = _open[-1][0]


def chosen() -> str:
    """The backend asked for now."""
    return _choice.name


def features_of(plan: AttentionPlan) -> set[str]:
    """What a plan asks of a backend, in the words of `LACKS`."""
    found = {"own reach"} if not isinstance(plan.reach, Full | Band) else set()
    if found and not isinstance(plan.reach, Blocks):
        found.add("chunks and windows")
    if isinstance(plan.scores, Bounded):
        found |= {"bounded"} | ({plan.scores.centre, plan.scores.slope} & {"median", "rescale"})
        found |= {"bounded relays"} if isinstance(plan.reach, Blocks) else set()
    if isinstance(plan.payment, Clamp):
        found.add("clamp")
    if isinstance(plan.scores, DelayBias):
        found.add("delay")
    return found


def _features_of_call(
    name: str, plan: AttentionPlan, tensors: tuple[Tensor, ...], bias: Tensor | None, dropout: float,
    allowed: Visible | None,
) -> set[str]:  # fmt: skip
    query, key, value = tensors
    relays = isinstance(plan.reach, Blocks)
    cpu = query.device.type == "cpu"
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    asked = {
        "dropout": dropout > 0,
        "bias": bias is not None,
        "float64": query.dtype == torch.float64,
        "wide heads": max(query.shape[-1], value.shape[-1]) > 256,
        "training on a CPU": cpu and trains,
        "relays of pairs": relays and (bias is not None or (allowed is not None and allowed.dense is not None)),
        "relays of a cache": relays and query.shape[2] != key.shape[2],
    }
    if name == "flex":
        from hf_fullpay.fast.flex import has_compiler

        asked["no compiler"] = cpu and not has_compiler()
    if name == "triton":
        from hf_fullpay.fast import kernels

        asked["no kernels"] = not kernels.load()
        asked["no GPU"] = not asked["no kernels"] and query.device.type != "cuda" and not kernels.interpreted()
    return {feature for feature, is_asked in asked.items() if is_asked}


def lacks(
    name: str,
    plan: AttentionPlan,
    tensors: tuple[Tensor, ...] = (),
    bias: Tensor | None = None,
    dropout: float = 0.0,
    allowed: Visible | None = None,
) -> str | None:
    """Why a backend cannot serve a plan, or a call of it; None if it can."""
    features = features_of(plan)
    if tensors:
        features |= _features_of_call(name, plan, tensors, bias, dropout, allowed)
    reasons = [LACKS[name][feature] for feature in LACKS[name] if feature in features]
    return "; ".join(reasons) or None


def choose(
    plan: AttentionPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None,
    dropout: float,
    allowed: Visible | None = None,
) -> str:
    """The backend of one call, `allowed` being the keys that its mask allows; "sdpa" is answered as "torch".

    Raises:
        ValueError: if the one asked for cannot serve it.
    """
    call = (plan, (query, key, value), bias, dropout, allowed)
    if _choice.name != "auto":
        if reason := lacks(_choice.name, *call):
            raise wrong(
                "backend", f"one that serves {plan.describe()} on {query.device.type}", _choice.name,
                f'{reason[0].upper()}{reason[1:]}. Use backend("auto") or backend("torch").',
            )  # fmt: skip
        return "torch" if _choice.name == "sdpa" else _choice.name
    features = features_of(plan)
    if query.device.type != "cuda" or "own reach" in features or not features & {"bounded", "clamp"}:
        return "torch"
    from hf_fullpay.fast import kernels

    reason = lacks("triton", *call)
    if reason is None and not kernels.passes_check(query.device, query.dtype):
        reason = LACKS["triton"]["failed check"]
    if reason is None:
        return "triton"
    _warn_slower(reason)
    return "torch"


_told: set[str] = set()


def _warn_slower(reason: str) -> None:
    if reason not in _told:
        _told.add(reason)
        warn(
            f"{reason}. Tiles of PyTorch operations compute this attention instead: the same result, several times "
            'slower on a GPU. backend("torch") chooses them without this warning.'
        )
