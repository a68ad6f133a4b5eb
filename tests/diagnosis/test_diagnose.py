"""The report: numbers against dense formulas, what padding may not change, and a model left as it was."""

import math

import pytest
import torch

from families import FAMILIES, build, inputs
from hf_fullpay import AttentionPlan, Bounded, Full, Mixture, diagnose
from hf_fullpay.diagnosis import MEASURES, Report, Settings
from hf_fullpay.payment.mixture import Budget
from largest import largest
from small import EVERYWHERE, load, short

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
STREAMED = ("weights", "promise", "entropy", "scores", "range")


def look(model, given, checks=STREAMED, **options):
    return diagnose(model, given, checks=checks, progress=False, **options)


def dense(model, given):
    """Weights of every layer, and which keys each row sees, by Transformers itself."""
    weights = model(**given, output_attentions=True).attentions
    n = weights[0].shape[-1]
    pairs = torch.ones(n, n, dtype=torch.bool)
    pairs = pairs.tril() if model.config.model_type in ("llama", "gpt2") else pairs
    real = given.get("attention_mask", torch.ones(weights[0].shape[0], n)).bool()
    return weights, (pairs & real[:, None])[:, None], real


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("left", [0, 3])
def test_numbers_equal_dense_formulas(family, left):
    given = inputs(family, left=left)
    model = build(family, "eager")
    report = look(model, given, settings=Settings(threshold=0.05))
    with torch.no_grad():
        layers, seen, real = dense(model, given)
    for layer, weights in enumerate(layers):
        for head in range(4):
            rows = [
                (weights[b, head, i][seen[b, 0, i]], (i - torch.arange(len(seen[b, 0, i])))[seen[b, 0, i]].abs())
                for b, i in real.nonzero().tolist()
            ]
            expected = {
                "below": sum(float((w < 0.05).float().mean()) for w, _ in rows) / len(rows),
                "below_relative": sum(float((w < 0.1 / len(w)).float().mean()) for w, _ in rows) / len(rows),
                "coverage": sum(float(w.min()) * len(w) for w, _ in rows) / len(rows),
                "least": min(float(w.min()) for w, _ in rows),
                "entropy": sum(float(torch.special.entr(w).sum()) for w, _ in rows) / len(rows),
                "distance": sum(float(w @ apart.float()) for w, apart in rows) / len(rows),
            }
            for name, value in expected.items():
                assert report.values[name][layer][head] == pytest.approx(value, abs=2e-5), name


