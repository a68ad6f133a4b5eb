"""The Trainer callback: right numbers at the right steps, everywhere that Trainer reports to, and nothing else changed."""

import math
import os
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback

import hf_fullpay
from converted import LEARNABLE, equal
from families import FAMILIES, build, inputs
from hf_fullpay import AttentionPlan, DiagnoseCallback, FullPayWarning, Mixture, convert
from hf_fullpay.diagnosis.as_found import as_found
from small import on
from test_trainer import TARGETS, losses, trainer

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
GENERAL = {f"attention/{name}" for name in ("coverage", "entropy", "entropy_relative", "sink_heads")}
NEAR = hf_fullpay.diagnosis.settings.Settings(near=1)  # documents of the tests have five tokens and more
DROPOUT = {"gpt2": {"attn_pdrop": 0.3}, "bert": {"hidden_dropout_prob": 0.3}}
LEARNED = AttentionPlan(payment=Mixture(floor=None, budget=0.2, learnable=True))


def look(**options):
    return DiagnoseCallback(**{"every": 2, "settings": NEAR} | options)


def fit(model, folder, family, *callbacks, resume=None, **options):
    run = trainer(model, folder, family, **options)
    for callback in callbacks:
        run.add_callback(callback)
    run.train(resume_from_checkpoint=resume)
    return run


def looked(run):
    """Entries of the history that are ours, by step."""
    return {entry["step"]: entry for entry in run.state.log_history if "attention/coverage" in entry}


