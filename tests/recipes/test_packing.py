"""A packed document is told exactly what it is told alone, under every attention, in values and in gradients."""

import random
import warnings

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_fullpay
from hf_fullpay import AttentionPlan, Band, Blocks, Bounded, Chunks, FullPayWarning, Mixture
from packing import IGNORED, batch_of, pack, refuse_mixing, targets, without_cache

PLANS = {name: plan for name, plan in hf_fullpay.PRESETS.items() if name != "shifted_window"} | {
    # Borders inside the documents, and across those of the row.
    "band of 8": AttentionPlan(reach=Band(8), payment=Mixture(floor=0.01, budget=0.2, pay="visible")),
    "blocks of 8": AttentionPlan(reach=Blocks(8), payment=Mixture(floor=0.01, budget=0.2)),
    "chunks of 8": AttentionPlan(reach=Chunks(8, 2)),
    "median": AttentionPlan(scores=Bounded(bound=2.0, centre="median")),
}
ATTENTIONS = ["sdpa", *PLANS]  # eager rounds its weights to FP32
SIZES = {"vocab_size": 61, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.3}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **SIZES)
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            **SIZES,
        )
    ),
}
FAMILIES = pytest.mark.parametrize("family", MODELS)


@pytest.fixture(autouse=True)
def _shortfalls_and_slow_paths_are_told_elsewhere():
    warnings.simplefilter("ignore", FullPayWarning)


def under(family, attention, dtype=torch.float64):
    torch.manual_seed(0)
    model = MODELS[family]().to(dtype).train()
    if attention in PLANS:
        return hf_fullpay.convert(model, PLANS[attention])
    model.set_attn_implementation(attention)
    return model


def losses(model, batch):
    """Of every token, (B, N - 1); 0 where none is predicted."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), batch["labels"][:, 1:], ignore_index=IGNORED, reduction="none"
    )


def gradients(model, loss):
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True))


@FAMILIES
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_packed_documents_are_as_alone(family, attention):
    model = under(family, attention)
    draw = random.Random(0)
    documents = [[draw.randrange(61) for _ in range(size)] for size in (13, 2, 21, 9)]
    with without_cache(model):
        packed = losses(model, batch_of([documents, documents[::-1][:2]], pad=0))
        alone = [losses(model, batch_of([[document]], pad=0))[0] for document in documents]
        start = 0
        for document, expected in zip(documents, alone, strict=True):
            torch.testing.assert_close(packed[0, start : start + len(document) - 1], expected)
            start += len(document)
        torch.testing.assert_close(packed[1].sum(), alone[3].sum() + alone[2].sum())
        found, expected = gradients(model, packed[0].sum()), gradients(model, torch.cat(alone).sum())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@FAMILIES
@pytest.mark.parametrize("attention", ["sdpa", "fullpay", "fullpay_block"])
def test_the_guard_sees_what_mixes(family, attention):
    model = under(family, attention, torch.float32)
    with without_cache(model):
        refuse_mixing(model)
    assert model.config.use_cache
    with pytest.raises(ValueError, match=r"--packing: expected a model that keeps documents .* --no-packing"):
        refuse_mixing(model)  # with a cache, as models are by default


def test_rows_hold_every_document_once():
    draw, lengths = random.Random(1), []
    for _ in range(100):  # a hundred full rows, cut in pieces
        first, second = sorted(draw.sample(range(2, 63), 2))
        lengths += [first, second - first, 64 - second]
    draw.shuffle(lengths)
    rows = pack(lengths, 64)
    assert sorted(number for row in rows for number in row) == list(range(300))
    assert max(sum(lengths[number] for number in row) for row in rows) <= 64
    assert len(rows) <= 11 / 9 * 100 + 1  # what best fit, longest first, is known for
    assert pack([], 64) == []


def test_batches():
    batch = batch_of([[[5, 6, 7], [8, 9]], [[1, 2]]], pad=0)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [1, 2, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7, IGNORED, 9], [IGNORED, 2, IGNORED, IGNORED, IGNORED]]
    assert [targets(row) for row in ([[5, 6, 7], [8, 9]], [[1, 2]])] == [3, 1]
