"""Long generation, tiny: hand-counted repetition, the cache of a band, every mode, and what is refused."""

import csv
import json
import random
import warnings

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState

import finetune_lm
import generate_long as recipe
from hf_fullpay import FullPayWarning

VALUES = yaml.safe_load(recipe.CONFIG.read_text()) | {"prompts": 2, "prompt": 4, "seeds": 2}
TRAINING = yaml.safe_load(finetune_lm.CONFIG.read_text()) | {"layers": 1, "heads": 2, "hidden": 16, "vocabulary": 300}
MODELS = {"sdpa": "sdpa", "lia": "lia", "narrow": "band_causal"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Texts, and two trainings under each attention; one of a stock model."""
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    words = ["the", "film", "was", "long", "and", "slow", "but", "naïve", "actors", "made", "it", "better"]
    with (folder / "texts.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text"])
        rows.writerows([" ".join(draw.choices(words, k=80))] for _ in range(60))
    (folder / "tiny.yaml").write_text(yaml.safe_dump(VALUES))
    (folder / "training.yaml").write_text(yaml.safe_dump(TRAINING))
    base = ["--data", folder / "texts.csv", "--config", folder / "training.yaml", "--steps", 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FullPayWarning)
        for name, attention in MODELS.items():
            for seed in (1, 2):
                AcceleratorState._reset_state(reset_partial_state=True)
                more = ["--length", 64, "--seed", seed, "--attention", attention, "--out", folder / f"{name}-{seed}"]
                assert finetune_lm.main([str(argument) for argument in (*base, *more)]) == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    return folder


def run(data, out, *more):
    arguments = ["--data", data / "texts.csv", "--config", data / "tiny.yaml", "--out", out]
    return recipe.main([str(argument) for argument in (*more, *arguments)])


def test_run(data, tmp_path, capsys):
    assert run(data, tmp_path, *(f"{name}={data}/{name}-[12]/model" for name in MODELS)) == 0
    result = json.loads((tmp_path / "generate_long.json").read_text())
    assert [(row["name"], row["mode"]) for row in result["rows"]] == [(n, m) for m in recipe.MODES for n in MODELS]
    assert all(row["units"] == 2 for row in result["rows"])  # trainings
    texts = [json.loads(line) for line in (tmp_path / "generate_long_texts.jsonl").read_text().splitlines()]
    assert len(texts) == 3 * 2 * (1 + 2) * 2
    for row in result["rows"]:
        mine = [t for t in texts if (t["name"], t["mode"]) == (row["name"], row["mode"])]
        for name in recipe.FIGURES:
            mean = sum(text[name] for text in mine) / len(mine)
            assert row["figures"][name]["mean"] == pytest.approx(mean)
        if row["name"] != "sdpa":
            first = next(r for r in result["rows"] if (r["name"], r["mode"]) == ("sdpa", row["mode"]))
            found = row["difference"]["distinct_4_last"]["mean"]
            both = (r["figures"]["distinct_4_last"]["mean"] for r in (row, first))
            assert found == pytest.approx(next(both) - next(both))
    assert result["checkpoints"]["lia"][0]["perplexity"] > 1
    assert recipe.PEOPLE in capsys.readouterr().out


def test_a_stock_checkpoint_under_several_attentions(data, tmp_path):
    """One training: what is independent are the prompts."""
    place = data / "sdpa-1/model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FullPayWarning)
        assert run(data, tmp_path, f"sdpa={place}", f"fullpay={place}", "--new-tokens", 40) == 0
    result = json.loads((tmp_path / "generate_long.json").read_text())
    assert result["length"] == 44
    assert {row["units"] for row in result["rows"]} == {2}
    assert result["checkpoints"]["fullpay"][0]["plan"].startswith("Mixture")


@pytest.mark.parametrize("mode", recipe.MODES)
def test_the_cache_of_a_band_changes_no_token(data, mode, monkeypatch):
    model = recipe.load("narrow", str(data / "narrow-1/model"))
    prompts = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    found = recipe.continued(model, prompts, 40, mode, 3, VALUES)
    assert [len(text) for text in found] == [44, 44]
    assert found == recipe.continued(model, prompts, 40, mode, 3, VALUES)
    monkeypatch.setattr(recipe.hf_fullpay, "sliding_cache", lambda model: None)
    assert found == recipe.continued(model, prompts, 40, mode, 3, VALUES)


def test_hand_counted():
    loop = [9, 9] + [1, 2, 3, 4] * 8
    found = recipe.repetition(loop, 2)
    assert found["distinct_1_first"] == 4 / 8
    assert found["distinct_4_last"] == 4 / 5
    assert found["repeated_4_first"] == 1 / 5  # 1234 2341 3412 4123 are new, 1234 is not
    assert found["repeated_4_last"] == 1.0
    fresh = recipe.repetition(list(range(34)), 2)
    assert {fresh[f"distinct_{n}_last"] for n in range(1, 5)} == {1.0}
    assert fresh["repeated_4_last"] == 0.0


def refused(data, tmp_path, capsys, *more):
    with pytest.raises(SystemExit) as ended:
        run(data, tmp_path, *more)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_bad_input(data, tmp_path, capsys):
    place = f"{data}/sdpa-1/model"
    assert "expected NAME=CHECKPOINT" in refused(data, tmp_path, capsys, place)
    assert "expected a folder that fits" in refused(data, tmp_path, capsys, f"sdpa={data}/none-*")
    assert "as many checkpoints of every name" in refused(
        data, tmp_path, capsys, f"sdpa={data}/sdpa-*/model", f"lia={data}/lia-1/model"
    )
    assert "expected the name of an attention" in refused(data, tmp_path, capsys, f"mine={place}")
    assert "at most 64, the positions" in refused(data, tmp_path, capsys, f"sdpa={place}", "--new-tokens", "61")
    assert "expected 16 or more" in refused(data, tmp_path, capsys, f"sdpa={place}", "--new-tokens", "8")
    assert "expected 99 held-out documents" in refused(data, tmp_path, capsys, f"sdpa={place}", "--prompts", "99")
    assert "missing" in refused(data, tmp_path, capsys, f"sdpa={data}/missing/model")


def test_help(capsys):
    with pytest.raises(SystemExit) as end:
        recipe.main(["--help"])
    assert end.value.code == 0
    assert "python recipes/generate_long.py" in capsys.readouterr().out
