"""Bars for what the compiler says of a kernel; rows as in aot.py.

Everywhere: shared memory fits. On sm_90 also, for halves: no spills in a forward kernel, at most 64 bytes in the gradients
of keys and values, warpgroup products in every attention kernel, and no C75xx warning, which says that ptxas serialises
these products.
"""

from __future__ import annotations

from typing import Any

SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64, "gfx950": 160}  # KiB a program may have
OTHERS = ("mean", "decode", "median")  # kernels beside attention


def missed(row: dict[str, Any]) -> list[str]:
    """Bars that a row misses."""
    case, kernel = row["name"].split(": ")
    bars = {"too much shared memory": row["shared_bytes"] > SHARED.get(row["arch"], 99) * 1024}
    if row["arch"] == "sm_90" and not case.startswith(OTHERS) and row["dtype"] != "fp32":
        bars |= {
            "spills": kernel in ("forward", "clamp solve", "clamp pay") and row["spill_bytes"] > 0,
            "spills above 64 bytes": kernel.startswith("keys") and row["spill_bytes"] > 64,
            "no warpgroup products": kernel != "delta" and row["wgmma"] == 0,
            "products serialised": bool(row["warnings"]),
        }
    return [bar for bar, red in bars.items() if red]