class Told(TrainerCallback):
    """A tracker."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))


@pytest.mark.parametrize("converted", [False, True], ids=["sdpa", "learned budgets"])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_run_is_the_same_with_and_without(family, converted, tmp_path):
    """Bit for bit: losses, numbers, and the run that resumes; with dropout, so that random numbers matter."""

    def make():
        model = build(family, **DROPOUT[family])
        return convert(model, LEARNED) if converted else model

    tracker = Told()
    plain = fit(make(), tmp_path / "plain", family)
    seen = fit(make(), tmp_path / "seen", family, look(), tracker)
    assert losses(seen) == losses(plain)
    assert len(losses(seen)) == 6
    assert equal(dict(seen.model.named_parameters()), dict(plain.model.named_parameters()))
    found = looked(seen)
    assert sorted(found) == [1, 2, 4, 6]
    for step, entry in found.items():
        names = GENERAL | {"attention/near_over_far"}
        if converted:
            names |= {f"attention/budget_{how}" for how in ("min", "mean", "max")}
            assert entry["attention/budget_min"] <= entry["attention/budget_mean"] <= entry["attention/budget_max"]
        assert names == {name for name in entry if name.startswith("attention/")}
        assert all(math.isfinite(entry[name]) for name in names)
        told = [logs for at, logs in tracker.logs if at == step and "attention/coverage" in logs]
        assert [{name: logs[name] for name in names} for logs in told] == [{name: entry[name] for name in names}]
    assert found[6] != found[2]
    again = fit(make(), tmp_path / "seen", family, look(), resume=str(tmp_path / "seen" / "checkpoint-3"))
    assert losses(again) == losses(plain)
    assert looked(again) == found
    assert not seen.model._forward_pre_hooks


@pytest.mark.parametrize("name", on("bert"))
def test_numbers_are_those_of_the_weights(name):
    """All rows of unpadded documents, against the weights that the model itself shows."""
    model, given = build("bert", name, head=False), inputs("bert")
    found = DiagnoseCallback(rows=9, settings=NEAR).measure(model, given)
    with torch.no_grad():
        layers = model(**given, output_attentions=True).attentions
    entropies, coverages, sinks = [], [], []
    for weights in layers:
        paid = weights > 0
        entropies.append(torch.special.entr(weights).sum(-1).mean())
        coverages.append((weights.masked_fill(~paid, 9).amin(-1) * paid.sum(-1)).mean())
        means = weights.sum(-2) / paid.sum(-2)  # over the rows that see a key
        sinks.append((means[..., :5].amax(-1).mean(0) > 0.3).float().mean())
    assert found["attention/entropy"] == pytest.approx(float(torch.stack(entropies).mean()), rel=1e-4)
    assert found["attention/coverage"] == pytest.approx(float(torch.stack(coverages).mean()), rel=1e-4)
    assert found["attention/sink_heads"] == pytest.approx(float(torch.stack(sinks).mean()))


def test_padding_counts_nowhere():
    model, given = build("bert", "fullpay", head=False), inputs("bert", batch=1, length=9)
    callback = DiagnoseCallback(rows=16, settings=NEAR)
    padded = {"input_ids": torch.nn.functional.pad(given["input_ids"], (0, 7), value=5)}
    padded["attention_mask"] = torch.tensor([[1] * 9 + [0] * 7])
    alone, beside = callback.measure(model, given), callback.measure(model, padded)
    assert beside == pytest.approx(alone, rel=1e-4)


def test_gradients_reach_as_far_as_the_plan():
    """A band of two layers carries nothing over its two windows; full payment carries something everywhere."""
    given = inputs("bert", batch=1, length=16)
    callback = DiagnoseCallback(settings=NEAR)
    band = build("bert", "fullpay_custom", head=False, fullpay=AttentionPlan(reach=hf_fullpay.Band(2)).to_dict())
    assert callback.measure(band, given)["attention/near_over_far"] == math.inf
    paid = callback.measure(build("bert", "fullpay", head=False), given)["attention/near_over_far"]
    assert 0 < paid < math.inf


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_stays_as_it_was(family):
    """Modes one by one, gradients, hooks, random state; with every kind of learned number."""
    model = convert(build(family), LEARNABLE["all"]).train()
    next(model.modules()).eval()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    needs = [p.requires_grad for p in model.parameters()]
    found = look().measure(model, inputs(family))
    assert {f"attention/{name}_mean" for name in ("budget", "alpha", "gate")} <= set(found)
    assert found["attention/gate_mean"] == pytest.approx(0.982, abs=1e-3)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.requires_grad for p in model.parameters()] == needs
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(p.grad is None for p in list(model.parameters())[1:])
    assert not any(module._forward_hooks for module in model.modules())


def test_the_model_stays_as_it_was_on_an_error():
    model, modes = build("bert").train(), []

    def fail():
        with as_found(model):
            modes.append(model.training)
            raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        fail()
    assert modes == [False]
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        {"gradient_accumulation_steps": 2},
        {"activation_checkpointing": True},
        {"logging_strategy": "no"},
        {"torch_compile": True, "torch_compile_backend": "eager"},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("plan", [None, LEARNED], ids=["sdpa", "learned budgets"])
def test_ways_to_train(options, plan, tmp_path):
    def make():
        return build("bert") if plan is None else convert(build("bert"), plan)

    options |= {"save_strategy": "no", "max_steps": 4}
    plain = fit(make(), tmp_path, "bert", **options)
    seen = fit(make(), tmp_path, "bert", look(), **options)
    assert losses(seen) == losses(plain)
    found = looked(seen)
    assert sorted(found) == [1, 2, 4]
    # What recomputes activations to save memory is not asked for a backward pass that keeps them.
    assert ("attention/near_over_far" in found[2]) == ("activation_checkpointing" not in options)


def test_adapters(tmp_path):
    def make():
        config = LoraConfig(r=2, target_modules=TARGETS["bert"], modules_to_save=["fullpay"])
        return get_peft_model(convert(build("bert"), LEARNED), config)

    plain = fit(make(), tmp_path, "bert", save_strategy="no")
    seen = fit(make(), tmp_path, "bert", look(), save_strategy="no")
    assert losses(seen) == losses(plain)
    found = looked(seen)
    assert found[2]["attention/budget_max"] != found[6]["attention/budget_max"]


def test_a_batch_of_ones_own_and_plain_loops():
    """The same numbers from a model as Accelerate prepared it."""
    model, given = convert(build("gpt2"), LEARNED), inputs("gpt2", batch=6)
    callback = look(documents=2)
    prepared = Accelerator(cpu=True, mixed_precision="no").prepare(model)
    found = callback.measure(prepared, given)
    assert found == callback.measure(model, {"input_ids": given["input_ids"][:2]})
    assert found == callback.measure(torch.compile(model, backend="eager"), given)


def test_a_batch_of_ones_own_shows_the_model_alone(tmp_path):
    given = inputs("bert", batch=3)
    run = fit(build("bert"), tmp_path, "bert", look(batch=given), save_strategy="no", learning_rate=0.0)
    assert len({entry["attention/entropy"] for entry in looked(run).values()}) == 1


def test_what_cannot_be_measured_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"every=...\): expected an integer of at least 1"):
        DiagnoseCallback(every=0)
    with pytest.raises(ValueError, match="keyword arguments"):
        DiagnoseCallback(batch=[1])
    with pytest.raises(ValueError, match="attention interface"):
        fit(torch.nn.Linear(2, 2), tmp_path, "bert", look())
    with pytest.raises(RuntimeError, match=r"callback.measure\(model, batch\)"):
        look().on_train_begin(None, None, None)
    sharded = build("bert")
    next(sharded.parameters()).ds_id = 0
    with pytest.raises(ValueError, match="sharded"):
        look().measure(sharded, inputs("bert"))


def test_a_look_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("no weights here")

    monkeypatch.setattr("hf_fullpay.hf.callback.glance", fail)
    with pytest.warns(FullPayWarning, match="no weights here") as told:
        run = fit(build("bert"), tmp_path, "bert", look(), save_strategy="no")
    assert len(losses(run)) == 6
    assert len([one for one in told if "no weights here" in str(one.message)]) == 1


def test_subclasses_of_trainer_keep_their_own_logs(tmp_path):
    """TRL's log adds what it counted since the last time, and starts anew."""

    class Counting(Trainer):
        count = 0

        def log(self, logs, start_time=None):
            self.count += 1
            super().log(logs | {"count": self.count}, start_time)

    run = trainer(build("bert"), tmp_path, "bert", save_strategy="no")
    run.__class__ = Counting
    run.add_callback(look())
    run.train()
    assert [entry["count"] for entry in run.state.log_history if "loss" in entry] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_two_processes(tmp_path):
    """DDP: the first process measures, both keep the same losses and numbers as without."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def _two(folder):
    runs = []
    for callbacks in ([], [look()]):
        run = fit(convert(build("bert"), LEARNED), folder, "bert", *callbacks, save_strategy="no", max_steps=4)
        runs.append(run)
    assert runs[0].args.world_size == 2
    assert losses(runs[1]) == losses(runs[0])
    assert equal(dict(runs[0].model.named_parameters()), dict(runs[1].model.named_parameters()))
    assert sorted(looked(runs[1])) == ([1, 2, 4] if runs[1].is_world_process_zero() else [])


if __name__ == "__main__":
    torch.set_num_threads(1)
    _two(sys.argv[1])
    torch.distributed.barrier()  # a process that leaves early ends the other's threads
    torch.distributed.destroy_process_group()
