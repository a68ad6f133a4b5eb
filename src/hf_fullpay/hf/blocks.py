"""See, and exchange, the hidden states that go into and come out of every block of a model as it runs.

A block is the module of a list (layer 3 of 12) that holds an attention module; where a model has no such list, the
attention module itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from hf_fullpay.hf.bind import block_of
from hf_fullpay.hf.watch import attention_modules

Enter = Callable[[int, Tensor], Tensor | None]
Leave = Callable[[int, Tensor], None]


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by path, in order.

    Raises:
        ValueError: for a model without attention that routes.
    """
    paths = dict.fromkeys(block_of(model, path) for path in attention_modules(model).values())
    return {path: model.get_submodule(path) for path in paths}


@contextmanager
def watch_blocks(model: nn.Module, enter: Enter | None = None, leave: Leave | None = None) -> Iterator[None]:
    """Listen to hidden states inside the context.

    Args:
        model: any Transformers model whose attention routes.
        enter: called with the number of the call (0 for the first block that runs in a forward pass, also where blocks
            share a module) and the hidden states (B, N, width) that go in; what it returns goes in instead, if anything.
        leave: called with the same number and what comes out.
    """
    entered = [0]

    def restart(*_: Any) -> None:
        entered[0] = 0

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index, entered[0] = entered[0], entered[0] + 1
        hidden = args[0] if args else kwargs.get("hidden_states")
        if enter is None or not isinstance(hidden, Tensor):
            return None
        changed = enter(index, hidden)
        if changed is None:
            return None
        return ((changed, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": changed})

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if leave is not None and isinstance(hidden, Tensor):
            leave(entered[0] - 1, hidden)

    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(restart).remove)
        for block in blocks_of(model).values():
            stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(after).remove)
        yield
