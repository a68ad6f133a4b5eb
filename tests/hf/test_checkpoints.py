"""Checkpoints: the same bits, name and logits after a round trip; what is wrong is said, never filled up in silence."""

import json
from dataclasses import replace

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

from converted import LEARNABLE, equal, given_to, learn, learned, stock
from hf_fullpay import CONFIGS, MODELS, PRESETS, AttentionPlan, Band, Bounded, Mixture, convert, revert
from hf_fullpay.hf.checkpoints import auto_class_of
from hf_fullpay.hf.models import stock_of
from small import EVERYWHERE, plans, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
BASES = {"bert": "FullPayBertModel", "vit": "FullPayViTModel", "gpt2": "FullPayGPT2Model", "llama": "FullPayLlamaModel"}
HEADS = {
    "bert": "FullPayBertForTokenClassification",
    "vit": "FullPayViTForImageClassification",
    "gpt2": "FullPayGPT2LMHeadModel",
    "llama": "FullPayLlamaForSequenceClassification",
}


def close(one, other):
    """The weights are equal to the bit; where they lie in memory may change the order of a sum."""
    torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


def auto(name):
    return getattr(t, auto_class_of(MODELS[name]))


def written(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_of_every_class(name, tmp_path):
    model, given = learn(convert(stock(name), LEARNABLE["all"])), given_to(name)
    model.save_pretrained(tmp_path)
    again = auto(name).from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert equal(dict(again.named_parameters()), dict(model.named_parameters()))
    assert plans(again) == plans(model)
    assert again.config._attn_implementation == "fullpay_custom"
    assert not again.training
    close(states(again, **given), states(model, **given))
    again.save_pretrained(tmp_path / "again")
    assert written(tmp_path / "again") == written(tmp_path)
    one, other = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert equal(one, other)


@pytest.mark.parametrize(("family", "preset"), EVERYWHERE)
def test_round_trip_of_every_preset(family, preset, tmp_path):
    name = HEADS[family]
    model, given = learn(convert(stock(name), preset)), given_to(name)
    model.save_pretrained(tmp_path)
    again = auto(name).from_pretrained(tmp_path)
    assert again.config._attn_implementation == preset
    assert plans(again) == [PRESETS[preset]] * 2
    close(states(again, **given), states(model, **given))


@pytest.mark.parametrize("what", LEARNABLE)
def test_round_trip_of_everything_learned(what, tmp_path):
    model, given = learn(convert(stock(HEADS["bert"]), LEARNABLE[what])), given_to(HEADS["bert"])
    model.save_pretrained(tmp_path)
    again = auto(HEADS["bert"]).from_pretrained(tmp_path)
    assert equal(learned(again), learned(model))
    close(states(again, **given), states(model, **given))
    back = revert(again)
    back.save_pretrained(tmp_path / "stock")
    plain = t.AutoModelForTokenClassification.from_pretrained(tmp_path / "stock")
    assert type(plain) is t.BertForTokenClassification
    close(states(plain, **given), states(stock(HEADS["bert"]), **given))


@pytest.mark.parametrize("family", BASES)
def test_base_and_head_read_each_other(family, tmp_path):
    head = learn(convert(stock(HEADS[family]), LEARNABLE["all"]))
    head.save_pretrained(tmp_path / "head")
    base = t.AutoModel.from_pretrained(tmp_path / "head")
    assert type(base) is MODELS[BASES[family]]
    prefix = head.base_model_prefix + "."
    assert equal({prefix + path: p for path, p in learned(base).items()}, learned(head))
    base.save_pretrained(tmp_path / "base")
    again = auto(HEADS[family]).from_pretrained(tmp_path / "base")
    assert type(again) is type(head)
    assert equal(learned(again), learned(head))
    assert all(p.isfinite().all() for p in again.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_stock_checkpoint_read_by_a_fullpay_class(name, tmp_path):
    """What it lacks starts where the plan says; memory that nothing wrote would be NaN here."""
    original, given = stock(name), given_to(name)
    original.save_pretrained(tmp_path)
    plan = LEARNABLE["all"]
    model = MODELS[name].from_pretrained(tmp_path, fullpay=plan.to_dict())
    assert plans(model) == [plan] * 2
    assert model.config._attn_implementation == "fullpay_custom"
    assert len(learned(model)) == 8
    assert not any(p.any() for p in learned(model).values())
    assert model.config.model_type == MODELS[name].config_class.model_type
    torch.testing.assert_close(states(model, **given), states(convert(original, plan), **given), rtol=0, atol=1e-6)
    model.save_pretrained(tmp_path / "again")
    assert type(auto(name).from_pretrained(tmp_path / "again")) is MODELS[name]
    plain = MODELS[name].from_pretrained(tmp_path)
    assert plain.config._attn_implementation == "fullpay"
    assert plans(plain) == [PRESETS["fullpay"]] * 2


@pytest.mark.parametrize("family", BASES)
def test_strengths_missing_from_a_checkpoint_start_anew(family, tmp_path):
    """F4: neither garbage nor NaN, in the base class and in a head class."""
    for name in (BASES[family], HEADS[family]):
        folder = tmp_path / name
        learn(convert(stock(name), LEARNABLE["all"])).save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        save_file(
            {path: v for path, v in tensors.items() if "alpha" not in path},
            folder / "model.safetensors",
            {"format": "pt"},
        )
        model = auto(name).from_pretrained(folder)
        numbers = learned(model)
        assert all(bool(p.any()) == ("alpha" not in path) for path, p in numbers.items())
        assert states(model, **given_to(name)).isfinite().all()


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_strengths_stay_in_single_precision(family, dtype, tmp_path):
    """O48: through from_pretrained; after .to() they are cast like any parameter, and still run."""
    name = HEADS[family]
    model = learn(convert(stock(name), LEARNABLE["all"]))
    model.save_pretrained(tmp_path)
    low = auto(name).from_pretrained(tmp_path, dtype=dtype)
    assert equal(learned(low), learned(model))
    assert {p.dtype for path, p in low.named_parameters() if path not in learned(low)} == {dtype}
    output = states(low, **given_to(name))
    assert output.dtype == dtype
    assert output.isfinite().all()
    low.save_pretrained(tmp_path / "low")
    assert equal(learned(auto(name).from_pretrained(tmp_path / "low", dtype="auto")), learned(model))
    assert states(model.to(dtype), **given_to(name)).isfinite().all()


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_config_says(name, tmp_path):
    """Strict JSON, the plan, the name, a model type of its own, and the way to the code."""
    kind = CONFIGS[name]
    plan = AttentionPlan(
        Band(7),
        Bounded(bound=[1.0, float("inf")]),
        Mixture(floor=None),
        gate=True,
        layers={"0": "vanilla", "1-": "all"},
    )
    config = kind(fullpay=plan.to_dict())
    config.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    read = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (read["model_type"], read["attn_implementation"]) == (kind.model_type, "fullpay_custom")
    assert AttentionPlan.from_dict(read["fullpay"]) == plan
    again = t.AutoConfig.from_pretrained(tmp_path)
    assert type(again) is kind
    assert again.to_dict() | {"_name_or_path": ""} == config.to_dict()
    assert kind().fullpay is None
    assert kind()._attn_implementation == "fullpay"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda config: config["fullpay"].update(version=99), "newer hf-fullpay"),
        (lambda config: config["fullpay"].update(reech=1), "reech"),
        (lambda config: config["fullpay"]["payment"].update(budget=7), r"budget=.*expected a number in \[0, 1\]"),
        (lambda config: config["fullpay"].update(layers=[5]), "layers"),
        (lambda config: config.update(fullpay="fullpay"), "fullpay"),
        (lambda config: config.update(fullpay=None), "expected a plan in config.fullpay"),
        (lambda config: config.update(attn_implementation="fulpay"), "fulpay"),
    ],
)
def test_configs_that_cannot_be_read(change, reason, tmp_path):
    name = HEADS["bert"]
    convert(stock(name), replace(PRESETS["fullpay"], gate=True)).save_pretrained(tmp_path)
    config = written(tmp_path)
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match=reason) as error:
        auto(name).from_pretrained(tmp_path)
    assert isinstance(error.value, ValueError)


def test_weights_that_cannot_be_read(tmp_path):
    """No weights, half a file, and a file for another number of heads."""
    name = HEADS["bert"]
    convert(stock(name), LEARNABLE["all"]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole, tensors = file.read_bytes(), load_file(file)
    wrong = {path: torch.zeros(5) if "budget_bias" in path else value for path, value in tensors.items()}
    save_file(wrong, file, {"format": "pt"})
    with pytest.raises(RuntimeError, match=r"size mismatch|ignore_mismatched_sizes"):
        auto(name).from_pretrained(tmp_path)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Exception, match=r"(?i)safetensors|incomplete|header|invalid"):
        auto(name).from_pretrained(tmp_path)
    file.unlink()
    with pytest.raises(OSError, match="no file named"):
        auto(name).from_pretrained(tmp_path)


def test_a_checkpoint_of_another_family_is_no_fullpay_one(tmp_path):
    stock(HEADS["bert"]).save_pretrained(tmp_path)
    assert type(auto(HEADS["bert"]).from_pretrained(tmp_path)) is stock_of(MODELS[HEADS["bert"]])
