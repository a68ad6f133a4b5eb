"""Tile sizes for each kernel, head width, dtype and architecture, read from the compiler: benchmarks/aot.py.

Not one was timed on a GPU yet. What decides them: no spills, warpgroup products (at least 64 rows for 4 warps, 128 for
8), and shared memory. Gradients of keys need 32-row tiles at width 128: with 64 they spill. Above, even those of keys and
of values need a launch each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

SMALL = ("sm_86", "sm_89", "sm_120", "sm_121")  # 100 KiB of shared memory


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, warps of a program, and stages of its pipeline."""

    rows: int
    cols: int
    warps: int = 4
    stages: int = 2


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def padded(width: int) -> int:
    """Width of the tiles of a head: the next power of two, at least 16."""
    return max(triton.next_power_of_2(width), 16)


def architecture(device: torch.device) -> str:
    """Name such as sm_90 or gfx942, or interpreter."""
    if interpreted():
        return "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def tile_for(kernel: str, width: int, dtype: torch.dtype, arch: str, light: bool = False, tanh: bool = False) -> Tile:
    """The tile of a kernel.

    Args:
        kernel: "forward", "queries", "keys" (the gradients of these) or "rows" (no products).
        width: the wider of the two padded head widths.
        dtype: of query, key and value.
        arch: see `architecture`.
        light: whether pairs are as in ordinary attention, at most causal: what else there is takes registers.
        tanh: whether scores are bounded.
    """
    if arch == "interpreter":
        return Tile(32, 16) if kernel == "keys" else Tile(16, 32)
    if kernel == "rows":
        return Tile(max(4096 // width, 16), 0)
    if dtype == torch.float32:
        return Tile(16, 16, 4, 1) if width > 128 else Tile(64 if width <= 64 else 32, 32, 4, 1)
    small = arch.startswith("gfx") or arch in SMALL
    if width > 128 and small:
        return Tile(16, 64, 4, 1) if kernel == "keys" else Tile(64, 32, 4, 1)
    if width > 128:
        return _wide(kernel, light, tanh, arch == "sm_80")
    if small:
        return Tile(32, 64, 4, 1) if kernel == "keys" else Tile(64, 64 if width <= 64 else 32, 4, 1)
    if kernel == "keys" and arch == "sm_80" and width > 64:  # its products want their operands in registers
        return Tile(64 if light else 32, 64, 8, 2)
    if kernel == "keys" and tanh and width > 64:
        return Tile(16, 128, 8, 2)
    if kernel == "keys":
        return Tile(64 if light and width <= 64 else 32, 128, 8, 2)
    if kernel == "queries" and width > 64 and not light:
        return Tile(128, 32, 8, 2)
    return Tile(128, 64, 8, 2)


def _wide(kernel: str, light: bool, tanh: bool, ampere: bool) -> Tile:
    """Tiles above width 128 where a program has at least 160 KiB of shared memory; on sm_80 it has no more."""
    if kernel == "keys":
        return Tile(16, 64, 8, 2) if tanh or ampere else Tile(32, 128, 8, 2)
    if kernel == "forward":
        return Tile(128 if light else 64, 32, 8, 2)
    return Tile(128, 32, 8, 2) if light and not ampere else Tile(64, 16, 8, 2)
