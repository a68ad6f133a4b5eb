"""The gradual migration, tiny: the bound grows from none, quality is watched, and what kept it is saved."""

import json
import math
import signal
from dataclasses import replace

import pytest
import torch
import yaml
from checkpoints import losses
from small_classifier import save_classifier, save_documents
from test_processes import run
from transformers import AutoModelForSequenceClassification

import migrate_bounded as recipe
import training
from hf_fullpay import PRESETS, AttentionPlan, Bounded, Mixture
from hf_fullpay import FullPayBertForSequenceClassification as Kind
from hf_fullpay.hf.trial import trial

VALUES = yaml.safe_load(recipe.CONFIG.read_text())


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    return ["--model", str(save_classifier(folder / "model")), "--data", str(save_documents(folder / "data.csv"))]


def config(folder, **changes):
    path = folder / "config.yaml"
    path.write_text(
        yaml.safe_dump(VALUES | {"batch": 4, "checks": 5, "patience": 2, "budget": 50.0, "harm": 50.0} | changes)
    )
    return ["--config", str(path)]


def ran(given, out, *more):
    assert recipe.main([*given, "--out", str(out), "--steps", "5", *more]) == 0
    result = json.loads((out / "results.json").read_text())
    plan = getattr(AutoModelForSequenceClassification.from_pretrained(out / "model").config, "fullpay", None)
    return result, None if plan is None else AttentionPlan.from_dict(plan)


