"""What every test shares: no network, one thread a worker, fixed seeds, and `torch.empty` that is full of NaN."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import hf_fullpay  # noqa: F401 - registers the names
from hf_fullpay.plan import _presets


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    # Workers share few cores; more threads each would only wait for one another.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _names():
    """What a test registers is gone after it: other tests iterate over the preset table."""
    before = dict(_presets)
    yield
    for name in set(_presets) - set(before):
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
    _presets.clear()
    _presets.update(before)


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Memory that nothing wrote shows up as NaN, on our paths and in what a checkpoint leaves uninitialised."""

    def poisoned(stock):
        def empty(*args, **kwargs):
            tensor = stock(*args, **kwargs)
            if tensor.is_floating_point() and tensor.device.type == "cpu" and not torch.compiler.is_compiling():
                with torch.no_grad():
                    tensor.fill_(float("nan"))
            return tensor

        return empty

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
