"""Masked heads: as if their slice of the output projection's input were zero, in every family, and nothing else."""

from contextlib import ExitStack, contextmanager

import pytest
import torch
from transformers import AttentionInterface

from families import FAMILIES, build, inputs
from hf_fullpay.hf.heads import without_heads
from hf_fullpay.hf.watch import watch
from small import EVERYWHERE, load

PROJECTIONS = {"llama": "o_proj", "gpt2": "attn.c_proj", "bert": "attention.output.dense", "vit": "attention.o_proj"}
HEADS = {0: [1], 1: [0, 3]}


@contextmanager
def zeroed(model, family, heads):
    """The same by hand: hooks on the output projections."""

    def hook(chosen):
        def before(module, args):
            cut = args[0].clone().unflatten(-1, (4, -1))
            cut[..., chosen, :] = 0.0
            return (cut.flatten(-2),)

        return before

    found = [module for path, module in model.named_modules() if path.endswith(PROJECTIONS[family])]
    assert len(found) == 2
    with ExitStack() as stack:
        for layer, chosen in heads.items():
            stack.callback(found[layer].register_forward_pre_hook(hook(chosen)).remove)
        yield


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_a_zeroed_projection(family, attention):
    model, given = build(family, attention, head=False), inputs(family)
    whole = model(**given)[0]
    with without_heads(model, HEADS):
        masked = model(**given)[0]
    with zeroed(model, family, HEADS):
        assert torch.equal(masked, model(**given)[0])
    assert not torch.equal(masked, whole)
    assert torch.equal(model(**given)[0], whole)


@pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")  # nine tokens are too few for a floor
@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
def test_equals_a_zeroed_projection_under_presets(family, name):
    model, given = load(family, name), inputs(family)
    with without_heads(model, HEADS):
        masked = model(**given)[0]
    with zeroed(model, family, HEADS):
        assert torch.equal(masked, model(**given)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_other_heads_are_untouched(family):
    model, given, outputs = build(family, head=False), inputs(family), []
    for heads in ({}, {0: [2]}):
        with without_heads(model, heads), watch(model, lambda seen: outputs.append(seen.output)):
            model(**given)
    whole, masked = outputs[0], outputs[2]
    assert torch.equal(masked[:, :, [0, 1, 3]], whole[:, :, [0, 1, 3]])
    assert whole[:, :, 2].any()
    assert not masked[:, :, 2].any()


def test_gradients_pass_other_heads_only():
    model, given = build("bert", head=False), inputs("bert")
    with without_heads(model, {1: [0, 1, 3]}):
        model(**given)[0].square().sum().backward()
    gradient = model.encoder.layer[1].attention.self.value.weight.grad.view(4, 8, 32)
    assert gradient[2].abs().max() > 0
    assert not gradient[[0, 1, 3]].any()


def test_refusals_leave_the_model_as_it_was():
    model, given = build("bert", head=False), inputs("bert")
    whole, stock = model(**given)[0], AttentionInterface.get_interface
    with pytest.raises(ValueError, match="layer: expected an integer of at least 0 and at most 1, got 2"), \
            without_heads(model, {2: [0]}):  # fmt: skip
        pass
    with pytest.raises(ValueError, match="head of layer 1: expected an integer of at least 0, got -1"), \
            without_heads(model, {1: [-1]}):  # fmt: skip
        pass
    with pytest.raises(ValueError, match="head of layer 1: expected an integer of at most 3, got 4"), \
            without_heads(model, {1: [4]}):  # fmt: skip
        model(**given)
    assert AttentionInterface.get_interface is stock
    assert not model._forward_pre_hooks
    assert torch.equal(model(**given)[0], whole)
