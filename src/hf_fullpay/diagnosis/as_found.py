"""A model is measured in eval mode, and afterwards it is as it was found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn


@contextmanager
def as_found(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients inside; afterwards, also on an error, every module is back in its own mode and the
    random state of torch is what it was, so that a training run goes on exactly as if nobody had looked.

    What `torch.compile` made runs as plain Python inside: its graphs cannot be listened to.
    """
    modes = {module: module.training for module in model.modules()}
    cuda = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=sorted(cuda)))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes a second
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.inference_mode(False))  # some checks need gradients
        stack.enter_context(torch.no_grad())
        stack.callback(_restore, modes)
        model.eval()
        yield


def _restore(modes: dict[nn.Module, bool]) -> None:
    for module, mode in modes.items():
        module.training = mode
