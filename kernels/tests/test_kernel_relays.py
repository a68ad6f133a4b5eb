"""Blocks with relays, against one dense softmax over own keys and relays."""

import pytest
import torch
from formula import DEVICE, compare, leaf
from fullpay_kernels import relay_attention


def formula(query, key, value, *, scaling, size, causal=False, keys=None):
    n, heads = query.shape[2], query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    alive = torch.ones(query.shape[0], n, dtype=torch.bool, device=DEVICE) if keys is None else keys
    key, value = (x.masked_fill(~alive[:, None, :, None], 0.0) for x in (key, value))
    place = torch.arange(n, device=DEVICE)
    first = alive.to(torch.uint8).argmax(-1, keepdim=True)
    block = (place - first).div(size, rounding_mode="floor")  # (B, N)
    relay = torch.arange(-(-n // size), device=DEVICE)
    member = (relay[:, None] == block[:, None]) & alive[:, None]  # (B, P, N)
    counts = member.sum(-1)
    weights = (member / counts.clamp(min=1)[..., None])[:, None].to(key.dtype)
    keys_all, values_all = torch.cat([key, weights @ key], 2), torch.cat([value, weights @ value], 2)
    scores = query @ keys_all.mT * scaling
    bias = torch.cat([torch.zeros_like(alive, dtype=scores.dtype), counts.clamp(min=1).log()], 1)[:, None, None]
    own = (block[..., None] == block[:, None]) & alive[:, None]
    others = (block[..., None] != relay) & (counts > 0)[:, None]
    if causal:
        own, others = own & (place <= place[:, None]), others & (relay < block[..., None])
    seen = torch.cat([own, others], -1)[:, None]
    return (torch.softmax((scores + bias).masked_fill(~seen, -3e4), -1) * seen).to(value.dtype) @ values_all


def tensors(n, dtype=torch.float32):
    x = {"query": leaf(2, 2, n, 16, dtype=dtype), "key": leaf(2, 1, n, 16, dtype=dtype)}
    return x | {"value": leaf(2, 1, n, 24, dtype=dtype), "scaling": 0.3}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "size"), [(65, 16), (33, 7), (17, 40), (64, 32), (5, 1)])
def test_lengths(n, size, causal):
    compare(relay_attention, formula, tensors(n) | {"size": size, "causal": causal})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right", "holes", "all"])
def test_padding_is_never_read_and_moves_no_block(causal, side):
    place = torch.arange(41, device=DEVICE)
    padded = torch.tensor([[0], [23]], device=DEVICE)
    keys = place >= padded if side == "left" else place < 41 - padded
    if side == "holes":
        keys = (place >= padded) & (place % 7 != 3)
    elif side == "all":
        keys = keys & (padded == 0)
    inputs = tensors(41) | {"size": 16, "causal": causal, "keys": keys}
    for name in ("key", "value"):
        inputs[name] = inputs[name].detach().masked_fill(~keys[:, None, :, None], float("nan")).requires_grad_()
    got = compare(relay_attention, formula, inputs)
    if causal and side == "left":
        assert (got["out"][1, :, :23] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_left_padding_changes_nothing(causal):
    inputs = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in tensors(33).items()}
    options = {"scaling": inputs.pop("scaling"), "size": 16, "causal": causal}
    bare = relay_attention(**inputs, **options)
    padded = {name: torch.nn.functional.pad(x, (0, 0, 5, 0)) for name, x in inputs.items()}
    keys = (torch.arange(38, device=DEVICE) >= 5).expand(2, -1)
    moved = relay_attention(**padded, **options, keys=keys)[:, :, 5:]
    torch.testing.assert_close(moved, bare, atol=1e-6, rtol=1e-6)  # other tiles, another order of sums


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    compare(relay_attention, formula, tensors(65, dtype) | {"size": 16, "causal": True})


def test_errors():
    x = torch.zeros(1, 1, 4, 16, device=DEVICE)
    with pytest.raises(ValueError, match="size: expected"):
        relay_attention(x, x, x, scaling=1.0, size=0)
    with pytest.raises(ValueError, match="scaling: expected"):
        relay_attention(x, x, x, scaling=0.0, size=2)
