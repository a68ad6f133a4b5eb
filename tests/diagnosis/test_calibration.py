"""Calibrated bounds: what they are, what they do to a model, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch

import zoo
from families import FAMILIES, build, inputs
from hf_fullpay import PRESETS, AttentionPlan, Band, Blocks, Bounded, Mixture, Windows, convert
from hf_fullpay.diagnosis import Report, calibrate
from hf_fullpay.diagnosis import calibration as module
from hf_fullpay.hf.watch import watch
from small import home, states
from untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")


CENTRES = {
    "mean": lambda row: row.mean(-1),
    "median": lambda row: row.median(-1).values,
    "none": lambda row: row[:, 0] * 0,
}


def spans(model, given, centre="mean"):
    """Largest |s - m| of every row, (H, rows), and its number of keys, (rows,), by layer; written row by row."""
    found = []

    def see(seen):
        rows, made = seen.rows(0, seen.query.shape[2]), []
        for scores, visible in zip(rows.scores, rows.visible.expand_as(rows.scores)[:, 0], strict=True):
            for query, keys in enumerate(visible):
                row = scores[:, query, keys]
                made.append(((row - CENTRES[centre](row)[:, None]).abs().amax(-1), keys.sum()))
        found.append((torch.stack([span for span, _ in made], 1), torch.stack([count for _, count in made])))

    with torch.no_grad(), watch(model, see):
        model(**given)
    return found


@torch.no_grad()
def reached(model, given):
    """Largest compressed score, |z| * tau with tau = 1 / sqrt(n), by layer and head."""
    found = []

    def see(seen):
        rows = seen.rows(0, seen.query.shape[2])
        n = rows.visible.sum(-1).clamp_min(1)
        found.append((rows.logits.masked_fill(~rows.visible, 0).abs().amax(-1) / n.sqrt()).amax((0, 2)))

    with watch(model.eval(), see):
        model(**given)
    return torch.stack(found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("centre", ["mean", "median", "none"])
@pytest.mark.parametrize("temperature", ["auto", 0.25])
def test_the_definition(family, centre, temperature):
    """bound * r is the quantile of max |s - m| * tau over the rows of the stock model."""
    model, given = build(family, head=False), inputs(family)
    with untouched(model, given):
        found = calibrate(model, given, reduction=5, quantile=0.9, centre=centre, temperature=temperature)
    assert found.plan() == AttentionPlan(scores=Bounded(found.bounds, centre, temperature))
    for layer, (span, count) in enumerate(spans(model, given, centre)):
        tau = count.rsqrt() if temperature == "auto" else temperature
        assert found.rows == span.shape[1]
        for values, numbers in ((found.bounds[layer], span * tau / 5), (found.spans[layer], span)):
            torch.testing.assert_close(torch.tensor(values), numbers.quantile(0.9, dim=1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slope", ["preserve", "rescale"])
@pytest.mark.parametrize("reduction", [4, 8])
def test_the_largest_logit_is_smaller_by_the_factor(family, slope, reduction):
    """On the calibration data, in the first layer, whose scores are those of the stock model; above it at most that."""
    given = inputs(family, length=40)
    free = convert(build(family, head=False), AttentionPlan(scores=Bounded(bound=None)))
    found = calibrate(free, given, reduction=reduction, quantile=1.0, slope=slope)
    before, after = reached(free, given), reached(convert(build(family, head=False), found.plan()), given)
    torch.testing.assert_close(after[0], before[0] / reduction, rtol=2e-3, atol=0)  # tanh(4) = 0.9993
    assert (after <= before / reduction * (1 + 1e-5)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wide_bound_changes_nothing(family):
    model, given = build(family, head=False), inputs(family)
    plan = calibrate(model, given, reduction=1e-5).plan()
    torch.testing.assert_close(
        states(convert(build(family, head=False), plan), **given), states(model, **given), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_padding_and_batch_mates_change_nothing(family):
    """A padded batch, and its documents one by one without padding."""
    model = build(family, head=False)
    left = 0 if family == "bert" else 3
    given = inputs(family, length=12, left=left, right=0 if left else 3)
    kept = given["attention_mask"][0].bool()
    alone = [{"input_ids": given["input_ids"][:1, kept]}, {"input_ids": given["input_ids"][1:]}]
    padded, single = calibrate(model, given), calibrate(model, alone)
    assert padded.rows == single.rows == 21
    for name in ("bounds", "spans", "largest"):
        one, other = (torch.tensor(getattr(found, name)) for found in (padded, single))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


RESTRICTED = {
    "llama": AttentionPlan(Band(4), Bounded()),
    "bert": AttentionPlan(Blocks(4), Bounded()),
    "vit": AttentionPlan(Windows(2), Bounded(centre="median")),
    "gpt2": AttentionPlan(scores=Bounded(), payment=Mixture(budget=0.3)),
}


@pytest.mark.parametrize("family", RESTRICTED)
def test_the_reach_and_the_payment_of_the_plan(family):
    """With r = 1 and all rows, bounds are what the model reaches under the plan without a bound."""
    plan, model, given = RESTRICTED[family], build(family, head=False), inputs(family, length=16)
    with untouched(model, given):
        found = calibrate(model, given, plan=plan, quantile=1.0, reduction=1.0)
    free = convert(build(family, head=False), replace(plan, scores=replace(plan.scores, bound=None)))
    torch.testing.assert_close(torch.tensor(found.bounds), reached(free, given), rtol=1e-4, atol=1e-5)


def test_many_rows_are_exact_and_too_many_refused(monkeypatch):
    model, given = build("bert", head=False), [inputs("bert", 2, 30, seed=seed) for seed in range(4)]
    wanted = calibrate(model, given, quantile=0.97)
    monkeypatch.setattr(module, "KEPT", 10)
    assert calibrate(model, iter(given), quantile=0.97) == wanted
    with pytest.raises(ValueError, match=r"at most 80 rows a head for quantile=0.9, got more"):
        calibrate(model, given, quantile=0.9)


@pytest.mark.parametrize("name", ["bart", "albert", "mistral", "modernbert", "clip_text"])
def test_other_families(name):
    """Modules of a layer share its bounds; layers that are one module share them too."""
    model, given = zoo.make(name), zoo.given(name)
    with untouched(model, given):
        found = calibrate(model, given)
    assert len(found.bounds) == (1 if name == "albert" else 2)
    model.config.fullpay = found.plan().to_dict()
    model.set_attn_implementation("fullpay_custom")
    states(model, **given)


def test_a_converted_model_is_calibrated_under_the_plan():
    """Its own bound has no say."""
    given = inputs("bert")
    tight = convert(build("bert", head=False), AttentionPlan(scores=Bounded(bound=0.01))).eval()
    with untouched(tight, given):
        found = calibrate(tight, given)
    wanted = calibrate(build("bert", head=False), given)
    torch.testing.assert_close(torch.tensor(found.bounds), torch.tensor(wanted.bounds), rtol=1e-5, atol=1e-7)


def test_bf16_and_training_mode():
    given = inputs("llama", length=30)
    wanted = calibrate(build("llama", head=False), given)
    model = build("llama", head=False).bfloat16().train()
    found = calibrate(model, given)
    assert model.training
    assert found == calibrate(model, given)
    torch.testing.assert_close(torch.tensor(found.bounds), torch.tensor(wanted.bounds), rtol=0.1, atol=0.02)


def test_a_head_that_tells_nothing_gets_the_widest_bound():
    model = build("bert", head=False)
    with torch.no_grad():
        for part in (model.encoder.layer[1].attention.self.query,):
            part.weight[:8], part.bias[:8] = 0, 0
    found = calibrate(model, inputs("bert"))
    assert found.spans[1][0] == 0
    assert found.bounds[1][0] == max(max(row) for row in found.bounds)


def test_what_a_user_reads():
    model = build("bert", head=False)
    found = calibrate(model, inputs("bert"), plan="bounded_fullpay", reduction=8)
    assert "8 times lower" in str(found)
    assert found.plan(layers="from:1").layers == "from:1"
    assert found.plan().payment == PRESETS["bounded_fullpay"].payment
    written = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert AttentionPlan.from_dict(written["base"]) == PRESETS["bounded_fullpay"]
    findings = found.findings()
    report = Report("m", "sdpa", "ordinary", ["0", "1"], {}, findings, {})
    assert Report.from_dict(report.to_dict()) == report
    assert len(findings.tables["calibration"].rows) == len(findings.curves["calibration"].x) == 2
    assert str(found.base.describe()) in findings.notes[0]


GIVEN = {"input_ids": torch.arange(3, 9)[None]}
BAD = {
    "no batch": ({"inputs": []}, "at least one batch"),
    "one token": ({"inputs": {"input_ids": torch.tensor([[5]])}}, "scores that differ within a row"),
    "plan": ({"plan": "fullpay"}, r"plan=...\): expected a plan with Bounded scores"),
    "preset": ({"plan": "bound"}, "one of the presets"),
    "option": ({"center": "mean"}, "got 'center'"),
    "reduction": ({"reduction": 0}, r"reduction=...\): expected a number in \(0, inf\]"),
    "quantile": ({"quantile": 1.5}, r"quantile=...\): expected a number in \[0, 1\]"),
    "texts": ({"inputs": ["a text"]}, "Tokenize texts first"),
    "reach": ({"plan": AttentionPlan(Windows(2), Bounded())}, "BertModel"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    changes, reason = BAD[what]
    model = build("bert", head=False)
    with untouched(model, GIVEN), pytest.raises(ValueError, match=reason):
        calibrate(model, **{"inputs": GIVEN} | changes)


def test_nan_is_located():
    model = build("gpt2", head=False)
    with torch.no_grad():
        model.h[1].attn.c_attn.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"expected finite scores, got NaN or infinity in call 1 \(h.1.attn\)"):
        calibrate(model, GIVEN)


@pytest.mark.parametrize("preset", ["bounded", "bounded_fullpay"])
def test_saved_and_loaded(preset, tmp_path):
    family = home(preset)
    model, given = build(family, head=False), inputs(family)
    converted = convert(model, calibrate(model, given, plan=preset).plan(layers="from:1")).eval()
    converted.save_pretrained(tmp_path)
    again = type(converted).from_pretrained(tmp_path).eval()
    assert torch.equal(states(again, **given), states(converted, **given))
    assert again.config.fullpay == converted.config.fullpay
