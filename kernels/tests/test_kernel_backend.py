"""The kernels as a backend of the package: every preset against its dense reference."""

import pytest
import torch
from formula import DEVICE, compare, leaf

import hf_fullpay
from hf_fullpay import PRESETS, AttentionPlan, Bounded, attention, backend
from hf_fullpay.backends import lacks
from hf_fullpay.fast import kernels

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
SERVED = {name: plan for name, plan in PRESETS.items() if lacks("triton", plan) is None}
SERVED["median"] = AttentionPlan(scores=Bounded(bound=0.5, centre="median", temperature=1.0))


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
