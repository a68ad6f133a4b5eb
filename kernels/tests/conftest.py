"""Kernels run on the GPU where there is one, else in Triton's interpreter on the CPU. Fresh memory is full of NaN."""

import os
import sys
from pathlib import Path

import pytest
import torch

# Triton reads it on import; the interpreter can be asked for on a machine with a GPU too.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
KERNELS = Path(__file__).parent.parent
sys.path.insert(0, str(KERNELS / "torch-ext"))
sys.path.append(str(KERNELS.parent / "benchmarks"))  # how a plan becomes calls of the kernels


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        if os.environ["TRITON_INTERPRET"] != "0":
            pytest.skip("asked for the interpreter: unset TRITON_INTERPRET")


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
