"""The kernels as a backend of the package: every preset against its dense reference."""

import pytest
import torch
from formula import DEVICE, compare, leaf

import hf_fullpay
from hf_fullpay import PRESETS, AttentionPlan, Blocks, Bounded, Mixture, attention, backend
from hf_fullpay.attend import attend
from hf_fullpay.backends import lacks
from hf_fullpay.core.visible import Visible
from hf_fullpay.fast import kernels

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
SERVED = {name: plan for name, plan in PRESETS.items() if lacks("triton", plan) is None}
SERVED["median"] = AttentionPlan(scores=Bounded(bound=0.5, centre="median", temperature=1.0))
SERVED["blocks"] = AttentionPlan(reach=Blocks(4), payment=Mixture(floor=0.01, budget=0.2))


def under(chosen, plan, **options):
    """Attention on one backend."""

    def function(query, key, value):
        with backend(chosen):
            return attention(query, key, value, plan=plan, **options)

    return function


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("case", ["causal", "left_padded"])
def test_presets_equal_the_reference(name, case):
    inputs = {"query": leaf(2, 2, 21, 16), "key": leaf(2, 1, 21, 16), "value": leaf(2, 1, 21, 16)}
    options = {"is_causal": True}
    if case == "left_padded":
        options["visible"] = torch.arange(21, device=DEVICE).expand(2, -1) >= torch.tensor([[0], [9]], device=DEVICE)
    compare(under("triton", SERVED[name], **options), under("reference", SERVED[name], **options), inputs)


def test_blocks_of_an_encoder_equal_the_reference():
    inputs = {"query": leaf(2, 2, 21, 16), "key": leaf(2, 1, 21, 16), "value": leaf(2, 1, 21, 16)}
    keys = torch.arange(21, device=DEVICE).expand(2, -1) >= torch.tensor([[0], [9]], device=DEVICE)
    compare(*(under(name, SERVED["blocks"], visible=keys) for name in ("triton", "reference")), inputs)


def test_what_the_kernel_of_blocks_cannot_do_is_refused():
    query, pairs = torch.randn(1, 2, 9, 16, device=DEVICE), torch.ones(9, 9, dtype=torch.bool, device=DEVICE)
    plan = AttentionPlan(reach=Blocks(4))
    with pytest.raises(ValueError, match="takes no mask or bias of pairs"):
        under("triton", plan, visible=pairs[None, None])(query, query, query)
    with pytest.raises(ValueError, match="not a step with a cache"):
        under("triton", plan, is_causal="lower_right")(query[:, :, -1:], query, query)
    with pytest.raises(ValueError, match="takes ordinary scores alone"):
        under("triton", AttentionPlan(reach=Blocks(4), scores=Bounded()))(query, query, query)


@pytest.mark.parametrize("name", ["fullpay", "fullpay_band", "bounded_fullpay"])
@pytest.mark.parametrize("mask", ["causal", "pairs"])
def test_the_floor_is_added_inside_and_its_budget_learns(name, mask, monkeypatch):
    shares, sound = [], kernels.load().attention
    spy = lambda *tensors, **options: shares.append(options["share"]) or sound(*tensors, **options)  # noqa: E731
    monkeypatch.setattr(kernels.load(), "attention", spy)
    dense = torch.rand(2, 2, 21, 21, device=DEVICE) > 0.3 if mask == "pairs" else None
    allowed = Visible(21, 21, torch.device(DEVICE), dense=dense, offset=0)
    inputs = {name: leaf(2, heads, 21, 16) for name, heads in (("query", 2), ("key", 1), ("value", 1))}
    inputs["budget"] = leaf(2, low=0.1, high=0.4)

    def on(chosen):
        def function(query, key, value, budget):
            with backend(chosen):
                return attend(
                    query, key, value, plan=PRESETS[name], allowed=allowed, scaling=0.25, strengths={"budget": budget}
                )

        return function

    compare(on("triton"), on("reference"), inputs)
    assert shares
    assert all(share is not None for share in shares)


@pytest.mark.parametrize("name", ["fullpay", "bounded", "band_causal"])
def test_one_token_steps_equal_the_reference(name):
    query = torch.randn(2, 4, 1, 16, device=DEVICE)
    key, value = (torch.randn(2, 2, 45, 16, device=DEVICE) for _ in range(2))
    with backend("triton"):
        out = attention(query, key, value, plan=name, is_causal="lower_right")
    with backend("reference"):
        exact = attention(query.double(), key.double(), value.double(), plan=name, is_causal="lower_right")
    torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=1e-5)


def test_the_check_of_a_device_passes_and_notices_a_fault(monkeypatch):
    assert kernels.passes_check.__wrapped__(torch.device(DEVICE), torch.float32)
    sound = kernels.kernel_attention
    monkeypatch.setattr(kernels, "kernel_attention", lambda *tensors, **options: 1.02 * sound(*tensors, **options))
    with pytest.warns(hf_fullpay.FullPayWarning, match="kernels disagree with PyTorch"):
        assert not kernels.passes_check.__wrapped__(torch.device(DEVICE), torch.float32)
