"""Delay bias: keys whose signal cannot have arrived yet, or arrived long ago, count less.

    s'_ij = s_ij - beta_h * |t_i - t_j - delay_ij|

t_i is when token i was measured and delay_ij how long what happens at j takes to reach i, both in one unit of the
user's; beta_h >= 0 is per that unit. Without times the slots of the sequence serve as times (token 5 was measured at
5), without delays these are zero: a distance bias that falls on both sides.

Promise: only differences of times count; a key one unit further out of step loses a factor exp(-beta_h) of its weight
against the others. With beta = 0 the scores are plain, bit for bit. Cost: the bias is computed in tiles of rows, so N x M
memory is needed for the delays alone, if there are any.

Source: the mask D_ij of Jiang et al. 2023 (PDFormer) as a soft bias with a learned strength, in the way of Press et al.
2022 (ALiBi). PDFormer's own way to use a delay, patterns of the past added to the keys, is `layers.PatternMatch`.

Dimensions: B batch, H heads, N queries, M keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_fullpay.core.errors import check_flag, check_number, wrong
from hf_fullpay.core.numbers import PerHead, freeze, largest, smallest
from hf_fullpay.core.places import query_slots
from hf_fullpay.core.visible import Visible


@dataclass(frozen=True)
class DelayBias:
    """Scores less beta times how far a key is out of step.

    A call of the model brings `times=` (B, n), one for each key, and `delays=` (n, n) or (B, n, n), row i for the query
    at token i; n counts all keys, those in a cache included (with a static cache: all its slots). What a call does not
    bring is taken from the plan, and else from the slots, which need nothing with a cache.

    Args:
        beta: strength per unit of time, at least 0, one number or one per head.
        learnable: whether `convert` makes beta a parameter (which needs a start above 0).
        times: n numbers for every call that brings none, or None.
        delays: n rows of n numbers for every call that brings none, or None.
    """

    beta: PerHead = 0.01
    learnable: bool = True
    times: tuple[float, ...] | None = None
    delays: tuple[tuple[float, ...], ...] | None = None
    kind: ClassVar[str] = "delay_bias"
    inputs: ClassVar[tuple[str, ...]] = ("times", "delays")

    def __post_init__(self) -> None:
        for option in ("beta", "times", "delays"):
            object.__setattr__(self, option, freeze(getattr(self, option)))
        check_number("DelayBias(beta=...)", self.beta, low=0, per_head=True)
        check_flag("DelayBias(learnable=...)", self.learnable)
        if self.learnable and smallest(self.beta) == 0:
            raise wrong(
                "DelayBias(beta=...)", "a number above 0 with learnable=True", self.beta,
                "A learned beta never reaches 0; start it small.",
            )  # fmt: skip
        if self.times is not None:
            _check_row("DelayBias(times=...)", self.times)
        if self.delays is not None:
            if not isinstance(self.delays, tuple) or not self.delays:
                raise wrong("DelayBias(delays=...)", "n rows of n numbers", self.delays)
            for row in self.delays:
                _check_row("DelayBias(delays=...)", row, len(self.delays))
        if self.times and self.delays and len(self.times) != len(self.delays):
            raise wrong("DelayBias(delays=...)", f"as many rows as times ({len(self.times)})", len(self.delays))

    @property
    def is_neutral(self) -> bool:
        """Nothing is subtracted."""
        return not self.learnable and largest(self.beta) == 0

    def misfit(self, *, cross: bool, causal: bool, image: bool) -> str | None:
        """Why these scores make no sense for an attention module; arguments as in `Full.misfit`."""
        return "a delay has no meaning in cross-attention, whose queries have no time among the keys" if cross else None


def _check_row(option: str, row: Any, length: int | None = None) -> None:
    if not isinstance(row, tuple) or not row or (length is not None and len(row) != length):
        raise wrong(option, "a list of one or more numbers" if length is None else f"rows of {length} numbers", row)
    for entry in row:
        check_number(option, entry)


def lags(query_times: Tensor, key_times: Tensor, delays: Tensor | None) -> Tensor:
    """t_i - t_j - delay_ij of (B, N) and (B, M) times, dense: (B or 1, N, M)."""
    lag = query_times[:, :, None] - key_times[:, None, :]
    return lag if delays is None else lag - delays


def clocks(
    options: DelayBias, given: Mapping[str, Tensor] | None, allowed: Visible, query: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Times of the queries (B or 1, N) and keys (B or 1, M), and delays (B or 1, N, M) or None.

    They are FP32, or FP64 where whole numbers or FP64 came: the difference of two large times must not be rounded away.

    Args:
        options: the plan's scores.
        given: what the call brought.
        allowed: the keys that the mask allows, which say at which slots the queries stand.
        query: (B, H, N, D), for the batch and the device.

    Raises:
        ValueError: for a wrong shape or type, NaN or infinity.
    """
    given = given or {}
    n_keys, device = allowed.n_keys, query.device
    slots = query_slots(allowed).amax(1)[..., 0].clamp_min(0)  # one for all heads
    times, delays = (_tensor(name, given.get(name), getattr(options, name), device) for name in options.inputs)
    if times is None:
        key_times = torch.arange(n_keys, device=device, dtype=torch.float32)[None]
        query_times = slots.to(torch.float32)
    else:
        _check_given("times", times, (query.shape[0], n_keys), 2)
        key_times = times
        query_times = times if allowed.n_queries == n_keys else _rows(times[..., None], slots)[..., 0]
    if delays is not None:
        delays = delays[None] if delays.ndim == 2 else delays
        _check_given("delays", delays, (query.shape[0], n_keys, n_keys), 3)
        delays = delays if allowed.n_queries == n_keys else _rows(delays, slots)
    return query_times, key_times, delays


def _tensor(name: str, given: Tensor | None, planned: Any, device: torch.device) -> Tensor | None:
    if given is None:
        if planned is None:
            return None
        given = torch.tensor(planned, dtype=torch.float64, device=device)
        given = given[None] if name == "times" else given
    if not isinstance(given, Tensor) or given.dtype == torch.bool or given.is_complex():
        raise ValueError(f"{name}: expected a tensor of numbers, got {getattr(given, 'dtype', type(given).__name__)}.")
    if name == "times" and not given.is_floating_point():
        given = given.long()
        given = given - given[..., :1]  # nanoseconds since 1970 are no FP64 numbers, their differences are
    wide = torch.float32 if given.dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.float64
    return given.to(device=device, dtype=wide)


def _check_given(name: str, tensor: Tensor, shape: tuple[int, ...], ndim: int) -> None:
    if tensor.ndim != ndim or tensor.shape[1:] != shape[1:] or tensor.shape[0] not in (1, shape[0]):
        also = f" or {shape[1:]}" if name == "delays" else ""
        raise ValueError(
            f"{name}: expected shape {shape}{also}, one for each key (cached ones included), got {tuple(tensor.shape)}."
        )
    if not torch.compiler.is_compiling() and not tensor.isfinite().all():
        raise ValueError(f"{name}: expected finite numbers, got NaN or infinity. Hide missing tokens by the mask.")


def _rows(tensor: Tensor, slots: Tensor) -> Tensor:
    """(B, M, X) at slots (B, N): (B, N, X)."""
    batch = max(tensor.shape[0], slots.shape[0])
    index = slots[..., None].expand(batch, -1, tensor.shape[2])
    return tensor.expand(batch, -1, -1).gather(1, index)
