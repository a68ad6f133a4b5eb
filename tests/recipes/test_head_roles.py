"""Head roles and their cost, tiny: heads made by hand, whose masking does what it must."""

import json
import random

import pytest
import torch
import yaml

import hand_made
import head_roles as recipe
from hf_fullpay.diagnosis import Findings, Table

VALUES = yaml.safe_load(recipe.CONFIG.read_text()) | {"train": 30, "test": 20, "draws": 2}


@pytest.fixture
def arguments(tmp_path):
    """Everything that the recipe is given, made by hand."""
    hand_made.model().save_pretrained(tmp_path / "model")
    hand_made.tokenizer().save_pretrained(tmp_path / "model")
    draw, lines = random.Random(0), set()
    while len(lines) < 60:
        words = draw.choices(hand_made.WORDS, k=8)
        lines.add(f"{' '.join(words)},{int('ann' in words)}")
    (tmp_path / "task.csv").write_text("\n".join(["text,label", *sorted(lines)]) + "\n")
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(VALUES))
    trees, pronouns = hand_made.treebank(tmp_path / "trees"), hand_made.pronouns(tmp_path / "pronouns")
    return [
        "--model", str(tmp_path / "model"), "--treebank", str(trees), "--gap", str(pronouns),
        "--task", str(tmp_path / "task.csv"), "--config", str(tmp_path / "values.yaml"), "--out", str(tmp_path / "out"),
    ]  # fmt: skip


def test_run(arguments, tmp_path, capsys):
    assert recipe.main(arguments) == 0
    result = json.loads((tmp_path / "out" / "head_roles.json").read_text())
    assert {row["role"]: row["by_layer"] for row in result["rows"]} == {
        "positional": {"0": [hand_made.PREVIOUS]}, "syntactic": {"0": [hand_made.FOLLOWING]},
        recipe.STRICT: {"0": [hand_made.FOLLOWING]}, "coreference": {"0": [hand_made.FOLLOWING]},
        "global": {"0": [hand_made.SEPARATOR]},
    }  # fmt: skip
    for row in result["rows"]:
        assert 0 <= row["accuracy"] <= 1
        assert -1 <= row["cosine"] < 1
        assert len(row["random_draws"]) == VALUES["draws"]
    assert result["provenance"].keys() >= {"command", "commit", "versions", "device", "threads", "cpu_seconds"}
    assert result["values"] == VALUES
    assert result["tables"]["roles"]["columns"][0] == "layer"
    assert "Of 4 heads: 1 positional" in capsys.readouterr().out


def test_embeddings_do_not_depend_on_batch_mates(arguments):
    model, tokenizer = hand_made.model(), hand_made.tokenizer()
    texts = ["she runs", "now ann runs", "bob runs", "here"]
    together = recipe.embed(model, tokenizer, texts)
    for text, row in zip(texts, together, strict=True):
        alone = model(**{"input_ids": torch.tensor([tokenizer(text)["input_ids"]])})[0].mean(1)
        torch.testing.assert_close(row, alone[0].detach())


def test_random_heads_are_as_many_in_the_same_layers():
    draw = random.Random(0)
    for _ in range(20):
        found = recipe.alike({0: [1], 3: [0, 1, 2, 3], 5: [0, 2]}, 4, draw)
        assert {layer: len(set(heads)) for layer, heads in found.items()} == {0: 1, 3: 4, 5: 2}


def test_heads_with_loose_relations_alone_are_told_apart():
    rows = [[0, 1, "syntactic", "list, dependent to governor", 1.0, 0.1], [0, 2, "syntactic", "list, x", 1.0, 0.1],
            [0, 2, "syntactic", "obj, x", 1.0, 0.1], [0, 2, "global", "", 1.0, 0.1]]  # fmt: skip
    found = recipe.heads_of(Findings(tables={"roles": Table("", [], rows)}))
    assert found["syntactic"] == {0: [1, 2]}
    assert found[recipe.STRICT] == found["global"] == {0: [2]}


@pytest.mark.parametrize(("name", "text", "told"), [
    ("--task", "words,label\na,1\n", r"--task: expected columns text and label"),
    ("--task", "text,label\na,1\n", r"--task: expected 50 different texts, as the config asks, got 1"),
    ("--gap", "x", r"expected the columns of GAP"),
    ("--treebank", "x", r"expected 10 columns"),
])  # fmt: skip
def test_bad_data(arguments, tmp_path, capsys, name, text, told):
    (tmp_path / "bad").write_text(text)
    with pytest.raises(SystemExit) as ended:
        recipe.main([*arguments, name, str(tmp_path / "bad")])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err.replace("\n", " ")


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        recipe.main(["--help"])
    assert ended.value.code == 0
    assert "python recipes/head_roles.py" in capsys.readouterr().out
