"""What the kernels take: every argument is checked before a launch, and an error names it.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D and Dv widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import interpreted

MAX_WIDTH = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OLDEST = (8, 0)  # CUDA compute capability: bfloat16 and asynchronous copies


def check_width_and_dtype(name: str, tensor: Tensor) -> None:
    """Raise unless the kernels take a tensor of this shape and dtype, on this device."""
    if tensor.ndim != 4:
        raise ValueError(f"{name}: expected (batch, heads, length, width), got shape {tuple(tensor.shape)}.")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name}: expected float32, float16 or bfloat16, got {tensor.dtype}.")
    if not 0 < tensor.shape[3] <= MAX_WIDTH:
        raise ValueError(f"{name}: expected a width from 1 to {MAX_WIDTH}, got {tensor.shape[3]}.")
    if interpreted():
        if tensor.device.type != "cpu":
            raise ValueError(f"{name}: expected a CPU tensor under TRITON_INTERPRET=1, got {tensor.device}.")
        return
    if tensor.device.type != "cuda":
        raise ValueError(f"{name}: expected a tensor on a GPU (or TRITON_INTERPRET=1), got {tensor.device}.")
    if not torch.version.hip and torch.cuda.get_device_capability(tensor.device) < OLDEST:
        have = torch.cuda.get_device_capability(tensor.device)
        raise ValueError(f"{name}: expected a GPU of compute capability {OLDEST} or more, got {have}.")


def check_tensors(query: Tensor, key: Tensor, value: Tensor, keys: Tensor | None) -> None:
    """Raise unless the tensors fit together, and to the kernels."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_width_and_dtype(name, tensor)
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name}: expected {query.dtype} as in query, got {tensor.dtype}.")
    check_devices(query, {"key": key, "value": value, "keys": keys})
    batch, heads, _, dims = query.shape
    groups, n_keys = key.shape[1:3]
    if key.shape[0] != batch or key.shape[3] != dims:
        raise ValueError(f"key: expected batch {batch} and width {dims} as in query, got {tuple(key.shape)}.")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value: expected {(batch, groups, n_keys)} and a width, got {tuple(value.shape)}.")
    if groups == 0 or heads % groups:
        raise ValueError(f"key: expected a number of heads that divides the {heads} query heads, got {groups}.")
    check_keys(keys, batch, n_keys)


def check_devices(like: Tensor, others: dict[str, Tensor | None]) -> None:
    """Raise unless all are on one device: a kernel would read an address of another as its own."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != like.device:
            raise ValueError(f"{name}: expected device {like.device} as in the other tensors, got {tensor.device}.")


def check_keys(keys: Tensor | None, batch: int, n_keys: int) -> None:
    """Raise unless the key padding fits."""
    if keys is not None and (keys.dtype != torch.bool or keys.shape != (batch, n_keys)):
        raise ValueError(f"keys: expected bool of shape {(batch, n_keys)}, got {keys.dtype} {tuple(keys.shape)}.")


def check_broadcast(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless the tensor broadcasts to a shape."""
    fits = tensor.ndim == 4 and all(have in (1, want) for have, want in zip(tensor.shape, shape, strict=True))
    if not fits:
        raise ValueError(f"{name}: expected a shape that broadcasts to {tuple(shape)}, got {tuple(tensor.shape)}.")


def check_segments(cu_seqlens: Tensor | None) -> None:
    """Raise unless these are starts of packed sequences."""
    if cu_seqlens is not None and (cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype != torch.int32):
        raise ValueError(
            f"cu_seqlens: expected int32 of shape (S + 1,), got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}."
        )


def check_call(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor | None, mask: Tensor | None, bias: Tensor | None,
    offset: int | None, window: int | None, cu_seqlens: Tensor | None, mean: Tensor | None,
    rows: dict[str, Tensor | None],
) -> None:  # fmt: skip
    """Raise unless the arguments of `attention` fit; `rows` are its row numbers by name, those that the caller has."""
    check_tensors(query, key, value, keys)
    check_devices(query, {"mask": mask, "bias": bias, "cu_seqlens": cu_seqlens, "mean": mean, **rows})
    batch, heads, queries, _ = query.shape
    groups, n_keys = key.shape[1:3]
    pairs = (batch, heads, queries, n_keys)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"mask: expected bool, got {mask.dtype}.")
        check_broadcast("mask", mask, pairs)
    if bias is not None:
        if not bias.is_floating_point():
            raise ValueError(f"bias: expected a floating-point tensor, got {bias.dtype}.")
        check_broadcast("bias", bias, pairs)
    if window is not None and (offset is None or window < 1):
        raise ValueError(f"window: expected a positive number beside an offset, got {window} and offset {offset}.")
    check_segments(cu_seqlens)
    if cu_seqlens is not None and (batch != 1 or queries != n_keys or offset not in (None, 0)):
        raise ValueError(
            f"cu_seqlens: expected batch 1, as many queries as keys, and offset None or 0, got batch {batch}, "
            f"{queries} queries, {n_keys} keys, offset {offset}."
        )
    for name, row in rows.items():
        if row is not None:
            check_broadcast(name, row, (batch, heads, queries, 1))
    if (rows.get("width") is None) != (rows.get("amplitude") is None):
        raise ValueError("width: expected both width and amplitude or neither, got one of them.")
    if (rows.get("share") is None) != (mean is None):
        raise ValueError("share: expected both share and mean or neither, got one of them.")
    if mean is not None and rows.get("clamp_floor") is not None:
        raise ValueError("clamp_floor: expected None beside a share, got both.")
    if mean is not None and (
        mean.ndim != 4
        or mean.shape[0] != batch
        or mean.shape[1] == 0
        or heads % mean.shape[1]
        or mean.shape[2] not in (1, queries)
        or mean.shape[3] != value.shape[3]
    ):
        expected = f"({batch}, {groups} or {heads}, {queries} or 1, {value.shape[3]})"
        raise ValueError(f"mean: expected {expected}, got {tuple(mean.shape)}.")


def precision_of(precision: str | None) -> str:
    """Of products of FP32 tensors; None follows PyTorch's own setting."""
    if precision is None:
        return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    if precision not in ("ieee", "tf32"):
        raise ValueError(f'precision: expected "ieee" or "tf32", got {precision!r}.')
    return precision
