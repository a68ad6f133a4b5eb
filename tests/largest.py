"""The largest tensor that a computation makes, to prove that none has the size of all pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if (
                isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes()
            ):  # an expanded view is as large as its memory
                self.numel = max(self.numel, min(leaf.numel(), leaf.untyped_storage().nbytes() // leaf.element_size()))
        return made


def largest(call: Callable[[], Any]) -> int:
    """Number of elements of the largest tensor made in a call."""
    with _Largest() as seen:
        call()
    return seen.numel
