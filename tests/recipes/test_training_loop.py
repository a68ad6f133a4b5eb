"""The loop under all recipes: exact resume, Ctrl-C, a full disk, and the flags that must not change a loss."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import transformers
from checkpoints import RECIPES, SMALL, learned, losses, texts, tiny_bert, values

import arguments
import finetune_text as recipe
import training

DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
# A recipe that is killed, as by kill -9, once a step is in its log; what follows in the file is half a line.
KILLED = """
import os, signal, sys
sys.path.insert(0, {recipes!r})
import finetune_text, training
stock = training.Log.write
def write(self, step, numbers):
    stock(self, step, numbers)
    if step == {step}:
        with self.path.open("a") as file:
            file.write('{{"step": 99, "lo')
        os.kill(os.getpid(), signal.SIGKILL)
training.Log.write = write
finetune_text.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("text")
    tiny_bert(made / "bert")
    tiny_bert(made / "dropout", **DROPOUT)
    texts(made / "train.csv", 22)
    texts(made / "test.csv", 6, seed=1)
    learned(made / "plan.json")
    return made


def flags(folder, out, *more, model="bert", **changes):
    found = [
        "--model", folder / model, "--data", folder / "train.csv", "--test", folder / "test.csv", "--out", out,
        "--attention", folder / "plan.json",
    ]  # fmt: skip
    found += ["--config", values("finetune_text", out.with_suffix(".yaml"), **changes), *more]
    return list(map(str, found))


def test_a_killed_run_goes_on_as_if_nothing_had_been(folder, tmp_path, capsys):
    """11 batches an epoch, two a step: the sixth step of each has one. Killed at step 8, saved at 6 and thus at 3."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = ("--accumulate", 2)
    assert recipe.main(flags(folder, whole, *more, model="dropout", epochs=3)) == 0
    code = KILLED.format(recipes=str(RECIPES), step=8)
    done = subprocess.run(
        [sys.executable, "-c", code, *flags(folder, killed, *more, model="dropout", epochs=3)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len((killed / "log.jsonl").read_text().splitlines()) == 9
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    assert recipe.main(flags(folder, killed, *more, "--resume", model="dropout", epochs=3)) == 0
    assert "resumed at step 6" in capsys.readouterr().out
    assert len(losses(whole)) == 18
    assert (killed / "log.jsonl").read_text() == (whole / "log.jsonl").read_text()
    for name, weights in training_state(killed).items():
        assert torch.equal(weights, training_state(whole)[name]), name


def training_state(out):
    return transformers.AutoModelForSequenceClassification.from_pretrained(out / "model").state_dict()


def test_resumed_within_an_epoch(folder, tmp_path):
    """The place in the data counts, not only the epoch."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    recipe.main(flags(folder, whole, model="dropout", epochs=1, save_every=100))
    recipe.main(flags(folder, cut, model="dropout", epochs=1, save_every=4))
    (cut / "log.jsonl").unlink()
    recipe.main(flags(folder, cut, "--resume", model="dropout", epochs=1, save_every=4))
    lines = [(out / "log.jsonl").read_text().splitlines() for out in (cut, whole)]
    assert lines[0] == lines[1][8:]


def test_ctrl_c_saves_and_says_how_to_go_on(folder, tmp_path, capsys, monkeypatch):
    stock = training.Log.write
    before = signal.getsignal(signal.SIGINT)  # a shell ignores it for what runs in the background

    def write(self, step, numbers):
        stock(self, step, numbers)
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)  # as launchers do

    monkeypatch.setattr(training.Log, "write", write)
    with pytest.raises(SystemExit) as error:
        recipe.main(flags(folder, tmp_path / "out", save_every=100))
    assert error.value.code == 130
    assert "interrupted at step 4" in (told := capsys.readouterr().out)
    assert "step-00000004; go on with --resume" in told
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr(training.Log, "write", stock)
    with pytest.raises(SystemExit):
        recipe.main(flags(folder, tmp_path / "out"))
    assert "expected a folder without checkpoints, got step-00000004. Add --resume" in capsys.readouterr().err
    assert recipe.main(flags(folder, tmp_path / "out", "--resume")) == 0
    assert len(losses(tmp_path / "out")) == 22


def test_a_full_disk_costs_no_checkpoint_and_no_run(folder, tmp_path, capsys, monkeypatch):
    stock = torch.save

    def save(thing, file, *rest, **options):
        if "step-00000006" in str(file):
            raise OSError(28, "No space left on device")
        return stock(thing, file, *rest, **options)

    monkeypatch.setattr(torch, "save", save)
    assert recipe.main(flags(folder, tmp_path / "out", "--steps", 8)) == 0
    told = capsys.readouterr().out
    assert "step 6 could not be saved ([Errno 28] No space left on device); the last good checkpoint is" in told
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-00000003"]
    assert len(losses(tmp_path / "out")) == 8


