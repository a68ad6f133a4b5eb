"""8 bits, tiny: the rounding is that of integers, every kind of checkpoint is measured, and pairs stay pairs."""

import json
import math
from importlib.util import find_spec

import pytest
import torch
from small_classifier import WORDS, save_classifier, save_documents
from torch import nn
from transformers import AutoTokenizer, BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import hf_fullpay
import quantize_check as recipe
from extremes import extremes


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Folders of a classifier, the same bounded, an encoder and a language model; and documents."""
    folder = tmp_path_factory.mktemp("given")
    places = {name: folder / name for name in ("classifier", "bounded", "encoder", "lm")}
    save_classifier(places["classifier"])
    tokenizer = AutoTokenizer.from_pretrained(places["classifier"])
    model = recipe.AutoModelForSequenceClassification.from_pretrained(places["classifier"])
    plan = hf_fullpay.AttentionPlan(scores=hf_fullpay.Bounded(bound=0.2), layers="all_but_last")
    hf_fullpay.convert(model, plan).save_pretrained(places["bounded"])
    torch.manual_seed(0)
    small = {"vocab_size": len(WORDS), "initializer_range": 0.3}
    width = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    BertModel(BertConfig(**small, **width, max_position_embeddings=16)).save_pretrained(places["encoder"])
    lm = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=2, eos_token_id=3, **small)
    GPT2LMHeadModel(lm).save_pretrained(places["lm"])
    for place in places.values():
        tokenizer.save_pretrained(place)
    return {name: str(place) for name, place in places.items()}, str(save_documents(folder / "data.csv"))


def checked(given, tmp_path, before, after=(), *more):
    places, data = given
    arguments = ["--before", *(places[name] for name in before), "--data", data, "--out", str(tmp_path / "int8.json")]
    arguments += ["--after", *(places[name] for name in after)] if after else []
    assert recipe.main([*arguments, *more]) == 0
    return json.loads((tmp_path / "int8.json").read_text())


def test_rounded_is_what_integers_give():
    x = torch.randn(500) * 3
    low, high = -2.0, 5.0
    scale = (high - low) / 255
    zero = round(-low / scale)
    integers = ((x / scale).round() + zero).clamp(0, 255)
    found = recipe.rounded(x, low, high)
    # In FP32 a number halfway between two values may go to either.
    assert (found - (integers - zero) * scale).abs().max() <= scale * 1.001
    assert len(found.unique()) <= 256
    assert (found - x.clamp(low, high)).abs().max() <= scale * 0.51
    assert recipe.rounded(torch.zeros(3), 0.5, 1.0).tolist() == [0.0] * 3  # zero is among the values
    assert recipe.rounded(torch.zeros(3), 0.0, 0.0).tolist() == [0.0] * 3


def test_an_outlier_costs_the_others_their_precision():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(64, 16)

    def error(x):
        with torch.no_grad(), recipe.ranges(model) as found:
            wanted = model(x)
        assert found["0"] == (float(x.min()), float(x.max()))
        with torch.no_grad():
            return float((recipe.fake(model, found)(x) - wanted)[1:].norm())

    spiked = x.clone()
    spiked[0, 0] = 300.0
    assert error(spiked) > 10 * error(x)
    assert not model[0]._forward_pre_hooks


def test_a_pair_of_classifiers(given, tmp_path, capsys):
    found = checked(given, tmp_path, ["classifier"] * 2, ["bounded"] * 2, "--backend", "fake")
    told = found["summary"]
    assert told.keys() >= {
        "fp32.accuracy",
        "int8.accuracy",
        "gap.loss",
        "moved.cosine",
        "largest.logit",
        "largest_input",
    }
    assert told["largest.logit"]["after"]["mean"] < told["largest.logit"]["before"]["mean"]
    assert told["gap.loss"]["difference"]["error"] == pytest.approx(0)  # the same pair twice
    assert 0 < told["moved.distance"]["before"]["mean"] < 0.5
    assert found["before"][0]["attention"] == "ordinary attention"
    assert "Bounded" in found["after"][0]["attention"]
    assert found["provenance"].keys() >= {"command", "commit", "versions", "device", "threads"}
    assert "by fake, in FP32" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "figure"), [("encoder", "moved.cosine"), ("lm", "fp32.perplexity")])
def test_other_kinds(given, tmp_path, kind, figure):
    found = checked(given, tmp_path, [kind], (), "--backend", "fake", "--length", "12")
    assert math.isfinite(found["summary"][figure]["before"]["mean"])
    assert found["summary"]["moved.distance"]["before"]["mean"] > 0
    assert "after" not in found["summary"][figure]


def test_perplexity_is_the_models_own(given):
    """On documents without padding: the exponential of the loss that the model itself gives."""
    model = GPT2LMHeadModel.from_pretrained(given[0]["lm"]).eval()
    ids = torch.randint(4, 14, (4, 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    outputs, labels = recipe.answers(model, [batch])
    with torch.no_grad():
        loss = float(model(**batch, labels=ids).loss)
    assert recipe.quality(outputs, labels)["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_padding_changes_nothing(given):
    """Not in outputs, nor in the largest numbers."""
    for name, kind in (("classifier", recipe.AutoModelForSequenceClassification), ("encoder", recipe.AutoModel)):
        model = kind.from_pretrained(given[0][name]).eval()
        ids = torch.randint(4, 14, (4, 9))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(4, dtype=torch.long)}
        padded = {
            "input_ids": nn.functional.pad(ids, (0, 5)),
            "attention_mask": nn.functional.pad(batch["attention_mask"], (0, 5)),
            "labels": batch["labels"],
        }
        torch.testing.assert_close(recipe.answers(model, [batch])[0], recipe.answers(model, [padded])[0])
        one, other = extremes(model, [batch]), extremes(model, [padded])
        for what in ("logit", "score", "hidden"):
            assert one[what] == pytest.approx(other[what], rel=1e-4)


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_torchao(given, tmp_path):
    found = checked(given, tmp_path, ["classifier"], ["bounded"])
    assert found["setting"]["backend"] == "torchao"
    assert 0 < found["summary"]["moved.distance"]["before"]["mean"] < 0.5


def test_refusals(given, tmp_path, capsys, monkeypatch):
    places, data = given

    def refused(*more):
        with pytest.raises(SystemExit) as ended:
            recipe.main(["--out", str(tmp_path / "x.json"), "--data", data, *more])
        assert ended.value.code == 2
        return capsys.readouterr().err

    one = places["classifier"]
    assert "--after: expected as many" in refused("--before", one, one, "--after", one)
    assert "nowhere/at/all" in refused("--before", "nowhere/at/all")
    assert "missing.csv" in refused("--before", one, "--data", "missing.csv")
    assert "at most 16" in refused("--before", one, "--length", "17")
    assert "expected the columns" in refused("--before", one, "--text-column", "body")
    assert "of the same kind" in refused("--before", one, "--after", places["encoder"], "--backend", "fake")
    (tmp_path / "empty.csv").write_text("text,label\n")
    assert "expected rows" in refused("--before", one, "--data", str(tmp_path / "empty.csv"))
    (tmp_path / "file").write_text("")
    assert "folder that can be written to" in refused("--before", one, "--out", str(tmp_path / "file" / "x.json"))
    monkeypatch.setattr(recipe, "find_spec", lambda _: None)
    assert "pip install --no-deps torchao" in refused("--before", one, "--backend", "torchao")


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        recipe.main(["--help"])
    assert ended.value.code == 0
    assert "python recipes/quantize_check.py" in capsys.readouterr().out
