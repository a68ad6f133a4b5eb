"""Plain scores: s_ij = scaling * q_i . k_j (+ bias), as every Transformer has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Plain:
    """Scores as they are."""

    kind: ClassVar[str] = "plain"
    inputs: ClassVar[tuple[str, ...]] = ()
