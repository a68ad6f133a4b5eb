"""Swin: its mask adds -100 to a learned bias. We read it exactly, so that nothing crosses the wrap and the bias learns."""

import pytest
import torch

import zoo
from hf_fullpay import PRESETS, AttentionPlan, Bounded, Clamp, Full, Mixture
from hf_fullpay.hf.bind import layers_of
from hf_fullpay.hf.forward import CARRIER
from small import NEUTRAL, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
SHIFTED = 1  # the layer of the tiny model that is shifted: 2 x 2 windows of 4 x 4 patches, by 2
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def carrying(plan, **changes):
    return zoo.make("swin", CARRIER, fullpay=plan.to_dict(), **changes)


def loud(model):
    """Biases as large as they may become, so that a threshold between them and -100 would err."""
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "relative_position_bias_table" in path:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)) * 60 - 60)
    return model


def apart():
    """Pairs of a shifted window that lie at opposite edges of the image, (windows, S, S)."""
    edge = (torch.arange(8) < 2).int().roll(-2)  # after the shift, the first two rows are the last
    mark = (edge[:, None] * 2 + edge).view(2, 4, 2, 4).transpose(1, 2).reshape(4, 16)
    return mark[:, :, None] != mark[:, None]


@pytest.mark.parametrize("size", [16, 14])
def test_neutral_equals_sdpa(size):
    """Shifted layers included; where biases are moderate, -100 hides as well as hiding does."""
    pixels = PIXELS[..., :size, :size]
    stock, ours = zoo.make("swin"), carrying(NEUTRAL)
    torch.testing.assert_close(states(ours, pixel_values=pixels), states(stock, pixel_values=pixels), rtol=0, atol=1e-5)
    gradients = []
    for model in (stock, ours):
        model(PIXELS)[0].tanh().sum().backward()
        gradients.append({path: p.grad for path, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    biases = [path for path in gradients[0] if "relative_position_bias_table" in path]
    assert len(biases) == 3
    for path, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][path], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max() + 1))
    assert all(gradients[0][path].abs().max() > 1e-3 for path in biases)


@pytest.mark.parametrize(
    "plan",
    [
        AttentionPlan(payment=Mixture(floor=None, budget=0.5)),
        AttentionPlan(payment=Clamp(floor=None, budget=0.5)),
        AttentionPlan(scores=Bounded(bound=0.5, temperature=1.0)),
        AttentionPlan(),
    ],
)
@pytest.mark.parametrize("make", [lambda model: model, loud], ids=["moderate", "loud"])
def test_nothing_crosses_the_wrap(plan, make):
    """Where softmax of scores of -100 would be paid a floor, or squeezed by a bound; whatever the learned bias says."""
    model, kept = make(carrying(plan)), []
    shifted = list(layers_of(model))[SHIFTED][1]
    shifted.register_forward_hook(lambda module, given, result: kept.append(result[1]))
    model(PIXELS, output_attentions=True)
    (seen,) = kept
    hidden = apart().repeat(2, 1, 1)[:, None].expand_as(seen)
    assert hidden.any()
    assert not seen[hidden].any()
    torch.testing.assert_close(seen.sum(-1), torch.ones_like(seen[..., 0]))
    if plan.payment != AttentionPlan().payment:
        counts = (~hidden).sum(-1, keepdim=True).expand_as(seen)
        assert (seen >= 0.5 / counts - 1e-6)[~hidden].all()
    if isinstance(plan.scores, Bounded):
        assert (seen[~hidden] > 0.36 / 16 / 2.8).all()  # exp(-1) against exp(1) at most


@pytest.mark.parametrize("name", [name for name, plan in PRESETS.items() if isinstance(plan.reach, Full)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_presets_run_in_every_type(name, dtype):
    model = zoo.make("swin", name).to(dtype)
    output = model(PIXELS.to(dtype))[0]
    output.float().square().mean().backward()
    assert output.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_switching_a_live_model_and_back():
    model = zoo.make("swin")
    first, wanted = states(model, pixel_values=PIXELS), states(zoo.make("swin", "fullpay"), pixel_values=PIXELS)
    for _ in range(2):
        model.set_attn_implementation("fullpay")
        assert torch.equal(states(model, pixel_values=PIXELS), wanted)
        model.set_attn_implementation("sdpa")
        assert torch.equal(states(model, pixel_values=PIXELS), first)
