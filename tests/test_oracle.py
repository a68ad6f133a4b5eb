"""The reference and the fast paths against numbers computed independently, outputs, weights and all gradients."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from hf_fullpay import AttentionPlan, Bounded, Clamp, DynamicScale, Mixture, Plain, Softmax
from hf_fullpay.attend import attend
from hf_fullpay.core.places import query_slots
from hf_fullpay.core.visible import Visible
from hf_fullpay.fast.relays import relay_attention
from hf_fullpay.payment.softmax import softmax_weights
from hf_fullpay.reach.blocks import relayed_scores
from hf_fullpay.reference import reference_attention

FILES = sorted((Path(__file__).parent / "oracle").glob("*.safetensors"))


def load(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["plan"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def plan_of(written):
    scores, payment = Plain(), Softmax()
    if written.get("scores") == "bounded":
        scores = Bounded(**{name: written[name] for name in ("bound", "centre", "temperature")})
    elif written.get("scores") == "dynamic_scale":
        scores = DynamicScale(max_scale=written["max_scale"], alpha=written["alpha"])
    if kind := {"mixture": Mixture, "clamp": Clamp}.get(written.get("payment")):
        payment = kind(floor=written["floor"], budget=written["budget"])
    return AttentionPlan(scores=scores, payment=payment)


def test_all_files_are_there():
    assert len(FILES) == 85


@pytest.mark.parametrize("path", [path for path in FILES if "visible" in load(path)[1]], ids=lambda path: path.stem)
@pytest.mark.parametrize("run", [reference_attention, attend], ids=["reference", "fast"])
def test_agrees_to_1e_10(path, run):
    written, tensors = load(path)
    names = [name for name in ("query", "key", "value", "budget", "alpha") if name in tensors]
    leaves = {name: tensors[name].requires_grad_() for name in names}
    query, key = leaves["query"], leaves["key"]
    result = run(
        query, key, leaves["value"], plan=plan_of(written), scaling=query.shape[-1] ** -0.5,
        allowed=Visible(query.shape[2], key.shape[2], query.device, dense=tensors["visible"]),
        strengths={name: leaves[name] for name in ("budget", "alpha") if name in leaves},
    )  # fmt: skip
    output = result
    if run is reference_attention:
        output, weights = result
        torch.testing.assert_close(weights, tensors["weights"], rtol=0, atol=1e-10)
    torch.testing.assert_close(output, tensors["output"], rtol=0, atol=1e-10)
    (output * tensors["probe"]).sum().backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(
            leaf.grad, tensors[f"grad_{name}"], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def reference_relays(query, key, value, allowed, size):
    """The reference's steps with blocks counted from slot 0, as the files have it, pads included."""
    visible = allowed.to_dense()
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = relayed_scores(scores, visible, query_slots(allowed), torch.zeros(1, 1, 1, 1, dtype=torch.long), size)
    return softmax_weights(scores, visible) @ value


def fast_relays(query, key, value, allowed, size):
    return relay_attention(query, key, value, visible=allowed, size=size, scaling=query.shape[-1] ** -0.5, origin=0)


@pytest.mark.parametrize("path", [path for path in FILES if path.stem.startswith("block")], ids=lambda path: path.stem)
@pytest.mark.parametrize("run", [reference_relays, fast_relays])
def test_relays_agree_to_1e_10(path, run):
    """The files count blocks from slot 0 in a padded row too; attention itself counts from the first token."""
    written, tensors = load(path)
    leaves = {name: tensors[name].requires_grad_() for name in ("query", "key", "value")}
    n, keys = tensors["query"].shape[2], tensors["keep_keys"].bool()
    offset = 0 if "causal" in path.stem else None
    output = run(*leaves.values(), Visible(n, n, keys.device, keys=keys, offset=offset), written["size"])
    torch.testing.assert_close(output, tensors["output"], rtol=0, atol=1e-10)
    (output * tensors["probe"]).sum().backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, tensors[f"grad_{name}"], rtol=0, atol=1e-10)
