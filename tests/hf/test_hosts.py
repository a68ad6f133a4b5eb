"""A mixture whose softmax part another attention of Transformers computes."""

import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

import hf_fullpay
from families import CAUSAL, FAMILIES, build, inputs
from hf_fullpay import AttentionPlan, Band, Bounded, Mixture, attention
from hf_fullpay.hf.bind import layers_of

OURS = AttentionPlan(payment=Mixture(floor=None, budget=0.3))


def hosted(name, **changes):
    return AttentionPlan(payment=Mixture(floor=None, budget=0.3, host=name), **changes)


def flash_like(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
    """Plain PyTorch with the conventions of flash attention, which cannot run here: padding as (B, M) or None,
    causality from the last key, packing from position_ids, and its own name in the module's config."""
    assert module.config._attn_implementation == "like_flash"
    causal = module.is_causal if is_causal is None else is_causal
    queries, keys = query.shape[2], key.shape[2]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    seen = torch.ones(query.shape[0], 1, queries, keys, dtype=torch.bool)
    if causal:
        seen = seen.tril(keys - queries)
    if attention_mask is not None:
        seen = seen & attention_mask.bool()[:, None, None]
    elif (places := kwargs.get("position_ids")) is not None and queries == keys:
        document = (places == 0).cumsum(-1)
        seen = seen & (document[:, None, :, None] == document[:, None, None, :])
    scores = (query @ key.mT * scaling).masked_fill(~seen, -1e30)
    return (torch.softmax(scores, -1) @ value).transpose(1, 2), None


@pytest.fixture
def like_flash(own_name):
    AttentionInterface.register("like_flash", flash_like)
    AttentionMaskInterface.register("like_flash", flash_attention_mask)
    yield own_name(hosted("like_flash"))
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("like_flash", None)


def pair(family, name, own_name, **changes):
    return build(family, own_name(OURS), **changes), build(family, name, **changes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pads", [{}, {"left": 3}, {"right": 2}], ids=str)
def test_the_floor_rides_on_sdpa(family, pads, own_name):
    ours, riding = pair(family, own_name(hosted("sdpa")), own_name)
    batch = inputs(family, **pads)
    torch.testing.assert_close(riding(**batch).logits, ours(**batch).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pads", [{}, {"left": 3}, {"right": 2}], ids=str)
def test_the_floor_rides_on_a_host_like_flash(family, pads, like_flash, own_name):
    ours, riding = pair(family, like_flash, own_name)
    batch = inputs(family, **pads)
    real = batch["attention_mask"].bool() if pads and family != "vit" else None
    found, wanted = riding(**batch).logits, ours(**batch).logits
    if real is not None and family in CAUSAL:
        found, wanted = found[real], wanted[real]
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("pads", [{}, {"left": 3}], ids=str)
def test_generation_on_a_host(family, pads, like_flash, own_name):
    ours, riding = pair(family, like_flash, own_name)
    batch = {"attention_mask": torch.ones(2, 9, dtype=torch.long)} | inputs(family, **pads)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(riding.generate(**batch, **options), ours.generate(**batch, **options))


def test_packed_documents_do_not_mix_on_a_host_like_flash(like_flash):
    model = build("llama", like_flash)
    ids = inputs("llama", batch=1, length=12)["input_ids"]
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    packed = model(input_ids=ids, position_ids=places, use_cache=False).logits
    apart = torch.cat([model(input_ids=part, use_cache=False).logits for part in (ids[:, :5], ids[:, 5:])], 1)
    torch.testing.assert_close(packed, apart, atol=2e-5, rtol=1e-4)


def test_gradients_and_weights_on_a_host(own_name):
    ours, riding = pair("bert", own_name(hosted("sdpa")), own_name)
    batch = inputs("bert", right=2)
    for model in (ours, riding):
        model(**batch).logits.square().sum().backward()
    for (name, one), two in zip(ours.named_parameters(), riding.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(two.grad, one.grad, atol=1e-5, rtol=1e-4, msg=name)
    weights = riding(**batch, output_attentions=True).attentions[0]
    torch.testing.assert_close(weights, ours(**batch, output_attentions=True).attentions[0], atol=1e-6, rtol=1e-5)
    assert weights[1].min() >= 0.3 / 9 * (1 - 1e-6)


def test_layers_without_the_plan_run_on_the_host_too(own_name):
    half = build("llama", own_name(hosted("sdpa", layers=(1,))))
    other = build("llama", own_name(AttentionPlan(payment=OURS.payment, layers=(1,))))
    batch = inputs("llama", left=2)
    torch.testing.assert_close(half(**batch).logits, other(**batch).logits, atol=2e-5, rtol=1e-4)


def test_a_converted_checkpoint_keeps_its_host(tmp_path):
    plan = AttentionPlan(payment=Mixture(floor=None, budget=0.3, learnable=True, host="sdpa"))
    model = hf_fullpay.convert(build("llama"), plan)
    batch = inputs("llama", left=2)
    free = hf_fullpay.convert(build("llama"), AttentionPlan(payment=Mixture(floor=None, budget=0.3, learnable=True)))
    torch.testing.assert_close(model(**batch).logits, free(**batch).logits, atol=2e-5, rtol=1e-4)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert {layer.host for _, _, layer in layers_of(again)} == {"sdpa"}
    assert torch.equal(again(**batch).logits, model(**batch).logits)


def test_plan_with_a_host_survives_json():
    plan = hosted("flash_attention_2")
    assert AttentionPlan.from_dict(plan.to_dict()) == plan
    assert "host='flash_attention_2'" in plan.describe()


def test_hosts_that_cannot_be_had_are_refused(own_name):
    with pytest.raises(
        ValueError, match=r"Mixture\(host=\.\.\.\): expected one of \[.*'sdpa'.*got 'flash_attention_99'"
    ):
        build("llama", own_name(hosted("flash_attention_99")))
    with pytest.raises(ValueError, match=r"Mixture\(host=\.\.\.\): expected one of"):
        build("llama", own_name(hosted("fullpay")))
    with pytest.raises(ImportError, match=r"flash_attn|FlashAttention2"):
        build("llama", own_name(hosted("flash_attention_2")))
    for name in ("eager", "flex_attention", "", 3):
        with pytest.raises(ValueError, match=r"Mixture\(host=\.\.\.\): expected the name of an attention"):
            Mixture(host=name)
    with pytest.raises(ValueError, match=r"expected reach=Full\(\) and scores=Plain\(\)"):
        hosted("sdpa", reach=Band(8))
    with pytest.raises(ValueError, match=r"expected reach=Full\(\) and scores=Plain\(\)"):
        hosted("sdpa", scores=Bounded())
    x = torch.ones(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"plan: expected no host on plain tensors, got 'sdpa'"):
        attention(x, x, x, plan=hosted("sdpa"))


def test_registering_a_plan_with_a_host_asks_for_nothing_yet(own_name):
    """The host may be installed later; the model that needs it asks."""
    assert hf_fullpay.PRESETS[own_name(hosted("flash_attention_3"))].host == "flash_attention_3"
