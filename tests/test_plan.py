"""Plans validate themselves, survive JSON, and say which layer does what."""

import copy
import json
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

import hf_fullpay
from hf_fullpay import (
    PRESETS,
    AttentionPlan,
    Band,
    Blocks,
    Bounded,
    Chunks,
    Clamp,
    DynamicScale,
    Full,
    Mixture,
    Plain,
    Softmax,
    WindowGlobal,
    Windows,
)
from hf_fullpay.plan import ORDINARY, with_options

NAN = float("nan")
BAD_LAYERS = ("some", "from:x", -1, [-1], [1, 1], [0.5], {}, {"a": "all"}, {"1": "x"}, None)
MISREAD = {"x_flash_y": "flash", "my_sdpa": "sdpa", "a/b": "/", "paged|x": "paged", "flex_attention_x": "flex"}
NO_NAMES = {"": "word", 3: "word", "two words": "word", "eager": "eager", "fullpay": "preset"}


@pytest.mark.parametrize(
    ("make", "option"),
    [
        *[(lambda v=v: Band(size=v), "size") for v in (0, -1, 2.5, "8", True, None)],
        *[(lambda v=v: Bounded(bound=v), "bound") for v in (0, -1, NAN, "x", [], [1, -1], True)],
        *[(lambda v=v: Bounded(temperature=v), "temperature") for v in (0, -2, NAN, "hot", math.inf)],
        *[(lambda v=v: WindowGlobal(size=v), "size") for v in (0, -1, 2.5, "8", True, None)],
        *[(lambda v=v: WindowGlobal(tokens=v), "tokens") for v in ((-1,), (0, 0), (0.5,), (True,), "0", 3, None, (10**30,))],
        *[(lambda v=v: WindowGlobal(random_blocks=v), "random_blocks") for v in (-1, 0.5, True, None)],
        *[(lambda v=v: WindowGlobal(seed=v), "seed") for v in (-1, 0.5, None)],
        *[(lambda v=v: Windows(size=v), "size") for v in (0, -1, 2.5, True, None)],
        *[(lambda v=v: Windows(size=4, shift=v), "shift") for v in (-1, 4, 1.5, True, None, "sometimes")],
        (lambda: Bounded(bound=1e-46), "bound"),
        *[(lambda v=v: Bounded(temperature=v), "temperature") for v in (1e-45, 1e300)],
        (lambda: Band(size=10**30), "size"),
        (lambda: Mixture(budget=10**400), "budget"),
        (lambda: AttentionPlan(layers="from:" + "9" * 5000), "layers"),
        (lambda: PRESETS["bounded"].promises(0), "promises"),
        (lambda: Bounded(centre="mode"), "centre"),
        (lambda: Bounded(slope="steep"), "slope"),
        (lambda: Bounded(bound=math.inf, slope="sharpen"), "bound"),
        *[(lambda v=v: Mixture(floor=v), "floor") for v in (-0.1, 1.1, NAN, "x")],
        *[(lambda v=v: Mixture(budget=v), "budget") for v in (-0.1, 1.1, NAN, None, "x", [0.1, 2])],
        *[(lambda v=v: Mixture(budget_max=v), "budget_max") for v in (0, 1.1, NAN)],
        (lambda: Mixture(budget=0.5, learnable=True), "budget"),
        (lambda: Mixture(budget=0, learnable=True), "budget"),
        (lambda: Mixture(pay="nobody"), "pay"),
        (lambda: Mixture(learnable=1), "learnable"),
        (lambda: Clamp(floor=2), "floor"),
        *[(lambda v=v: DynamicScale(max_scale=v), "max_scale") for v in (0, -1, 1, NAN, math.inf)],
        (lambda: DynamicScale(alpha=NAN), "alpha"),
        (lambda: AttentionPlan(reach=Plain()), "reach"),
        (lambda: AttentionPlan(scores="bounded"), "scores"),
        (lambda: AttentionPlan(payment=None), "payment"),
        (lambda: AttentionPlan(gate="yes"), "gate"),
        *[(lambda v=v: AttentionPlan(layers=v), "layers") for v in BAD_LAYERS],
    ],
)  # fmt: skip
def test_bad_options_are_named(make, option):
    with pytest.raises(ValueError, match=rf"{option}.*expected .*got "):
        make()


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        ("all", {0, 1, 2, 3}),
        ("all_but_last", {0, 1, 2}),
        ("from:2", {2, 3}),
        ([1, 3], {1, 3}),
        ([], set()),
        ({"0-1": "vanilla", "2-": "all"}, {2, 3}),
        ({"0": "all", "1-3": "vanilla"}, {0}),
    ],
)
def test_layers(layers, chosen):
    plan = AttentionPlan(payment=Mixture(), layers=layers)
    assert {i for i, of_layer in enumerate(plan.for_layers(4)) if of_layer is plan} == chosen
    assert all(of_layer is ORDINARY for i, of_layer in enumerate(plan.for_layers(4)) if i not in chosen)


