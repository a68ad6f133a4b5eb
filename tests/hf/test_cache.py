"""A prompt fed whole, in pieces, token by token or into a static cache gives the same states."""

import pytest
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3Model, StaticCache

from families import CAUSAL, build, inputs
from hf_fullpay import PRESETS, AttentionPlan, Band, Mixture
from small import ON_CAUSAL, load, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
SPLITS = ([1] * 9, [5, 1, 1, 1, 1], [3, 3, 3], [2, 7], [8, 1])
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=9),
    "static with room": lambda config: StaticCache(config=config, max_cache_len=23),
}


def close(one, other, tolerance=2e-4):
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def in_pieces(model, cache, split, ids, mask=None, position_ids=None):
    """States of a prompt fed in pieces."""
    found, start = [], 0
    for size in split:
        stop = start + size
        extra = {} if mask is None else {"attention_mask": mask[:, :stop], "position_ids": position_ids[:, start:stop]}
        found.append(states(model, input_ids=ids[:, start:stop], cache=cache, use_cache=True, **extra))
        start = stop
    return torch.cat(found, 1)


def padded_by(left):
    given = inputs("gpt2", left=left)
    return given["input_ids"], given["attention_mask"], given["position_ids"]


@pytest.mark.parametrize(("family", "name"), ON_CAUSAL)
@pytest.mark.parametrize("cache", CACHES)
def test_any_split_equals_one_pass(family, name, cache):
    model, ids = load(family, name), inputs(family)["input_ids"]
    whole = states(model, input_ids=ids, use_cache=False)
    for split in SPLITS:
        close(in_pieces(model, CACHES[cache](model.config), split, ids), whole)


@pytest.mark.parametrize(("family", "name"), ON_CAUSAL)
@pytest.mark.parametrize("cache", CACHES)
def test_any_split_equals_one_pass_with_left_pads(family, name, cache):
    """O08, O10: also the prompt without its pads gives the same."""
    model, (ids, mask, places) = load(family, name), padded_by(3)
    whole = states(model, input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False)
    alone = states(model, input_ids=ids[:1, 3:], use_cache=False)
    for split in SPLITS:
        pieces = in_pieces(model, CACHES[cache](model.config), split, ids, mask, places)
        close(pieces[0, 3:], whole[0, 3:])
        close(pieces[0, 3:], alone[0])
        close(pieces[1], whole[1])


@pytest.mark.parametrize(("family", "name"), ON_CAUSAL)
def test_a_mask_of_ones_is_no_mask_at_every_step(family, name):
    """O07."""
    model, ids = load(family, name), inputs(family, length=8)["input_ids"]
    ones, places = torch.ones_like(ids), torch.arange(8).expand(2, -1)
    with_mask, without = (
        in_pieces(model, DynamicCache(config=model.config), [5, 1, 1, 1], ids, *extra) for extra in ((ones, places), ())
    )
    close(with_mask, without, 1e-5)


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("cache", CACHES)
def test_a_mask_of_the_new_tokens_alone_is_refused(family, cache):
    """O08: Transformers would fill it up with zeros and hide the newest token."""
    model, (ids, mask, places) = load(family, "fullpay"), padded_by(2)
    memory = CACHES[cache](model.config)
    in_pieces(model, memory, [5], ids, mask, places)
    with pytest.raises(ValueError, match="cached ones included"):
        states(model, input_ids=ids[:, 5:6], attention_mask=mask[:, 5:6], position_ids=places[:, 5:6], cache=memory)


@pytest.mark.parametrize(("family", "name"), ON_CAUSAL)
def test_nothing_leaks_inside_a_cached_chunk(family, name):
    """O22: a chunk of three after five cached tokens; its first row knows nothing of the other two."""
    model, ids = load(family, name), inputs(family)["input_ids"]
    cache = DynamicCache(config=model.config)
    states(model, input_ids=ids[:, :5], cache=cache)
    chunk = model.get_input_embeddings()(ids[:, 5:8]).detach().requires_grad_()
    output = model(inputs_embeds=chunk, cache=cache)[0]
    (gradient,) = torch.autograd.grad(output[:, 0].square().sum(), chunk)
    assert gradient[:, 0].abs().max() > 0
    assert not gradient[:, 1:].any()


@pytest.mark.parametrize(
    "plan", [AttentionPlan(Band(3)), AttentionPlan(Band(3), payment=Mixture(), layers=[1]), "bounded_fullpay"]
)
@pytest.mark.parametrize("cache", CACHES)
def test_layers_with_caches_of_different_length(plan, cache):
    """O23: one layer keeps everything, the other a window of its own, and our band cuts through both."""
    config = Qwen3Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=4,
        layer_types=["full_attention", "sliding_attention"], attn_implementation="fullpay_custom",
        fullpay=(PRESETS[plan] if isinstance(plan, str) else plan).to_dict(),
    )  # fmt: skip
    model, ids = Qwen3Model(config).eval(), inputs("llama", length=9)["input_ids"]
    whole = states(model, input_ids=ids, use_cache=False)
    for split in SPLITS:
        close(in_pieces(model, CACHES[cache](config), split, ids), whole)


@pytest.mark.parametrize("n", [16, 129])
@pytest.mark.parametrize("path", ["no mask", "padding", "pairs", "weights", "steps"])
def test_the_window_counts_the_token_itself(n, path):
    """O26: a band of n tokens is causality; one of n - 1 changes the last row only. On every path the same."""
    ids = inputs("llama", length=n, batch=2)["input_ids"]
    extra = {
        "padding": {"attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)},
        "pairs": {"attention_mask": torch.ones(1, 1, n, n, dtype=torch.bool).tril()},
        "weights": {"output_attentions": True},
    }.get(path, {})
    found = {}
    for attention in ("sdpa", AttentionPlan(Band(n)), AttentionPlan(Band(n - 1))):
        model = (
            build("llama", "sdpa", head=False, num_hidden_layers=1)
            if attention == "sdpa"
            else load("llama", attention, num_hidden_layers=1)
        )
        if path == "steps":
            found[attention] = in_pieces(model, DynamicCache(config=model.config), [n - 2, 1, 1], ids)
        else:
            found[attention] = states(
                model, input_ids=ids, use_cache=False, **extra if attention != "sdpa" or path != "weights" else {}
            )
    causal, all_, but_one = found.values()
    first = 1 if path == "padding" else 0  # the state of a pad has no meaning
    close(all_[:, first:], causal[:, first:], 1e-5)
    changed = (but_one - causal)[:, first:].abs().amax((0, 2)) > 1e-4
    # With the first key hidden, the last row loses nothing.
    assert changed.nonzero().flatten().tolist() == ([] if path == "padding" else [n - 1])