def test_a_full_disk_at_the_end(folder, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    with pytest.raises(SystemExit, match=r"could not be saved .* go on with --resume"):
        recipe.main(flags(folder, tmp_path / "out", "--steps", 4))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoints", "log.jsonl"]


def test_resume_without_a_checkpoint_says_so(folder, tmp_path, capsys):
    assert recipe.main(flags(folder, tmp_path / "out", "--resume", "--steps", 1)) == 0
    assert "no checkpoint" in capsys.readouterr().out


def run(folder, out, *more, **changes):
    assert recipe.main(flags(folder, out, "--steps", 3, *more, **changes)) == 0
    return losses(out)


def test_accumulation_is_a_larger_batch(folder, tmp_path):
    one = run(folder, tmp_path / "one", "--accumulate", 2, batch=1)
    assert one == pytest.approx(run(folder, tmp_path / "two", batch=2), rel=1e-4)


def test_gradient_checkpointing_changes_no_loss(folder, tmp_path):
    more = run(folder, tmp_path / "more", "--gradient-checkpointing", model="dropout")
    assert more == pytest.approx(run(folder, tmp_path / "plain", model="dropout"), rel=1e-5)


def test_bf16_stays_near(folder, tmp_path):
    low = run(folder, tmp_path / "low", "--mixed-precision", "bf16")
    assert low[0] == pytest.approx(run(folder, tmp_path / "plain")[0], rel=0.05)
    stored = training_state(tmp_path / "low")
    assert {weights.dtype for weights in stored.values() if weights.is_floating_point()} == {torch.float32}


@pytest.mark.slow
def test_compiled(folder, tmp_path, monkeypatch):
    """In the graph's own terms; the compiler of C++ behind it has its own tests."""
    stock = arguments.TorchDynamoPlugin
    monkeypatch.setattr(arguments, "TorchDynamoPlugin", lambda **options: stock(**options | {"backend": "aot_eager"}))
    fast = run(folder, tmp_path / "fast", "--compile")
    assert fast == pytest.approx(run(folder, tmp_path / "plain"), rel=1e-4)
    assert not any("_orig_mod" in name for name in training_state(tmp_path / "fast"))


def test_lora_trains_adapters_head_and_learned_numbers(folder, tmp_path):
    """The saved model is whole: what was trained is merged, the rest is as it was."""
    found = run(folder, tmp_path / "out", "--lora", 2, save_every=2)
    recipe.main(flags(folder, tmp_path / "out", "--steps", "3", "--lora", "2", "--resume"))
    assert losses(tmp_path / "out") == found
    start = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "bert").state_dict()
    trained = training_state(tmp_path / "out")
    moved = {name for name in start if not torch.equal(start[name], trained[name])}
    assert {"classifier.weight", "classifier.bias"} <= moved
    assert any("query.weight" in name for name in moved)
    assert not any("embeddings" in name or "LayerNorm" in name for name in moved)
    budgets = [weights for name, weights in trained.items() if "budget_bias" in name]
    assert len(budgets) == 2
    assert all(budget.any() for budget in budgets)


def test_three_groups():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    rates = SMALL | {"weight_decay": 0.1}
    weights, rest = training.parameter_groups(model, rates)
    assert (len(weights["params"]), weights["weight_decay"]) == (1, 0.1)
    assert (len(rest["params"]), rest["weight_decay"]) == (3, 0.0)


def test_order_differs_between_epochs_and_seeds_only():
    orders = {}
    for seed in (1, 2):
        for epoch in (0, 1):
            order = training.Order(20, seed)
            order.epoch = epoch
            orders[seed, epoch] = tuple(order)
            order.done = 7
            assert tuple(order) == orders[seed, epoch][7:]
    assert len(set(orders.values())) == 4
    assert all(sorted(order) == list(range(20)) for order in orders.values())


def test_learned_rate_and_no_decay_for_learned_numbers(folder, tmp_path):
    run(folder, tmp_path / "out", save_every=2)
    state = torch.load(tmp_path / "out" / "checkpoints" / "step-00000002" / "optimizer.bin")
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.01, 0.0, 0.0]
    rates = [group["initial_lr"] for group in state["param_groups"]]
    assert rates == [0.01, 0.01, 0.1]
    assert len(state["param_groups"][2]["params"]) == 2
    assert json.loads((tmp_path / "out" / "results.json").read_text())["values"]["learned_rate"] == 0.1