def test_a_bound_grows_to_its_target(given, tmp_path, capsys):
    result, plan = ran(given, tmp_path / "out", *config(tmp_path))
    strengths = [json.loads(line)["strength"] for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert strengths == [pytest.approx(one) for one in (1 / 3, 2 / 3, 1, 1, 1)]
    assert [check["kept"] for check in result["checks"]] == [True] * 5
    assert result["reached"] == 1
    assert plan == AttentionPlan.from_dict(result["plan"])
    assert plan.layers == (0, 1)  # the last layer of a classifier stays as it is
    assert plan.scores.is_per_layer
    assert len(result["harm_untrained"]["alone"]) == 3
    for layer in ("0", "1"):
        old, new = (result[side]["largest"]["layers"][layer]["logit"] for side in ("before", "after"))
        assert old / new > 2
    assert result["provenance"].keys() >= {"command", "commit", "versions", "device", "threads"}
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "largest hidden state" in card
    assert "100% of its target" in card
    assert "largest logit" in capsys.readouterr().out


@pytest.mark.parametrize(("good", "strengths", "reached"), [
    ("++--", [1, 2, 3, 3], 2), ("+-+-+", [1, 2, 2, 3, 3], 3), ("--", [1, 1], 0), ("-+--", [1, 1, 2, 2], 1),
])  # fmt: skip
def test_the_last_bound_that_kept_quality_is_saved(given, tmp_path, monkeypatch, good, strengths, reached):
    """The bound waits while quality is lost, and the run ends when it does not come back."""
    marks, check = iter(good), recipe.Migration._check

    def judged(self, model, step):
        loss = 0.0 if next(marks) == "+" else math.nan
        self.judge = lambda _: {"loss": loss, "accuracy": 0.5}
        return check(self, model, step)

    monkeypatch.setattr(recipe.Migration, "_check", judged)
    result, plan = ran(given, tmp_path / "out", *config(tmp_path), "--layers", "1")
    assert [check["kept"] for check in result["checks"]] == [mark == "+" for mark in good]
    assert [check["strength"] * 3 for check in result["checks"]] == pytest.approx(strengths)
    assert result["reached"] * 3 == pytest.approx(reached)
    assert plan == AttentionPlan.from_dict(result["plan"])
    assert plan.layers == (1,)


def test_nothing_kept_gives_the_model_back(given, tmp_path):
    result, plan = ran(given, tmp_path / "out", *config(tmp_path, budget=1e-9, learning_rate=1.0))
    assert result["reached"] == 0
    assert plan.scores.bound == ((math.inf,) * 4,) * 3
    assert result["after"]["loss"] == pytest.approx(result["before"]["loss"], abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*floor 0.01 asked for:hf_fullpay.FullPayWarning")  # 11 keys
def test_a_floor_and_ordinary_attention(given, tmp_path):
    result, plan = ran(given, tmp_path / "floor", *config(tmp_path), "--attention", "fullpay", "--layers", "from:1")
    assert plan == replace(PRESETS["fullpay"], layers="from:1")
    assert result["harm_untrained"] is None
    result, plan = ran(given, tmp_path / "plain", *config(tmp_path), "--attention", "sdpa")
    assert plan is None
    assert "plan" not in result


def test_on_the_way():
    both = AttentionPlan(scores=Bounded(bound=[[1.0, 2.0]]), payment=Mixture(floor=0.01, budget=[0.1, 0.2]))
    half = recipe.at(both, 0.5)
    assert half.scores.bound == ((2.0, 4.0),)
    assert half.payment.budget == (0.05, 0.1)
    assert recipe.at(both, 1.0) == both
    neutral = recipe.at(both, 0.0)
    assert neutral.scores.bound == ((math.inf, math.inf),)
    assert neutral.payment.is_neutral
    assert recipe.at(PRESETS["bounded"], 0.0).scores.bound == math.inf


def test_interrupted_and_resumed(given, tmp_path):
    """The same losses and checks as a run of one piece."""
    short = config(tmp_path, save_every=2)
    whole, _ = ran(given, tmp_path / "whole", *short)
    each_step = recipe.Migration.each_step

    def interrupt(self, model, step, total):
        if step == 3:
            signal.raise_signal(signal.SIGINT)
        return each_step(self, model, step, total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe.Migration, "each_step", interrupt)
        with pytest.raises(SystemExit) as ended:
            ran(given, tmp_path / "halves", *short)
    assert ended.value.code == training.INTERRUPTED
    halves, _ = ran(given, tmp_path / "halves", *short, "--resume")
    assert halves["checks"] == whole["checks"]
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in ("whole", "halves")]
    assert logs[0] == logs[1]
    again, _ = ran(given, tmp_path / "halves", *short, "--resume", "--steps", "4")  # nothing is left to train
    assert again["reached"] == 1


def test_a_full_disk_leaves_the_last_good_model(given, tmp_path, monkeypatch):
    saved = []
    save = Kind.save_pretrained

    def full(self, folder, **more):
        saved.append(folder)
        if len(saved) > 2:
            raise OSError(28, "No space left on device")
        save(self, folder, **more)

    monkeypatch.setattr(Kind, "save_pretrained", full)
    with pytest.raises(SystemExit, match="could not be saved"):
        ran(given, tmp_path / "out", *config(tmp_path))
    plan = AttentionPlan.from_dict(
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model").config.fullpay
    )
    assert math.isfinite(plan.scores.bound[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_processes_do_what_one_does(given, tmp_path, way):
    model = save_classifier(tmp_path / "model", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    flags = [*given[2:], "--model", model, "--steps", 4, *config(tmp_path, batch=2, checks=4)]
    run("migrate_bounded", flags, tmp_path / "one", "--accumulate", 2)
    run("migrate_bounded", flags, tmp_path / "two", way=way)
    one, two = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    assert two["reached"] == one["reached"] == 1
    for ours, theirs in zip(two["checks"], one["checks"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    assert two["after"]["loss"] == pytest.approx(one["after"]["loss"], rel=1e-3)


@pytest.mark.parametrize(("more", "told"), [
    (["--attention", "band_causal"], "--attention: expected sdpa, bounded"),
    (["--attention", "eager"], "--attention: expected sdpa, bounded"),
    (["--attention", "fullpay", "--learnable"], "--attention: expected sdpa, bounded"),
    (["--layers", "x"], 'expected "all"'), (["--layers", "7"], "layer numbers from 0 to 2"),
    (["--compile"], "expected a run without it"), (["--length", "17"], "at most 16"),
    (["--model", "nowhere/at/all"], "nowhere/at/all"), (["--data", "missing.csv"], "missing.csv"),
], ids=lambda value: value if isinstance(value, str) else " ".join(value))  # fmt: skip
def test_refusals(given, tmp_path, capsys, more, told):
    with pytest.raises(SystemExit) as ended:
        recipe.main([*given, "--out", str(tmp_path / "out"), *more])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_refused_data_and_values(given, tmp_path, capsys):
    def refused(*more):
        with pytest.raises(SystemExit) as ended:
            recipe.main([*given, "--out", str(tmp_path / "out"), *more])
        assert ended.value.code == 2
        return capsys.readouterr().err

    (tmp_path / "empty.csv").write_text("text,label\n")
    assert "expected rows in every split" in refused("--data", str(tmp_path / "empty.csv"))
    (tmp_path / "other.csv").write_text("text,label\n" + "good film,maybe\n" * 10)
    assert "expected labels of the checkpoint" in refused("--data", str(tmp_path / "other.csv"))
    assert "stages: expected at most" in refused(*config(tmp_path, stages=7))
    assert "expected a trained classifier, got none" in refused("--model=")


def test_layers_that_are_least_harmed(given):
    """Greedy: the least harmed first, others while all together stay within the harm; never a classifier's last."""
    model = AutoModelForSequenceClassification.from_pretrained(given[1]).eval()
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(4, 14, (8, 12))}
    with torch.no_grad():
        batch["labels"] = model(**batch).logits.argmax(-1)  # so that every change is harm
    plan = AttentionPlan(scores=Bounded(bound=0.05))

    def harm(*layers):
        with torch.no_grad(), trial(model, plan) as tried:
            tried.run(())
            start = float(model(**batch).loss)
            tried.run(layers)
            return float(model(**batch).loss) - start

    layers, found = recipe.chosen(model, [batch], plan, 50.0, None)
    assert layers == (0, 1)
    assert found["alone"] == pytest.approx([harm(0), harm(1), harm(2)], abs=1e-6)
    assert found["together"] == pytest.approx(harm(0, 1), abs=1e-6)
    assert recipe.chosen(model, [batch], plan, (harm(1) + harm(0, 1)) / 2, None)[0] == (1,)
    with pytest.raises(ValueError, match="expected a layer that raises the loss by at most"):
        recipe.chosen(model, [batch], plan, harm(1) / 2, None)


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        recipe.main(["--help"])
    assert ended.value.code == 0
    assert "python recipes/migrate_bounded.py" in capsys.readouterr().out
