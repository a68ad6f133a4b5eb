"""Options that are one number, one number per head or one per layer and head, and their JSON form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

PerHead = float | tuple[float, ...]
PerLayer = tuple[tuple[float, ...], ...]


def freeze(value: Any) -> Any:
    """Numbers become floats; lists, arrays and tensors tuples of floats: hashable, comparable, fit for JSON.

    What is no number, or too large for a float, is returned as it is, for the check to name.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(freeze(entry) for entry in value)
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return value
    return value


def to_heads(option: str, value: PerHead | Tensor, like: Tensor) -> Tensor | float:
    """An option as a factor for scores or outputs of shape (B, H, N, ...).

    Args:
        option: name used in the error.
        value: a number, one number per head, or a (H,) tensor.
        like: query of shape (B, H, N, D), which gives H, the device and whether to compute in FP64 or FP32.

    Returns:
        A float as it is, otherwise a tensor of shape (1, H, 1, 1).

    Raises:
        ValueError: if there is not one number per head.
    """
    if isinstance(value, int | float):
        return float(value)
    heads = like.shape[1]
    tensor = (
        value if isinstance(value, Tensor) else torch.tensor(value, device=like.device, dtype=accumulate(like.dtype))
    )
    if tensor.shape != (heads,):
        raise ValueError(f"{option}: expected one number or one per head ({heads}), got {tuple(tensor.shape)}.")
    return tensor.to(accumulate(like.dtype)).view(1, heads, 1, 1)


def accumulate(dtype: torch.dtype) -> torch.dtype:
    """Type in which everything that is not a matrix product is computed: FP64 for FP64, otherwise FP32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_json(value: Any) -> Any:
    """JSON has no infinity: write it as the word."""
    if isinstance(value, tuple):
        return [to_json(entry) for entry in value]
    return "Infinity" if isinstance(value, float) and math.isinf(value) else value


def from_json(value: Any) -> Any:
    """Inverse of `to_json`."""
    if isinstance(value, list):
        return tuple(from_json(entry) for entry in value)
    return math.inf if value == "Infinity" else value


def is_per_layer(value: Any) -> bool:
    """Whether an option is a table, with a row for each layer."""
    return isinstance(value, tuple) and bool(value) and all(isinstance(row, tuple) for row in value)


def largest(value: PerHead | PerLayer) -> float:
    """Largest number of an option."""
    return max(map(largest, value)) if isinstance(value, tuple) else value


def smallest(value: PerHead) -> float:
    """Smallest number of an option."""
    return min(value) if isinstance(value, tuple) else value
