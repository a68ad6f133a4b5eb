"""Training: gradients everywhere, dropout only where it belongs, and every numeric mode that Trainer offers."""

import math

import pytest
import torch
from transformers import AttentionInterface

from converted import LEARNABLE, learned
from families import FAMILIES, build, inputs
from hf_fullpay import AttentionPlan, Mixture, convert
from hf_fullpay.hf.strengths import Strengths
from hf_fullpay.payment.mixture import Budget
from small import EVERYWHERE, load, on, short, states, watched

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
DROPOUT = {
    "llama": {"attention_dropout": 0.5}, "gpt2": {"attn_pdrop": 0.5},
    "bert": {"attention_probs_dropout_prob": 0.5}, "vit": {"attention_probs_dropout_prob": 0.5},
}  # fmt: skip


def labelled(family):
    """Inputs with what a loss needs."""
    given = inputs(family)
    labels = given["input_ids"] if family in ("llama", "gpt2") else torch.tensor([0, 1])
    return {**given, "labels": labels}


def step(model, family):
    """Loss and gradients of one step."""
    model.zero_grad()
    loss = model(**labelled(family)).loss
    loss.backward()
    return loss.detach(), {path: p.grad.clone() for path, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
@pytest.mark.parametrize("converted", [False, True], ids=["by name", "converted"])
def test_one_step(family, name, converted):
    """O42, O45: finite, and no trainable parameter is left without a gradient, or DDP would stop."""
    model = convert(build(family), short(name)) if converted else load(family, name, head=True)
    model.train()
    loss, gradients = step(model, family)
    assert loss.isfinite()
    assert gradients.keys() == {path for path, p in model.named_parameters() if p.requires_grad}
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert all(gradients[path].any() for path in learned(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.step()
    after, _ = step(model, family)
    assert after < loss


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_model_leaves_no_parameter_unused(family):
    """O45: the first layer vanilla, the last one learning."""
    plan = AttentionPlan(payment=Mixture(learnable=True), gate=True, layers="from:1")
    model = convert(build(family), plan).train()
    _, gradients = step(model, family)
    assert gradients.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
def test_dropout_only_in_training_and_again_after_eval(family, name):
    """O43, first part."""
    model, given = load(family, name, **DROPOUT[family]), inputs(family)
    still = [states(model.eval(), **given) for _ in range(2)]
    moving = [states(model.train(), **given) for _ in range(2)]
    assert torch.equal(*still)
    assert not torch.equal(*moving)
    assert torch.equal(states(model.eval(), **given), still[0])
    assert not torch.equal(states(model.train(), **given), states(model, **given))


@pytest.mark.parametrize("name", on("bert"))
def test_dropout_is_unbiased_and_spares_the_floor(name):
    """O43, second part: the mean weights over many runs are those of eval, and the floor stands in every run."""
    model, given = load("bert", name, num_hidden_layers=1, **DROPOUT["bert"]), inputs("bert", batch=1)
    still = model(**given, output_attentions=True).attentions[0].detach()
    model.train()
    runs = torch.stack([model(**given, output_attentions=True).attentions[0].detach() for _ in range(300)])
    spread = runs.std(0) / math.sqrt(300)
    assert ((runs.mean(0) - still).abs() <= 5 * spread + 1e-5).all()
    payment = short(name).payment
    if isinstance(payment, Budget):
        seen = still > 0
        n = seen.sum(-1, keepdim=True)
        floor = (payment.budget / n).clamp_max(payment.floor).expand_as(still)
        assert (runs[:, seen] >= floor[seen] - 1e-6).all()


@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(family, name, reentrant):
    """The same loss and gradients, learned numbers included."""
    plan = short(name) if short(name).is_learnable else LEARNABLE["all"]
    for model in (load(family, name, head=True), convert(build(family), plan)):
        model.train()
        model.config.use_cache = False
        loss, gradients = step(model, family)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        again, repeated = step(model, family)
        torch.testing.assert_close(again, loss, rtol=0, atol=1e-6)
        for path, gradient in gradients.items():
            torch.testing.assert_close(repeated[path], gradient, rtol=1e-5, atol=1e-5, msg=path)


@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
def test_autocast(family, name):
    """Rotary models hand FP32 queries beside BF16 values; inside, nothing may be rounded that was not rounded before."""
    model, given = load(family, name).train(), inputs(family)
    with torch.autocast("cpu", dtype=torch.bfloat16), watched(model.config._attn_implementation) as calls:
        output = model(**given)[0]
    output.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    forward = AttentionInterface()[model.config._attn_implementation]
    assert len(calls) == 2
    for call in calls:
        low = [tensor.bfloat16() for tensor in call.tensors]
        again, _ = forward(call.module, *low, call.mask, **call.options)
        assert call.output.dtype == torch.bfloat16
        assert torch.equal(again, call.output)


@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(family, name, dtype):
    """As exact as the stock model in that type, with a little room for the luck of rounding."""
    given = inputs(family)
    given = {key: value.to(dtype) if value.is_floating_point() else value for key, value in given.items()}
    errors = []
    for make in (lambda: load(family, name), lambda: build(family, head=False)):
        exact = states(make().float(), **{k: v.float() if v.is_floating_point() else v for k, v in given.items()})
        low = states(make().to(dtype), **given)
        assert low.dtype == dtype
        errors.append((low.float() - exact).abs().max())
    assert errors[0] <= 3 * errors[1] + 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_two_runs_are_equal_bit_for_bit(family):
    """O40: values and gradients."""
    for name in on(family):
        runs = [step(load(family, name, head=True).train(), family) for _ in range(2)]
        assert torch.equal(runs[0][0], runs[1][0])
        assert all(torch.equal(gradient, runs[1][1][path]) for path, gradient in runs[0][1].items()), name


@pytest.mark.parametrize("what", LEARNABLE)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_owner_is_called_before_its_numbers_are_read(family, what):
    """O51, F13: as under ZeRO-3, FSDP and offloading, the numbers are there only between two hooks of their module."""
    model, given = convert(build(family), LEARNABLE[what]), inputs(family)
    wanted, calls = states(model, **given), []
    for module in [module for module in model.modules() if isinstance(module, Strengths)]:
        kept = {path: p.detach().clone() for path, p in module.named_parameters()}

        def fetch(module, args, kept=kept):
            calls.append(module)
            for path, parameter in module.named_parameters():
                parameter.data = kept[path]

        def drop(module, args, output):
            for parameter in module.parameters():
                parameter.data = torch.empty(0)

        module.register_forward_pre_hook(fetch)
        module.register_forward_hook(drop)
        drop(module, None, None)
    assert torch.equal(states(model, **given), wanted)
    assert len(calls) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gate_forgets_its_input(family):
    """Nothing of a batch stays behind in the modules, or memory would grow and copies would carry it."""
    model = convert(build(family), LEARNABLE["gate"])
    for attention in ("fullpay_custom", "sdpa"):
        model.set_attn_implementation(attention)
        states(model, **inputs(family))
        for module in model.modules():
            assert not [key for key, value in vars(module).items() if isinstance(value, torch.Tensor)], attention
