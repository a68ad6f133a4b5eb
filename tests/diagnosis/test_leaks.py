"""Leaks: attentions that see the future must fail, and what is no leak must not."""

import pytest
import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from families import VOCABULARY, build, inputs
from hf_fullpay.diagnosis.leaks import _other_tokens, check_leak
from hf_fullpay.diagnosis.measures import MEASURES
from hf_fullpay.diagnosis.report import Report
from probes import attention_named, left_as_it_was, run


def seeing(ahead, layers=(0, 1)):
    """Attention that calls itself causal and sees some tokens ahead, in some layers."""

    def attention(module, query, key, value, attention_mask, **options):
        if module.layer_idx not in layers:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        n = query.shape[2]
        mask = torch.ones(n, n, dtype=torch.bool).tril(ahead)
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).contiguous(), None

    return attention


def report(found):
    limits = {name: MEASURES[name].limit for name in ("leak", "leak_gradient")}
    return Report("", "", "", ["", ""], {}, found, limits)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("ahead", [1, 1000])
def test_a_leak_is_found(family, ahead):
    with attention_named("leaky", seeing(ahead)) as name:
        model = build(family, name, head=False)
        with left_as_it_was(model):
            found = run(check_leak, model, inputs(family))
    assert min(found.values["leak"]) > 1e-3
    assert min(found.values["leak_gradient"]) > 1e-3
    lines = {line.measure.name: line.passed for line in report(found).lines}
    assert lines == {"leak": False, "leak_gradient": False}


def test_the_layer_of_a_leak():
    with attention_named("leaky", seeing(1, layers=(1,))) as name:
        found = run(check_leak, build("gpt2", name, head=False), inputs("gpt2"))
    assert found.values["leak"][0] < 1e-6 < 1e-3 < found.values["leak"][1]
    assert min(found.values["leak_gradient"]) > 1e-3  # through layer 1, also from before layer 0
    with attention_named("leaky", seeing(1, layers=(0,))) as name:
        found = run(check_leak, build("gpt2", name, head=False), inputs("gpt2"))
    assert found.values["leak_gradient"][0] > 1e-3
    assert found.values["leak_gradient"][1] == 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", ["sdpa", "eager", "fullpay", "bounded"])
@pytest.mark.parametrize("pads", [{}, {"left": 3}, {"right": 4}])
@pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
def test_a_causal_model_passes(family, name, pads):
    found = run(check_leak, build(family, name), inputs(family, **pads))
    assert report(found).passed
    assert max(found.values["leak"]) < 1e-6


def test_embeddings_and_packed_texts():
    model = build("llama", head=False)
    given = inputs("llama", batch=1, length=12)
    packed = given | {"position_ids": torch.arange(6).repeat(2)[None]}
    embedded = {"inputs_embeds": model.embed_tokens(given["input_ids"]).detach()}
    for one in (packed, embedded):
        assert report(run(check_leak, model, one)).passed
    with attention_named("leaky", seeing(1)) as name:
        model = build("llama", name, head=False)
        assert min(run(check_leak, model, embedded).values["leak"]) > 1e-3


def test_encoders_are_not_asked():
    for family in ("bert", "vit"):
        found = run(check_leak, build(family, head=False), inputs(family))
        assert not found.values
        assert found.notes == [
            "Leaks were not looked for: the attention is not causal, every token may see later ones."
        ]


def test_every_ordinary_token_becomes_another_and_no_special_one():
    model = build("gpt2", pad_token_id=0, bos_token_id=1, eos_token_id=2)
    ids = torch.arange(VOCABULARY).repeat(20)
    drawn = _other_tokens(model, ids, torch.Generator().manual_seed(0))
    assert torch.equal(drawn[ids < 3], ids[ids < 3])
    assert (drawn != ids)[ids >= 3].all()
    assert drawn.unique().numel() == VOCABULARY
