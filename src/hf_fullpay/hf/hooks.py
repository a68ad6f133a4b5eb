"""Forward pre-hooks that are attached once, and do nothing on modules that run another attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def hook_once(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Register a forward pre-hook that takes keywords, unless the module has it."""
    if hook not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(hook, with_kwargs=True)
