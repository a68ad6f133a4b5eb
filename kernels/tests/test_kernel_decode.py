"""One query a sequence, its keys split over programs."""

import pytest
import torch
from formula import DEVICE, compare, dense, leaf
from fullpay_kernels import decode_attention


def tensors(m, *, groups=2, width=24, dtype=torch.float32):
    x = {"query": leaf(2, 4, 1, width, dtype=dtype), "key": leaf(2, groups, m, width, dtype=dtype),
         "value": leaf(2, groups, m, 16, dtype=dtype)}  # fmt: skip
    return {name: tensor.detach() for name, tensor in x.items()} | {"scaling": width**-0.5}


def rows(name, low, high):
    return {name: leaf(2, 4, 1, 1, low=low, high=high).detach()}


@pytest.mark.parametrize("m", [1, 65, 129, 700])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_lengths(m, groups):
    compare(decode_attention, dense, tensors(m, groups=groups) | {"offset": m - 1})


@pytest.mark.parametrize(
    "options",
    [
        {"offset": 128, "window": 30},
        {"offset": 60},
        {"offset": -1},
        {"keys": torch.arange(129, device=DEVICE) >= torch.tensor([[70], [129]], device=DEVICE)},
        {"bias": torch.randn(1, 4, 1, 129, device=DEVICE), "splits": 2},
        {"mean": torch.randn(2, 2, 1, 16, device=DEVICE), "share": torch.rand(1, 4, 1, 1, device=DEVICE)},
        rows("width", 0.5, 2) | rows("amplitude", 0.5, 3) | rows("centre", 0, 1),
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options):
    def formula(splits=None, **inputs):
        return dense(**inputs)

    compare(decode_attention, formula, tensors(129) | options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    compare(decode_attention, dense, tensors(129, dtype=dtype) | {"offset": 100})


def test_one_query_only():
    with pytest.raises(ValueError, match="expected one query"):
        decode_attention(
            torch.zeros(1, 1, 2, 16, device=DEVICE), *torch.zeros(2, 1, 1, 2, 16, device=DEVICE), scaling=1.0
        )