@pytest.mark.parametrize("layers", ["from:4", [4], {"0-4": "all"}, {"0-1": "all"}, {"0-2": "all", "2-": "vanilla"}])
def test_layers_that_the_model_does_not_have(layers):
    with pytest.raises(ValueError, match=r"layers.*expected .*got "):
        AttentionPlan(layers=layers).for_layers(4)


@pytest.mark.parametrize(
    "plan",
    [
        *PRESETS.values(),
        AttentionPlan(),
        AttentionPlan(Full(), Bounded(bound=[1.0, math.inf], centre="median", temperature=0.5, slope="rescale"), Softmax()),
        AttentionPlan(Band(3), DynamicScale(alpha=(0.0, 1.0), max_scale=3.0), Clamp(floor=None, budget=[0.1, 0.2])),
        AttentionPlan(payment=Mixture(signed=True, budget=-0.2, learnable=True), layers={"0": "all", "1-": "vanilla"}),
        AttentionPlan(Blocks(7), Bounded(centre="none"), Mixture(budget=[0.1, 0.2])),
        AttentionPlan(Chunks(9, 2, exchange=[0.1, 0.2]), DynamicScale()),
        AttentionPlan(gate=True),
        AttentionPlan(WindowGlobal(size=5, tokens=[3, 0], random_blocks=2, seed=7)),
        AttentionPlan(Windows(size=4, shift=3)),
        AttentionPlan(scores=Bounded(bound=None), layers=[3, 1]),
    ],
)  # fmt: skip
def test_json_round_trip(plan):
    again = AttentionPlan.from_dict(json.loads(json.dumps(plan.to_dict(), allow_nan=False)))
    assert again == plan
    assert hash(again) == hash(plan)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("fullpay", "a dict"),
        ({"version": 99}, "newer hf-fullpay"),
        *[({"version": version}, "version") for version in (True, -3, 0, "1")],
        ({}, "no payment, reach, scores"),
        ({"reach": {"kind": "full"}, "scores": {"kind": "plain"}}, "no payment"),
        ({1: 2, "a": 3}, "the keys"),
        ({"payment": {"kind": ["mixture"]}}, "payment"),
        ({"reech": {}}, "reech"),
        ({"reach": {"kind": "rings"}}, "reach"),
        ({"reach": {"kind": "band", "sise": 3}}, "sise"),
        ({"reach": {"kind": "band", "size": 0}}, "size"),
        ({"payment": "mixture"}, "payment"),
    ],
)
def test_foreign_json_is_refused(data, reason):
    with pytest.raises(ValueError, match=reason):
        AttentionPlan.from_dict(data)


@pytest.mark.parametrize("number", [np.float32(0.25), np.float64(0.25), Fraction(1, 4), torch.tensor(0.25)])
def test_numbers_of_all_kinds_become_plain_ones(number):
    plan = AttentionPlan(payment=Mixture(floor=number, budget=[number, number]), scores=Bounded(bound=number))
    assert AttentionPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert plan.payment == Mixture(floor=0.25, budget=(0.25, 0.25))


def test_tables_of_layers_copy_pickle_and_compare():
    one = AttentionPlan(layers={"0": "all", "1-": "vanilla"})
    other = AttentionPlan(layers={"1-": "vanilla", "0": "all"})
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == other
    assert hash(one) == hash(other)


def test_presets_cannot_be_changed():
    with pytest.raises(TypeError):
        PRESETS["fullpay"] = AttentionPlan()


def test_with_options_reaches_every_part():
    plan = with_options(PRESETS["bounded_fullpay"], {"floor": 0.5, "bound": 3.0, "layers": "all_but_last"})
    assert (plan.payment.floor, plan.scores.bound, plan.layers) == (0.5, 3.0, "all_but_last")
    with pytest.raises(ValueError, match="size"):
        with_options(PRESETS["fullpay"], {"size": 3})


@pytest.mark.parametrize(
    ("bad", "reason"),
    [*MISREAD.items(), *NO_NAMES.items()],
)  # fmt: skip
def test_names_that_transformers_would_misread(bad, reason):
    with pytest.raises(ValueError, match=reason):
        hf_fullpay.register(bad, AttentionPlan())


def test_register_wants_a_plan():
    with pytest.raises(ValueError, match="AttentionPlan"):
        hf_fullpay.register("mine", "fullpay")


def test_shortfall_says_what_was_asked_given_and_possible():
    told = Mixture(floor=0.01, budget=0.05).shortfall(100)
    assert "0.01 asked" in told
    assert "0.0005 given" in told
    assert "1 / n = 0.01" in told
    assert Mixture(floor=0.01, budget=0.05).shortfall(5) is None
    assert Mixture(floor=None, budget=0.05).shortfall(500) is None
