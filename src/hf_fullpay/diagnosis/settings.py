"""What a user can set about the checks, beside their limits."""

from __future__ import annotations

from dataclasses import dataclass

from hf_fullpay.core.errors import check_count, check_number


@dataclass(frozen=True)
class Settings:
    """Numbers that checks share.

    Args:
        threshold: absolute weight under which a key counts as unpaid.
        bound: compressed score whose limit, bound * sqrt(n), is asked of the rows (check "scores").
        near: how many nearest positions count as near (check "reach").
        far: distance from which a position counts as far; half the length where texts are shorter than twice that.
        documents: how many inputs the checks with a backward pass look at.
        queries: of how many positions in each of them.
        seed: of random directions.
    """

    threshold: float = 0.01
    bound: float = 2.0
    near: int = 5
    far: int = 100
    documents: int = 2
    queries: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0, high=1, open_low=True)
        check_number("bound", self.bound, low=0, open_low=True)
        for name in ("near", "far", "documents", "queries"):
            check_count(name, getattr(self, name))
