"""Peers: FAVOR+ comes nearer with more features, top-k is softmax when k is all, and both run by name."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import peer_attentions
from families import build, inputs


@pytest.fixture
def names():
    yield peer_attentions.register()
    for peer in peer_attentions.PEERS:
        AttentionInterface._global_mapping.pop(peer.name)
        AttentionMaskInterface._global_mapping.pop(peer.name)


def tensors(n=64, width=16):
    return torch.randn(2, 2, n, width) * 0.7, torch.randn(2, 2, n, width) * 0.7, torch.randn(2, 2, n, width)


@pytest.mark.parametrize("causal", [False, True])
def test_the_approximation_error_falls_with_more_features(causal):
    """As one over the root of their number, where rows are flat enough for the variance to be small."""
    query, key, value = tensors(96)
    query, key = query * 0.5, key * 0.5
    truth = F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    def error(features):
        runs = [
            peer_attentions.linear_attention(
                query, key, value, scaling=0.25, causal=causal, features=features, seed=seed
            )
            for seed in range(4)
        ]
        return torch.stack([(run - truth).norm() for run in runs]).mean()

    errors = [error(features) for features in (16, 64, 256, 1024, 4096)]
    assert all(more < fewer for fewer, more in pairwise(errors))
    assert errors[-1] < errors[0] / 8
    assert errors[-1] < 0.1 * truth.norm()


def test_features_are_orthogonal():
    directions = peer_attentions.orthogonal_features(20, 8)
    assert directions.shape == (20, 8)
    for start in (0, 8, 16):
        block = F.normalize(directions[start : start + 8], dim=1)
        torch.testing.assert_close(block @ block.T, torch.eye(len(block), dtype=torch.float64))


@pytest.mark.parametrize("n", [5, 64, 130])
def test_linear_sees_no_future_and_no_pads(n):
    query, key, value = (t.requires_grad_() for t in tensors(n))
    output = peer_attentions.linear_attention(query, key, value, scaling=0.25, causal=True)
    (gradient,) = torch.autograd.grad(output[:, :, n // 2].sum(), value)
    assert not gradient[:, :, n // 2 + 1 :].any()
    keys = torch.ones(2, n, dtype=torch.bool)
    keys[0, :2] = False
    whole = peer_attentions.linear_attention(query, key, value, scaling=0.25, keys=keys)
    loud = value.detach().clone()
    loud[0, :, :2] = 1e4
    torch.testing.assert_close(peer_attentions.linear_attention(query, key, loud, scaling=0.25, keys=keys), whole)


def test_topk_is_softmax_over_its_keys():
    query, key, value = tensors(20)
    everything = peer_attentions.topk_attention(query, key, value, scaling=0.25, count=20)
    torch.testing.assert_close(everything, F.scaled_dot_product_attention(query, key, value))
    weights = peer_attentions.topk_attention(query, key, torch.eye(20).expand(2, 2, 20, 20), scaling=0.25, count=3)
    assert ((weights > 0).sum(-1) == 3).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 20))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit"])
def test_by_name(names, family):
    for name in names:
        model, given = build(family, name, head=False), inputs(family)
        extra = {} if family in ("bert", "vit") else {"use_cache": False}
        assert model(**given, **extra)[0].isfinite().all()
    # 32 keys are all of a short sequence.
    stock = build(family, head=False)(**given)[0]
    torch.testing.assert_close(model(**given, **extra)[0], stock, rtol=0, atol=1e-4)


def test_linear_by_name_keeps_to_its_mask(names):
    model = build("llama", "peer_linear", head=False)
    leaf = model.get_input_embeddings()(inputs("llama")["input_ids"]).detach().requires_grad_()
    output = model(inputs_embeds=leaf, use_cache=False)[0]
    (gradient,) = torch.autograd.grad(output[:, 4].square().sum(), leaf)
    assert not gradient[:, 5:].any()
    model, given = build("bert", "peer_linear", head=False), inputs("bert", right=3)
    whole = model(**given)[0][:1, :6]
    torch.testing.assert_close(whole, model(input_ids=given["input_ids"][:1, :6])[0], rtol=0, atol=1e-3)
    with pytest.raises(ValueError, match="causal mask or padding alone"):
        model(given["input_ids"], attention_mask=torch.eye(9, dtype=torch.bool).expand(2, 1, 9, 9))


def test_command_line(capsys):
    assert peer_attentions.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["peer_linear", "peer_topk"]
    assert peer_attentions.main(["--tokens", "64"]) == 0
    assert "linear" in capsys.readouterr().out
