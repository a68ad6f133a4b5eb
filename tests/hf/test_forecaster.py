"""The forecaster: every choice saved exactly, nothing from the future, predictions by feeding back."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, Trainer, TrainingArguments

from converted import learn, learned
from families import randomise
from hf_fullpay import (
    PRESETS,
    AttentionPlan,
    Band,
    DelayBias,
    FullPayForecaster,
    FullPayForecasterConfig,
    Mixture,
    convert,
    revert,
)
from hf_fullpay.hf.forecaster import POSITIONS
from hf_fullpay.layers import FEED_FORWARDS
from small import plans

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
FITTING = [name for name, plan in PRESETS.items() if not plan.misfit(cross=False, causal=True, image=False)]
LEARNING = AttentionPlan(Band(5), DelayBias(beta=0.1), Mixture(floor=None, budget=0.2, learnable=True), gate=True)


def forecaster(**options):
    options = {"channels": 3, "context_length": 12, "hidden_size": 16, "num_attention_heads": 2} | options
    torch.manual_seed(0)
    return randomise(FullPayForecaster(FullPayForecasterConfig(**options))).eval()


def window(n=9, batch=2):
    return torch.randn(batch, n, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("feed_forward", FEED_FORWARDS)
@pytest.mark.parametrize("plan", [None, LEARNING])
def test_saved_and_loaded_exactly(positions, feed_forward, plan, tmp_path):
    model = learn(forecaster(positions=positions, feed_forward=feed_forward, fullpay=plan and plan.to_dict()))
    assert len(learned(model)) == (8 if plan else 0)
    model.save_pretrained(tmp_path)
    for load in (AutoModel.from_pretrained, FullPayForecaster.from_pretrained):
        loaded = load(tmp_path)
        assert type(loaded) is FullPayForecaster
        assert plans(loaded) == [plan or PRESETS["fullpay"]] * 2
        assert loaded.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(x, model.state_dict()[name]) for name, x in loaded.state_dict().items())
        assert torch.equal(loaded(window()).prediction, model(window()).prediction)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.positions, config.feed_forward) == (positions, feed_forward)


def test_the_table_stays_fp32_and_whole_in_a_bf16_checkpoint(tmp_path):
    """O48, and buffers that a loader empties."""
    model = forecaster(positions="sinusoidal")
    model.save_pretrained(tmp_path)
    loaded = FullPayForecaster.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(loaded.positions.table, model.positions.table)
    assert loaded.head.weight.dtype == torch.bfloat16
    assert loaded(window()).prediction.isfinite().all()
    weights = model.state_dict()
    del weights["positions.table"]
    model.save_pretrained(tmp_path, state_dict=weights)
    assert torch.equal(FullPayForecaster.from_pretrained(tmp_path).positions.table, model.positions.table)


@pytest.mark.parametrize("name", [*FITTING, "sdpa", "eager"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_every_attention_without_a_look_ahead(name, positions):
    model = forecaster(attn_implementation=name, positions=positions)
    values = window().requires_grad_()
    prediction = model(values).prediction
    for row in range(8):
        (gradient,) = torch.autograd.grad(prediction[:, row].square().sum(), values, retain_graph=True)
        assert gradient[:, row].abs().max() > 0
        assert not gradient[:, row + 1 :].any()


def test_eager_is_sdpa_and_weights_are_given():
    given = {"values": window(), "attention_mask": torch.tensor([[0, 0] + [1] * 7, [1] * 9])}
    eager, sdpa, plain = (
        forecaster(attn_implementation=name)(**given, output_attentions=name != "sdpa")
        for name in ("eager", "sdpa", "delay_aware")
    )
    torch.testing.assert_close(eager.prediction[:, 2:], sdpa.prediction[:, 2:], rtol=0, atol=1e-5)
    for found in (eager, plain):
        assert [w.shape for w in found.attentions] == [(2, 2, 9, 9)] * 2
        assert not found.attentions[0][0, :, 2:, :2].any()


def test_predict_feeds_back_the_last_window():
    model, past = forecaster(), window(20)
    found = past
    for _ in range(5):
        found = torch.cat([found, model(found[:, -12:]).prediction[:, -1:].detach()], 1)
    assert torch.equal(model.predict(past, 5), found[:, 20:])


def test_an_untrained_one_repeats_the_last_reading():
    model, past = FullPayForecaster(FullPayForecasterConfig(channels=3)), window()
    assert torch.equal(model.predict(past, 3), past[:, -1:].expand(-1, 3, -1))


def test_the_loss_skips_what_is_unknown():
    model, values = forecaster(), window()
    labels = torch.cat([values[:, 1:], torch.full((2, 1, 3), torch.nan)], 1)
    output = model(values, labels=labels)
    torch.testing.assert_close(output.loss, (output.prediction[:, :-1] - values[:, 1:]).square().mean())
    output.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_trainer_trains_it(tmp_path):
    model = forecaster(fullpay=LEARNING.to_dict())
    data = [{"values": window(batch=1)[0], "labels": window(batch=1)[0].roll(-1, 0)}] * 8
    arguments = TrainingArguments(tmp_path, max_steps=3, use_cpu=True, report_to="none", save_strategy="no")
    before = {name: p.clone() for name, p in learned(model).items()}
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    assert not set(before) & set(trainer.get_decay_parameter_names(model))
    assert any((p != before[name]).any() for name, p in learned(model).items())


def test_another_plan_for_a_trained_one():
    model = forecaster()
    other = convert(model, AttentionPlan(Band(2)))
    assert plans(other) == [AttentionPlan(Band(2))] * 2
    assert (other(window()).prediction - model(window()).prediction).abs().max() > 1e-4
    model.set_attn_implementation("sdpa")
    assert plans(model) == []
    with pytest.raises(ValueError, match=r"has none.*set_attn_implementation\(\"sdpa\"\)"):
        revert(other)


def test_times_reach_the_plan():
    model = forecaster(attn_implementation="delay_aware")
    times = torch.tensor([[0.0, 1, 50, 51, 100, 101, 150, 151, 200]]).expand(2, -1)
    assert (model(window(), times=times).prediction - model(window()).prediction).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: forecaster(positions="alibi"), "positions"),
        (lambda: forecaster(feed_forward="relu"), "feed_forward"),
        (lambda: forecaster(num_attention_heads=3), "divisor of hidden_size"),
        (lambda: forecaster(context_length=0), "context_length"),
        (lambda: forecaster(dropout=1.0), "dropout"),
        (lambda: forecaster()(window(13)), "context_length=12"),
        (lambda: forecaster()(window()[..., :2]), r"\(batch, readings, 3\)"),
        (lambda: forecaster().predict(window(), 0), "horizon"),
        (lambda: forecaster().predict(window()[:, :0], 1), "readings"),
    ],
)
def test_bad_input(call, word):
    with pytest.raises(ValueError, match=word):
        call()
