"""The exact lower median of scores, by selection."""

import pytest
import torch
from formula import DEVICE, compare, dense, leaf, pairs
from fullpay_kernels import attention, lower_median


def formula(query, key, *, scaling, bias=None, value=None, **visible):
    heads = query.shape[1]
    key = key.repeat_interleave(heads // key.shape[1], 1)
    scores = query @ key.mT * scaling
    if bias is not None:
        scores = scores + bias
    seen = pairs(query.shape[2], key.shape[2], **visible).expand(scores.shape)
    rank = ((seen.sum(-1, keepdim=True) - 1) // 2).clamp(min=0)
    ordered = scores.masked_fill(~seen, torch.inf).sort(-1).values.gather(-1, rank)
    return ordered.masked_fill(~seen.any(-1, keepdim=True), 0.0)


def kernel(value=None, **inputs):
    return lower_median(**inputs)


def tensors(n, m, dtype=torch.float32):
    x = {"query": leaf(2, 2, n, 16, dtype=dtype), "key": leaf(2, 1, m, 16, dtype=dtype), "scaling": 0.3}
    return x | {"value": x["query"].detach()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"offset": 2},
        {"offset": -3},
        {"offset": 2, "window": 7},
        {"keys": torch.arange(19, device=DEVICE) < torch.tensor([[12], [0]], device=DEVICE), "offset": 2},
        {"mask": torch.rand(2, 1, 17, 19, device=DEVICE) > 0.5},
        {"bias": leaf(1, 2, 17, 19)},
    ],
    ids=lambda options: "-".join(options) or "full",
)
def test_median(options):
    compare(kernel, formula, tensors(17, 19) | options)


@pytest.mark.parametrize("m", [1, 2, 65])
def test_lengths(m):
    compare(kernel, formula, tensors(3, m))


def test_ties_choose_the_first():
    inputs = tensors(5, 7) | {"key": torch.zeros(2, 1, 7, 16, device=DEVICE).requires_grad_()}
    del inputs["value"]
    centre = lower_median(**inputs)
    assert (centre == 0).all()
    grad = torch.autograd.grad(centre.sum(), inputs["key"])[0]
    assert (grad[:, :, 1:] == 0).all()
    assert (grad[:, :, 0] != 0).any()


def test_as_centre():
    """The composition, gradients through the median included."""
    rows = {"width": leaf(1, 2, 1, 1, low=0.5, high=1.0), "amplitude": leaf(1, 2, 1, 1, low=0.5, high=3.0)}

    def ours(query, key, value, width, amplitude):
        centre = lower_median(query, key, scaling=0.3, offset=2)
        return attention(query, key, value, scaling=0.3, offset=2, centre=centre, width=width, amplitude=amplitude)

    def plain(query, key, value, width, amplitude):
        centre = formula(query, key, scaling=0.3, offset=2)
        return dense(query, key, value, scaling=0.3, offset=2, centre=centre, width=width, amplitude=amplitude)

    inputs = {"query": leaf(2, 2, 17, 16), "key": leaf(2, 1, 19, 16), "value": leaf(2, 1, 19, 16)}
    compare(ours, plain, inputs | rows)
