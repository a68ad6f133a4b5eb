"""What a kernel cannot take is refused before a launch, by name."""

import pytest
import torch
from formula import DEVICE
from fullpay_kernels import attention, checks, decode_attention, lower_median, relay_attention, visible_mean

CALLS = {
    "attention": lambda q, k, v: attention(q, k, v, scaling=1.0),
    "lower_median": lambda q, k, v: lower_median(q, k, scaling=1.0),
    "decode_attention": lambda q, k, v: decode_attention(q[:, :, :1], k, v, scaling=1.0),
    "relay_attention": lambda q, k, v: relay_attention(q, k, v, scaling=1.0, size=2),
    "visible_mean": lambda q, k, v: visible_mean(v, n_queries=5),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def tensors(width=16, dtype=torch.float32, device=DEVICE):
    return [torch.zeros(2, 2, 5, width, dtype=dtype, device=device) for _ in range(3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 4, 5)}, "query: expected"),
        ({"key": torch.zeros(2, 3, 5, 16)}, "value: expected"),
        ({"value": torch.zeros(2, 2, 5, 16, dtype=torch.float64)}, "value: expected float32"),
        ({"keys": torch.ones(2, 4, dtype=torch.bool)}, "keys: expected bool of shape"),
        ({"mask": torch.ones(2, 4, 5, 5)}, "mask: expected bool"),
        ({"bias": torch.ones(3, 4, 5, 5)}, "bias: expected a shape"),
        ({"window": 3}, "window: expected"),
        ({"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)}, "cu_seqlens: expected batch 1"),
        ({"width": torch.ones(1, 1, 1, 1)}, "width: expected both"),
        ({"share": torch.ones(1, 1, 1, 1)}, "share: expected both"),
        ({"precision": "tf33"}, "precision: expected"),
    ],
)
def test_errors_name_the_argument(change, message):
    inputs = {"query": torch.zeros(2, 4, 5, 16), "key": torch.zeros(2, 2, 5, 16), "value": torch.zeros(2, 2, 5, 16)}
    change = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    inputs = {name: x.to(DEVICE) for name, x in inputs.items()}
    with pytest.raises(ValueError, match=message):
        attention(**(inputs | {"scaling": 1.0} | change))


@every_call
def test_heads_wider_than_256(call):
    call(*tensors(256))
    with pytest.raises(ValueError, match=r"(query|value): expected a width from 1 to 256, got 257"):
        call(*tensors(257))


@every_call
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_dtypes(call, dtype):
    with pytest.raises(ValueError, match=f"(query|value): expected float32, float16 or bfloat16, got {dtype}"):
        call(*tensors(dtype=dtype))


@every_call
def test_devices(call, monkeypatch):
    """Neither the wrong device, nor the CPU without the interpreter, nor a GPU that is too old."""
    with pytest.raises(ValueError, match=r"(query|value): expected a (CPU tensor|tensor on a GPU).*, got meta"):
        call(*tensors(device="meta"))
    monkeypatch.setattr(checks, "interpreted", lambda: False)
    with pytest.raises(
        ValueError, match=r"(query|value): expected a tensor on a GPU \(or TRITON_INTERPRET=1\), got cpu"
    ):
        call(*tensors(device="cpu"))


def test_old_gpus(monkeypatch):
    class Tensor:
        ndim, dtype, shape, device = 4, torch.float16, (1, 1, 1, 16), torch.device("cuda", 0)

    monkeypatch.setattr(checks, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"query: expected a GPU of compute capability \(8, 0\) or more, got \(7, 5\)"):
        checks.check_width_and_dtype("query", Tensor)


@pytest.mark.parametrize(
    "name", ["keys", "mask", "bias", "centre", "width", "amplitude", "share", "mean", "clamp_floor"]
)
def test_every_tensor_on_one_device(name):
    tensor = torch.ones(2, 5) if name == "keys" else torch.ones(2, 1, 1, 16 if name == "mean" else 1)
    tensor = (tensor.bool() if name in ("keys", "mask") else tensor).to("meta")
    with pytest.raises(ValueError, match=f"{name}: expected device {DEVICE}"):
        attention(*tensors(), scaling=1.0, **{name: tensor})
