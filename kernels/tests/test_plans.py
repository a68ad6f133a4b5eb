"""Presets of hf_fullpay as calls of the kernels, as the benchmark times them, against the dense reference."""

import pytest
from formula import DEVICE

hf_fullpay = pytest.importorskip("hf_fullpay")
cases = pytest.importorskip("cases")
kernel_calls = pytest.importorskip("kernel_calls")

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")


@pytest.mark.parametrize("decode", [False, True], ids=["all", "one-query"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", hf_fullpay.PRESETS)
def test_preset(name, is_causal, decode):
    plan = hf_fullpay.PRESETS[name]
    if not cases.allows(plan, is_causal) or (decode and not is_causal):
        return
    reason = (kernel_calls.cannot_decode if decode else kernel_calls.cannot_run)(plan)
    if reason:
        assert "kernel" in reason or "relays" in reason
        return
    query, key, value = (x.detach() for x in cases.inputs(150, "fp32", DEVICE, 2, 2, 16))
    query = query[:, :, -1:] if decode else query
    got = kernel_calls.triton_call(plan, is_causal, decode)(query, key, value)
    want = cases.truth_of(plan, "lower_right" if is_causal else False)(query.double(), key.double(), value.double())
    assert (got.double() - want).abs().max() < 5e-6
