"""What a device can do at most, and how much of it a call used.

Dimensions: B batch, H heads, N queries, M keys, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_fullpay import AttentionPlan


@dataclass(frozen=True)
class Limit:
    """Floating-point operations a second in BF16 products, and bytes a second from memory."""

    flops: float
    bytes: float


# Measured with large BF16 matrix products and copies on such a device, not the data sheet's 989e12 and 4.8e12. A device
# without an entry gets no share.
LIMITS = {"NVIDIA H200": Limit(flops=790e12, bytes=4.3e12)}


def pairs(plan: AttentionPlan, queries: int, keys: int, is_causal: bool) -> int | None:
    """Visible pairs of one head, the last query seeing the last key if causal; None where a reach has no pairs."""
    if plan.reach.kind == "band":
        size, before = plan.reach.size, keys - queries
        return sum(min(size, before + i + 1) for i in range(queries))
    if plan.reach.kind != "full":
        return None
    return queries * keys - (queries * (queries - 1) // 2 if is_causal else 0)


def flops(shape: tuple[int, int, int, int], pairs_of_a_head: int, backward: bool) -> int:
    """Useful operations: two products forward, five more backward; hidden pairs and recomputation beyond do not count."""
    batch, heads, _, width = shape
    return 2 * (7 if backward else 2) * batch * heads * pairs_of_a_head * width


def traffic(shape: tuple[int, int, int, int], queries: int, backward: bool, itemsize: int = 2) -> int:
    """Bytes that must move: q, k, v, out forward; those four and d_out in, dq, dk, dv out backward."""
    batch, heads, keys, width = shape
    rows = (2 * queries + 2 * keys) + ((4 * queries + 4 * keys) if backward else 0)
    return batch * heads * width * itemsize * rows


def share(device: str, flops: int, traffic: int, seconds: float) -> float | None:
    """The least time that the device needs, over the time taken."""
    limit = LIMITS.get(device)
    return limit and max(flops / limit.flops, traffic / limit.bytes) / seconds
