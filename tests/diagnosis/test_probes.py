"""What every check with passes of its own keeps: any family and preset, any padding, bf16, and the model as it was."""

import json
import math

import pytest
import torch

import zoo
from families import CAUSAL, FAMILIES, build, inputs
from hf_fullpay.diagnosis.report import Report
from hf_fullpay.hf.watch import watch
from probes import CHECKS, close, flat, left_as_it_was, run
from small import EVERYWHERE, load

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
NAMES = [check.__name__ for check in CHECKS]


@pytest.mark.parametrize(("family", "name"), [(family, "sdpa") for family in FAMILIES] + EVERYWHERE)
def test_every_family_and_preset(family, name):
    model = build(family, name, head=False) if name == "sdpa" else load(family, name)
    with left_as_it_was(model):
        reach, heads, leak, positions = (run(check, model, inputs(family)) for check in CHECKS)
    layers = model.config.num_hidden_layers
    assert len(reach.values["near_over_far"]) == len(reach.values["gradient_range"]) == layers
    assert all(number >= 0 for number in flat(reach.values["near_over_far"]))
    assert all(len(line) == len(curve.x) for curve in reach.curves.values() for line in curve.series.values())
    assert [len(row) for row in heads.values["importance"]] == [4] * layers
    assert all(math.isclose(sum(row), 4, rel_tol=1e-6) for row in heads.values["importance"])
    assert heads.values["dead_heads"] == 0
    assert all(number > 0 for number in heads.values["gradient_norm"])
    if family in CAUSAL or name == "band_causal":  # which makes an encoder causal
        assert max(flat(leak.values["leak"])) < 1e-6
        assert flat(leak.values["leak_gradient"]) == [0.0] * layers
    else:
        assert not leak.values
        assert "not causal" in leak.notes[0]
    if family == "llama":
        assert not positions.values
        assert len(positions.curves["position_weights"].series) == layers + 1
    else:
        assert len(positions.values["position_decay"]) == 2
        first, last = positions.heatmaps["positions"].panels.values()
        assert len(first) == len(last) == len(first[0])
    for found in (reach, heads, leak, positions):
        report = Report("model", name, "", [""] * layers, {}, found, {})
        json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("name", ["sdpa", "fullpay", "bounded"])
@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
def test_padding_changes_nothing(family, name, check):
    model = build(family, name, head=False)
    alone = inputs(family, batch=1, length=12)
    if family == "gpt2":
        alone["position_ids"] = torch.arange(12)[None]
    for left, right in ((3, 0), (0, 4)):
        padded = {key: torch.nn.functional.pad(tensor, (left, right)) for key, tensor in alone.items()} | {
            "attention_mask": torch.nn.functional.pad(torch.ones(1, 12, dtype=torch.long), (left, right))
        }
        if left and family == "bert":
            padded["position_ids"] = (torch.arange(15) - 3).clamp_min(0)[None]
        one, other = run(check, model, alone), run(check, model, padded)
        assert one.values or one.curves or one.notes
        assert close(one, other, 1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["sdpa", "fullpay", "bounded"])
@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
def test_bf16(family, name, check):
    model, given = build(family, name, head=False), inputs(family)
    wide = run(check, model, given)
    given = {key: tensor.bfloat16() if tensor.is_floating_point() else tensor for key, tensor in given.items()}
    model.bfloat16()
    with left_as_it_was(model):
        found = run(check, model, given)
    assert found.values.keys() == wide.values.keys()
    for one, other in zip(flat(list(found.values.values())), flat(list(wide.values.values())), strict=True):
        assert math.isclose(one, other, rel_tol=0.5, abs_tol=0.05)  # peaky models round apart; a wrong type is far off
    if family in CAUSAL and check.__name__ == "check_leak":
        assert set(flat(list(found.values.values()))) == {0.0}


@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
def test_a_frozen_model_and_one_in_part(check):
    given, model = inputs("gpt2"), build("gpt2", head=False)
    free = run(check, model, given)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    with left_as_it_was(model):
        assert close(run(check, model, given), free, 0)
    model.requires_grad_(False)
    with left_as_it_was(model):
        assert close(run(check, model, given), free, 0)


@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
def test_left_as_it_was_when_a_check_fails(check):
    model = build("gpt2", head=False)
    with left_as_it_was(model):
        handle = model.h[1].register_forward_hook(_fail)
        with pytest.raises(KeyboardInterrupt):
            run(check, model, inputs("gpt2"))
        handle.remove()


def _fail(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
def test_a_single_token(family, check):
    found = run(check, build(family, head=False), inputs(family, batch=1, length=1))
    if check.__name__ == "check_heads":
        assert len(found.values["importance"]) == 2
    elif check.__name__ == "check_leak" and family == "bert":  # no key stands behind the only one: causal
        assert found.notes
    else:
        assert not found.values
        assert found.notes


@pytest.mark.parametrize("name", zoo.ROUTING)
@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
def test_other_families(name, check):
    model, given, calls = zoo.make(name, "eager"), zoo.given(name), []
    with torch.no_grad(), watch(model, calls.append):
        model(**given)
    with left_as_it_was(model):
        found = run(check, model, given)
    assert found.values or found.notes
    for measure in ("near_over_far", "gradient_range", "gradient_norm", "importance", "leak", "leak_gradient"):
        assert len(found.values.get(measure, calls)) == len(calls)
    if zoo.ROUTING[name][0] == "causal" and check.__name__ == "check_leak":
        assert max(flat(found.values["leak"])) < 1e-6
        assert not any(flat(found.values["leak_gradient"]))