def test_uniform_attention_is_known():
    model = build("bert", "sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name:
                parameter.zero_()
    report = look(model, inputs("bert", right=4))
    values = report.values
    for name, expected in {
        "coverage": 1.0,
        "entropy_relative": 1.0,
        "below_relative": 0.0,
        "score_largest": 0.0,
    }.items():
        assert torch.tensor(values[name]) == pytest.approx(torch.full((2, 4), expected), abs=1e-5)
    mean = (5 * math.log(5) + 9 * math.log(9)) / 14  # rows of five real tokens, and of nine
    assert torch.tensor(values["entropy"]) == pytest.approx(torch.full((2, 4), mean), abs=1e-5)
    assert report.findings.uniform["entropy"][0] == pytest.approx([mean], abs=1e-5)
    assert [line.value for line in report.lines] == pytest.approx([line.value for line in report.lines])


@pytest.mark.parametrize(
    ("family", "side"),
    [
        (family, side)
        for family in ("bert", "gpt2", "llama")
        for side in ("left", "right")
        if (family, side) != ("bert", "left")
    ],
)  # a BERT counts its positions from the first pad
def test_padding_and_batches_change_nothing(family, side):
    model, given = build(family, "fullpay"), inputs(family, **{side: 4})
    alone = [
        {name: tensor[b : b + 1, given["attention_mask"][b].bool()] for name, tensor in given.items()} for b in (0, 1)
    ]
    together, apart = (look(model, data, (*STREAMED, "spikes", "sinks")) for data in (given, alone))
    for name, values in together.values.items():
        if name not in ("score_low", "score_median", "score_high", "spike_ratio"):  # from samples and batches' medians
            torch.testing.assert_close(
                torch.tensor(values), torch.tensor(apart.values[name]), rtol=1e-4, atol=1e-4, equal_nan=True, msg=name
            )
    assert together.data["tokens"] == apart.data["tokens"] == 14


@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
def test_every_preset_keeps_its_floor_here(family, name):
    report = look(load(family, name), inputs(family, left=2))
    lines = {line.measure.name: line for line in report.lines}
    assert lines["error"].passed
    assert lines["row_error"].passed
    assert ("floor_kept" in lines) == isinstance(short(name).payment, Budget)
    if "floor_kept" in lines:
        assert lines["floor_kept"].passed


def test_a_floor_that_is_not_paid_fails(monkeypatch):
    from hf_fullpay import reference

    stock = reference.mixture_weights
    model = build("bert", "fullpay")
    monkeypatch.setattr(
        reference, "mixture_weights", lambda w, paid, *, floor, budget: stock(w, paid, floor=floor, budget=budget / 2)
    )
    lines = {line.measure.name: line for line in look(model, inputs("bert")).lines}
    assert lines["floor_kept"].passed is False
    assert lines["floor_kept"].value == pytest.approx(0.5, rel=0.01)
    assert "layer" in lines["floor_kept"].worst
    assert lines["error"].passed is False  # and the model was seen to compute something else


def test_spans_say_what_a_bound_touches():
    model = build("bert", "sdpa")
    report = look(model, inputs("bert", length=30), settings=Settings(bound=0.5))
    span, touched = torch.tensor(report.values["span"]), torch.tensor(report.values["touched"])
    assert (span > 0.5 * 30**0.5).eq(touched > 0).float().mean() > 0.9
    plan = AttentionPlan(Full(), Bounded(bound=float(span.max()) / 30**0.5), Mixture(budget=0.0))
    untouched = look(load("bert", plan), inputs("bert", length=30), settings=Settings(bound=plan.scores.bound * 1.01))
    assert not torch.tensor(untouched.values["touched"]).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(dtype):
    model = build("llama", "fullpay")
    whole = look(model, inputs("llama"))
    report = look(model.to(dtype), inputs("llama"))
    assert report.data["dtype"] == str(dtype).removeprefix("torch.")
    assert {line.measure.name: line.passed for line in report.lines}["error"]
    entropies = torch.tensor(report.values["entropy"]), torch.tensor(whole.values["entropy"])
    torch.testing.assert_close(*entropies, rtol=0.1, atol=0.1)


def test_layers_and_checks_are_chosen():
    model, given = build("bert", "sdpa"), inputs("bert")
    report = look(model, given, ["entropy", "sinks"], layers=[1])
    assert set(report.values) == {"entropy", "entropy_relative", "sink", "sink_heads"}
    assert all(math.isnan(row[0]) for row in (report.values["entropy"][0], report.values["sink"][0]))
    whole = look(model, given, ["entropy"])
    assert report.values["entropy"][1] == whole.values["entropy"][1]


def test_limits_are_set_and_taken_away():
    model, given = build("bert", "sdpa"), inputs("bert")
    lines = {
        line.measure.name: line for line in look(model, given, thresholds={"entropy": 99.0, "row_error": None}).lines
    }
    assert lines["row_error"].passed is None
    assert lines["entropy"].passed is None  # not even uniform attention has an entropy of 99
    lines = {line.measure.name: line for line in look(model, given, thresholds={"entropy_relative": 0.9999}).lines}
    assert lines["entropy_relative"].passed is False


def test_sinks_are_found():
    model = build("bert", "sdpa")
    stock = look(model, inputs("bert"), ["sinks"])
    module = (
        model.encoder.layer[0].attention.self
        if hasattr(model, "encoder")
        else model.bert.encoder.layer[0].attention.self
    )
    with torch.no_grad():  # head 2 of layer 0 looks at token 5, wherever it is
        module.query.weight[16:24] = 0
        module.query.bias[16:24] = 3.0
        module.key.weight[16:24] = 0
        embedding = model.get_input_embeddings().weight
        embedding[5] *= 30
        module.key.weight[16:24] = embedding[5] / embedding[5].norm()
    given = {"input_ids": torch.randint(6, 90, (2, 80))}
    given["input_ids"][:, 3] = 5
    report = look(model, given, ["sinks"])
    assert report.values["sink"][0][2] > 0.5 > stock.values["sink"][0][2]
    assert not report.findings.notes
    assert any("9 tokens" in note for note in stock.findings.notes)


def test_spikes_are_apart_from_scores():
    model, given = build("llama", "sdpa"), inputs("llama")
    before = look(model, given, ["spikes", "scores"])
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[7] *= 1000
    after = look(model, given, ["spikes", "scores"])
    assert after.values["spike"][1] > 50 * before.values["spike"][1]
    assert after.values["spike"][0] == before.values["spike"][0]
    assert after.values["score_largest"][0] == before.values["score_largest"][0]


def test_the_model_is_left_as_it_was():
    model, given = build("bert", "fullpay").train(), inputs("bert")
    model.bert.encoder.layer[0].eval()
    model.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    look(model, given, None)
    assert torch.equal(torch.rand(2), expected)

    def interrupted():
        yield given
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        look(model, interrupted())
    assert [module.training for module in model.modules()] == modes
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert torch.is_grad_enabled()


def test_nothing_of_n_by_n_is_held():
    n = 1500
    model = build("llama", "fullpay", max_position_embeddings=n)
    size = largest(lambda: look(model, {"input_ids": torch.randint(3, 97, (1, n))}))
    assert size < n * n / 3  # a tile holds 2^19 weights of the four heads together


def test_wrapped_models_are_looked_through():
    from peft import LoraConfig, get_peft_model

    given = inputs("bert")
    model = build("bert", "fullpay")
    bare = look(model, given)
    compiled = look(torch.compile(model), given)
    adapted = look(get_peft_model(model, LoraConfig(target_modules=["query"])), given)
    assert bare.values["entropy"] == compiled.values["entropy"] == adapted.values["entropy"]


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_single_tokens(family):
    report = diagnose(build(family, "fullpay"), inputs(family, length=1), progress=False)
    assert report.values["coverage"][0] == pytest.approx([1.0] * 4)
    assert math.isnan(report.values["entropy_relative"][0][0])
    str(report)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nan_is_named_by_its_layer(attention):
    model = build("bert", attention)
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.query.weight[0, 0] = torch.nan
    report = diagnose(model, inputs("bert"), progress=False)
    notes = " ".join(report.findings.notes)
    lines = {line.measure.name: line for line in report.lines}
    assert "first in bert.encoder.layer.1.attention.self.query.weight" in notes
    assert lines["nonfinite_weights"].passed is False
    assert ("first leaves layer 1" in notes) == (attention == "eager")  # SDPA writes zeros there
    assert not report.passed


def test_overflow_is_named_by_its_layer():
    model = build("bert", "eager")
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.weight.fill_(3e38)
        model.bert.encoder.layer[0].output.LayerNorm.weight.fill_(3e38)
    report = diagnose(model, inputs("bert"), progress=False)
    assert any("first leaves layer 0" in note for note in report.findings.notes)
    assert any("need a finite model" in note for note in report.findings.notes)


def broken(**options):
    return lambda: look(build("bert", "sdpa"), inputs("bert"), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (broken(checks=["entropie"]), r"checks: expected names out of \['weights', .*got \['entropie'\]"),
        (broken(layers=[2]), r"layers: expected numbers from 0 to 1, got \[2\]"),
        (broken(layers=[-1]), r"layers: expected numbers of layers, from 0, got \[-1\]"),
        (broken(layers=[]), r"layers: expected numbers of layers"),
        (broken(thresholds={"entropy": "high"}), r"thresholds\['entropy'\]: expected a number"),
        (broken(thresholds={"entropie": 1.0}), r"thresholds: expected names out of"),
        (broken(thresholds={"score_median": 1.0}), r"No side of the others is better"),
        (lambda: look(build("bert", "sdpa"), []), r"inputs: expected at least one batch, got an empty iterable"),
        (lambda: look(build("bert", "sdpa"), iter(())), r"inputs: expected at least one batch"),
        (lambda: look(build("bert", "sdpa"), ["a text"]), r"an iterable of str.*Tokenize texts first"),
        (lambda: look(build("bert", "sdpa"), "a text"), r"inputs: expected a dict of tensors"),
        (
            lambda: look(build("bert", "sdpa"), {"input_ids": [[1, 2]]}),
            r"inputs\['input_ids'\]: expected a tensor, got 'list'",
        ),
        (lambda: look(build("bert", "sdpa"), {"input_ids": torch.zeros(0, 3).long()}), r"expected at least one entry"),
        (lambda: look(torch.nn.Linear(2, 2), torch.ones(1, 2)), r"go through Transformers' attention interface"),
        (lambda: look("bert-base-uncased", torch.ones(1, 2)), r"model: expected a Transformers model, got str"),
        (lambda: Settings(threshold=0), r"threshold: expected a number in \(0, 1\]"),
        (lambda: Report.from_dict({"lines": []}), r"report: expected the JSON of a report"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_table_of_measures_is_whole():
    assert {measure.headline for measure in MEASURES.values()} <= {"mean", "min", "max"}
    assert all(measure.better for measure in MEASURES.values() if measure.limit is not None)
    report = diagnose(build("gpt2", "fullpay"), inputs("gpt2", length=80), progress=False)
    asked = {
        name for name, measure in MEASURES.items() if measure.check != "roles"
    }  # these need gold data: `head_roles`
    missing = asked - set(report.values)
    assert not missing
