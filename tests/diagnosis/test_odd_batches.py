"""What a newcomer gave to diagnose: uneven lengths, empty documents, two tokens, autocast, NaN, half a T5."""

import pytest
import torch

import zoo
from families import build, inputs
from hf_fullpay import Report, compare, diagnose

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")


def look(model, given, **options):
    return diagnose(model, given, progress=False, **options)


@pytest.mark.parametrize("extra", ["decoder_input_ids", "labels", None])
def test_a_t5_reads_two_texts_of_unlike_lengths(extra):
    model = zoo.make("t5")
    given = {"input_ids": torch.randint(3, 90, (2, 24))}
    if extra:
        given[extra] = torch.randint(3, 90, (2, 9))
    report = look(model, given)
    assert len(report.layers) == 6
    assert report.values["entropy"][0][0] > 0


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("empty", [0, 1])
def test_an_empty_document_is_left_out(family, empty):
    given = inputs(family, right=1)
    given["attention_mask"][empty] = 0
    report = look(build(family), given)
    full = {name: tensor[1 - empty :][:1] for name, tensor in given.items()}
    assert report.values["entropy"][0] == pytest.approx(look(build(family), full).values["entropy"][0], rel=1e-4)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_short_texts(family, length):
    report = look(build(family), inputs(family, length=length))
    sinks = next(line for line in report.lines if line.measure.name == "sink")
    assert sinks.passed is None  # uniform attention over so few tokens has a sink too


def test_autocast_rounds_no_number():
    model, given = build("gpt2"), inputs("gpt2")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = look(model, given)
    assert {line.measure.name: line.passed for line in report.lines}["error"]
    entropy = report.values["entropy"][0][0]
    assert float(torch.tensor(entropy).bfloat16()) != entropy


def test_inference_mode_changes_nothing():
    model, given = build("gpt2"), inputs("gpt2", length=30)
    with torch.inference_mode():
        inside = look(model, given)
    assert str(inside.values) == str(look(model, given).values)


def test_an_encoder_under_a_band_is_causal():
    lines = {line.measure.name: line for line in look(build("bert", "band_causal"), inputs("bert")).lines}
    assert lines["leak"].passed
    notes = look(build("bert", "fullpay_band"), inputs("bert"), checks=["leak"]).findings.notes
    assert any("not causal" in note for note in notes)  # its floor pays everything


def test_reach_looks_at_the_texts_that_are_long_enough():
    batches = [inputs("bert", length=10), inputs("bert", batch=1, length=30)]
    assert look(build("bert"), batches, checks=["reach"]).values["near_over_far"][0] > 0


def test_nan_passes_nothing():
    model = build("bert", "eager")
    with torch.no_grad():
        model.bert.embeddings.LayerNorm.weight.fill_(torch.nan)
    lines = look(model, inputs("bert"), checks=["weights"]).lines
    assert [line.passed for line in lines if line.limit is not None] == [False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checks": 7}, r"checks: expected names out of .*got 7"),
        ({"checks": []}, r"checks: expected names out of .*or None for all"),
        ({"thresholds": 5}, r"thresholds: expected a dict"),
    ],
)
def test_odd_options(options, message):
    with pytest.raises(ValueError, match=message):
        look(build("bert"), inputs("bert"), **options)


@pytest.mark.parametrize(
    "change", [{"limits": {"entropy": "x"}}, {"findings": {"values": {"entropy": "x"}}}, {"layers": 3}]
)
def test_a_tampered_report_is_refused(change):
    data = look(build("bert"), inputs("bert"), checks=["entropy"]).to_dict()
    data |= {"findings": data["findings"] | change["findings"]} if "findings" in change else change
    with pytest.raises(ValueError, match="expected the JSON of a report"):
        Report.from_dict(data)


def test_a_comparison_says_that_its_sides_differ():
    one, other = (look(build("bert"), inputs("bert", length=n), checks=["entropy"]) for n in (9, 12))
    assert "The inputs of the two sides differ." in compare(one, other).notes
