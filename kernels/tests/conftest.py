"""Kernels run in Triton's interpreter, on CPU tensors; with TRITON_INTERPRET=0 on a GPU. Fresh memory is full of NaN."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "torch-ext"))

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Memory that no kernel wrote shows up as NaN."""

    def poisoned(stock):
        def empty(*args, **kwargs):
            tensor = stock(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return empty

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
