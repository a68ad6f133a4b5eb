"""The mean of visible values, and its gradient."""

import pytest
import torch
from formula import DEVICE, compare, leaf, mean_of, pairs
from fullpay_kernels import attention, visible_mean

CU_SEQLENS = torch.tensor([0, 3, 20, 20, 57, 60], dtype=torch.int32, device=DEVICE)


def formula(value, n_queries, **visible):
    keys = visible.get("keys")
    if keys is not None:
        value = value.masked_fill(~keys[:, None, :, None], 0.0)
    mean = mean_of(value, pairs(n_queries, value.shape[2], **visible))
    return mean if {"offset", "cu_seqlens"} & set(visible) else mean[:, :, :1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "m", "visible"),
    [
        (65, 65, {}),
        (1, 129, {"offset": 128}),
        (129, 65, {"offset": 0}),
        (65, 129, {"offset": 64}),
        (65, 33, {"offset": -20}),
        (65, 65, {"offset": 0, "window": 1}),
        (129, 129, {"offset": 0, "window": 40}),
        (65, 129, {"offset": 64, "window": 77}),
        (65, 65, {"cu_seqlens": CU_SEQLENS}),
        (65, 65, {"cu_seqlens": CU_SEQLENS, "offset": 0, "window": 9}),
    ],
    ids=str,
)
def test_mean(dtype, n, m, visible):
    batch = 1 if "cu_seqlens" in visible else 2
    compare(visible_mean, formula, {"value": leaf(batch, 2, m, 24, dtype=dtype), "n_queries": n} | visible)


@pytest.mark.parametrize("visible", [{}, {"offset": 0}, {"offset": 0, "window": 20}], ids=str)
def test_padding_is_never_read(visible):
    keys = torch.rand(2, 65, device=DEVICE) > 0.5
    keys[1, :40] = False
    value = leaf(2, 2, 65, 16).detach().masked_fill(~keys[:, None, :, None], float("nan")).requires_grad_()
    got = compare(visible_mean, formula, {"value": value, "n_queries": 65, "keys": keys} | visible)
    if visible:
        assert (got["out"][1, :, :40] == 0).all()


def test_large_values_that_are_hidden_leave_no_trace():
    """Differences of running sums would."""
    value = torch.ones(1, 1, 129, 16, device=DEVICE)
    value[:, :, :50] = 1e30
    assert torch.equal(visible_mean(value, n_queries=129, offset=0, window=20)[:, :, 80:], value[:, :, 80:])


def test_long_half_sums_do_not_overflow():
    value = torch.full((1, 1, 129, 16), 60000.0, dtype=torch.float16, device=DEVICE)
    torch.testing.assert_close(visible_mean(value, n_queries=129, offset=0), value)


def test_any_strides_and_two_runs():
    value = leaf(2, 65, 2, 16)
    bent, straight = value.transpose(1, 2), value.transpose(1, 2).contiguous()
    first, second = (visible_mean(x, n_queries=65, offset=0, window=9) for x in (bent, straight))
    assert torch.equal(first, second)


def test_dense_masks_by_attention_with_a_query_of_zeros():
    mask = torch.rand(2, 1, 33, 40, device=DEVICE) > 0.5
    value, zeros = leaf(2, 2, 40, 16), torch.zeros(2, 1, 1, 16, device=DEVICE)
    got = attention(zeros.expand(2, 2, 33, 16), zeros.expand(2, 2, 40, 16), value, scaling=1.0, mask=mask)
    torch.testing.assert_close(got, mean_of(value, mask), atol=1e-6, rtol=1e-6)
