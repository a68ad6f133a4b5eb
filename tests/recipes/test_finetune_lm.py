"""Training a decoder, tiny: what it writes, what it refuses, and that an interrupted run ends as one that was not."""

import csv
import json
import math
import random
import signal
import warnings

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetune_lm as recipe
import training
from documents import encode, held_out, pieces
from hf_fullpay import FullPayWarning
from packing import IGNORED, batch_of

VALUES = yaml.safe_load(recipe.CONFIG.read_text()) | {
    "layers": 1, "heads": 2, "hidden": 16, "vocabulary": 300, "save_every": 2
}  # fmt: skip


@pytest.fixture(autouse=True)
def _alone():
    warnings.simplefilter("ignore", FullPayWarning)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def data(tmp_path):
    """Texts of 3 to 30 words, with characters of several bytes."""
    draw = random.Random(0)
    words = ["the", "film", "was", "long", "but", "很好", "and", "naïve", "actors", "made", "it", "better"]
    with (tmp_path / "texts.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text"])
        rows.writerows([" ".join(draw.choices(words, k=draw.randrange(3, 31)))] for _ in range(60))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(VALUES))
    return tmp_path


def run(data, out, *more):
    arguments = ["--data", data / "texts.csv", "--config", data / "tiny.yaml", "--length", 32, "--out", data / out]
    AcceleratorState._reset_state(reset_partial_state=True)
    return recipe.main([str(argument) for argument in (*arguments, *more)])


def refused(data, capsys, *more, out="refused"):
    with pytest.raises(SystemExit) as ended:
        run(data, out, *more)
    assert ended.value.code == 2
    return capsys.readouterr().err


def logged(folder):
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("attention", ["sdpa", "fullpay", "bounded", "band_causal", "fullpay_block", "lia"])
def test_run(data, attention):
    assert run(data, "one", "--attention", attention, "--steps", 2) == 0
    result = json.loads((data / "one/results.json").read_text())
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["documents"] == 12
    assert result["attention"] == attention
    assert len(logged(data / "one")) == 2
    model = AutoModelForCausalLM.from_pretrained(data / "one/model")
    assert model.config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(data / "one/model")
    assert tokenizer.decode(tokenizer("很好 naïve")["input_ids"]) == "很好 naïve"
    assert (data / "one/model/README.md").exists() == (attention != "sdpa")


def test_from_a_checkpoint_without_packing(data):
    assert run(data, "one", "--steps", 2) == 0
    again = ("--model", data / "one/model", "--attention", "lia", "--no-packing", "--steps", 2)
    assert run(data, "two", *again) == 0
    assert json.loads((data / "two/results.json").read_text())["setting"]["packing"] is False


def test_figures_are_those_of_the_model(data):
    """Loss, bits per byte and both quarters, from the checkpoint and the texts alone, token by token."""
    assert run(data, "one", "--steps", 3) == 0
    result = json.loads((data / "one/results.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(data / "one/model").eval()
    tokenizer = AutoTokenizer.from_pretrained(data / "one/model")
    from data import splits

    texts, losses, size, near, far = splits(str(data / "texts.csv"))[1]["text"].tolist(), [], 0, [], []
    for text, document in zip(texts, encode(texts, tokenizer), strict=True):
        kept = document[:32]
        with torch.inference_mode():
            shares = model(input_ids=torch.tensor([kept])).logits[0, :-1].log_softmax(-1)
        found = [-shares[place, token].item() for place, token in enumerate(kept[1:])]
        losses += found
        whole = tokenizer.decode(kept, skip_special_tokens=True)
        size += len(whole.encode()) if "\ufffd" not in whole else len(text.encode())
        if len(kept) == 32:
            near.append(found[:7])
            far.append(found[-8:])
    assert result["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(sum(losses) / math.log(2) / size, rel=0.01)
    assert result["documents_of_full_length"] == len(near) > 0
    assert result["loss_first_quarter"] == pytest.approx(sum(map(sum, near)) / 7 / len(near), rel=1e-5)
    assert result["loss_last_quarter"] == pytest.approx(sum(map(sum, far)) / 8 / len(far), rel=1e-5)


def test_documents():
    assert pieces([[1, 2, 3, 4, 5], [6, 7]], 2) == [[1, 2], [3, 4], [6, 7]]  # a last piece of one predicts nothing

    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="expected a fast tokenizer"):
        held_out(["a"], Slow(), 8)


def test_the_loss_is_a_mean_over_tokens(data):
    """However rows are dealt out to batches: the sum over a fixed number of targets."""
    assert run(data, "one", "--steps", 1) == 0
    model = AutoModelForCausalLM.from_pretrained(data / "one/model")
    model.config.use_cache = False
    rows = [[[1, 2, 3, 4, 5]], [[6, 7]]]
    batch = batch_of(rows, 0)
    whole = model(**batch, num_items_in_batch=torch.tensor(5.0)).loss
    parts = [model(**batch_of([row], 0), num_items_in_batch=torch.tensor(2.5)).loss for row in rows]
    torch.testing.assert_close(whole, torch.stack(parts).mean())
    assert (batch["labels"] != IGNORED).sum() == 5


def test_interrupted_and_resumed(data, capsys, monkeypatch):
    assert run(data, "whole", "--steps", 6) == 0
    write = training.Log.write

    def interrupt(log, step, numbers):
        write(log, step, numbers)
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(training.Log, "write", interrupt)
        with pytest.raises(SystemExit) as ended:
            run(data, "cut", "--steps", 6)
    assert ended.value.code == training.INTERRUPTED
    assert "go on with --resume" in capsys.readouterr().out
    assert "Add --resume" in refused(data, capsys, out="cut")
    assert run(data, "cut", "--steps", 6, "--resume") == 0
    assert logged(data / "cut") == logged(data / "whole")
    first, second = (json.loads((data / name / "results.json").read_text())["loss"] for name in ("cut", "whole"))
    assert first == second


def test_full_disk(data, capsys, monkeypatch):
    """The last good checkpoint stays and the run goes on; a model that cannot be written says how to go on."""
    save = Accelerator.save_state

    def full(accelerator, place, **kwargs):
        if place.endswith("4"):
            raise OSError(28, "No space left on device")
        return save(accelerator, place, **kwargs)

    monkeypatch.setattr(Accelerator, "save_state", full)
    assert run(data, "one", "--steps", 5) == 0
    assert [folder.name for folder in (data / "one/checkpoints").iterdir()] == ["step-00000002"]
    assert "the last good checkpoint is" in capsys.readouterr().out


def test_bad_input(data, capsys):
    assert "got missing.csv" in refused(data, capsys, "--data", "missing.csv")
    assert "empty" in refused(data, capsys, "--words", 100, 200)
    assert "expected the column 'body'" in refused(data, capsys, "--text-column", "body")
    assert "--attention" in refused(data, capsys, "--attention", "nonsense.json")
    assert "at least 2 tokens" in refused(data, capsys, "--length", 1)
    (data / "empty.csv").write_text("")
    assert "empty train split" in refused(data, capsys, "--data", data / "empty.csv")
    if not torch.cuda.is_available():
        assert "--mixed-precision" in refused(data, capsys, "--mixed-precision", "fp16")
    assert run(data, "one", "--steps", 1) == 0
    over = ("--model", data / "one/model", "--length", 64)
    assert "at most 32, the positions of the model, got 64" in refused(data, capsys, *over)


def test_help(capsys):
    with pytest.raises(SystemExit) as end:
        recipe.main(["--help"])
    assert end.value.code == 0
    assert "python recipes/finetune_lm.py" in capsys.readouterr().out
