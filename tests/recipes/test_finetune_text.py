"""The text recipe, tiny: what it writes, and what it refuses."""

import json
import re

import pytest
import torch
import transformers
from checkpoints import learned, texts, tiny_bert, values

import finetune_text as recipe
from data import checkpoint, table


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("text")
    tiny_bert(made / "bert")
    texts(made / "train.csv", 40)
    texts(made / "test.csv", 9, seed=1)
    learned(made / "plan.json")
    values("finetune_text", made / "values.yaml")
    return made


def flags(folder, out, **changes):
    found = {
        "model": folder / "bert", "data": folder / "train.csv", "test": folder / "test.csv", "out": out,
        "attention": folder / "plan.json", "config": folder / "values.yaml", "steps": 2,
    }  # fmt: skip
    found |= changes
    return [text for name, value in found.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def test_run(folder, tmp_path):
    assert recipe.main(flags(folder, tmp_path, steps=40)) == 0
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["all"]["rows"] == 9
    assert result["contrast"]["rows"] == 3
    assert 0 <= result["all"]["macro_f1"] <= 1
    assert result["provenance"].keys() >= {"command", "commit", "versions", "device", "threads"}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert type(model).__name__ == "FullPayBertForSequenceClassification"
    assert model.config.label2id == {"bad": 0, "good": 1}
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"| accuracy | {result['all']['accuracy']:.3f} on 9 held-out documents |" in card
    assert "on 40 documents of train.csv (at most 160 tokens, the tail of longer ones) for 40 steps" in card
    assert str(folder) not in card

    # What is reloaded answers as what was trained.
    answer = transformers.pipeline("text-classification", model=str(tmp_path / "model"))
    rows = table(str(folder / "test.csv"))
    right = [answer(text)[0]["label"] == label for text, label in zip(rows["text"], rows["label"], strict=True)]
    assert sum(right) / 9 == pytest.approx(result["all"]["accuracy"])


def test_ordinary_attention_has_no_card(folder, tmp_path):
    assert recipe.main(flags(folder, tmp_path, attention="sdpa")) == 0
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert not (tmp_path / "model" / "README.md").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data": "missing.csv"}, "missing.csv"),
        ({"test": "missing.csv"}, "missing.csv"),
        ({"model": "no/such-model"}, "no/such-model"),
        ({"attention": "missing.json"}, "--attention: expected a plan in a JSON file, got missing.json"),
        ({"attention": "no_such_name"}, "no_such_name"),
        ({"text_column": "body"}, r"expected the columns \['body'\]"),
        ({"length": 161}, "--length: expected at most 160, the positions of the model, got 161"),
        ({"length": 2}, "--length: expected at least 3"),
        ({"config": "missing.yaml"}, "missing.yaml"),
        ({"steps": 0}, "--steps: expected an integer of at least 1"),
        ({"mixed_precision": "fp16"}, "expected bf16 or no on this device, got fp16"),
    ],
    ids=str,
)
def test_what_is_refused(folder, tmp_path, capsys, changes, reason):
    if torch.cuda.is_available() and "mixed_precision" in changes:
        pytest.skip("a GPU has FP16")
    with pytest.raises(SystemExit) as error:
        recipe.main(flags(folder, tmp_path, **changes))
    assert error.value.code == 2
    assert re.search(reason, capsys.readouterr().err)


def test_a_device_without_bf16(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(SystemExit):
        recipe.main(flags(folder, tmp_path, mixed_precision="bf16"))
    assert "expected fp16 or no on this device, got bf16" in capsys.readouterr().err


def test_labels(folder, tmp_path, capsys):
    """A classifier keeps its labels; held-out labels must have been trained on."""
    config = transformers.BertConfig(label2id={"good": 0, "bad": 1}, id2label={0: "good", 1: "bad"})
    assert recipe.label_ids(["bad", "good"], config) == {"good": 0, "bad": 1}
    with pytest.raises(ValueError, match=r"expected labels of the checkpoint, \['bad', 'good'\], got \['odd'\]"):
        recipe.label_ids(["odd", "good"], config)
    (tmp_path / "odd.csv").write_text("text,label\nword1,odd\n")
    with pytest.raises(SystemExit):
        recipe.main(flags(folder, tmp_path / "out", test=tmp_path / "odd.csv"))
    assert "expected held-out labels among those trained on, ['bad', 'good'], got ['odd']" in capsys.readouterr().err


def test_an_empty_split(folder, tmp_path, capsys):
    (tmp_path / "empty.csv").write_text("text,label\n")
    with pytest.raises(SystemExit):
        recipe.main(flags(folder, tmp_path / "out", test=tmp_path / "empty.csv"))
    assert "expected rows in every split, got an empty test split" in capsys.readouterr().err


def test_which_part_of_a_document_is_kept():
    ids = list(range(9))
    assert recipe.kept(ids, 4, "head") == [0, 1, 2, 3]
    assert recipe.kept(ids, 4, "tail") == [5, 6, 7, 8]
    assert recipe.kept(ids, 5, "both") == [0, 1, 6, 7, 8]
    assert recipe.kept(ids, 9, "tail") == ids


def test_a_document_keeps_its_marks(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "bert")
    long, short = recipe.encode(["word1 word2 word3 word4", "word5"], tokenizer, 4, "tail")
    assert tokenizer.decode(long) == "[CLS] word3 word4 [SEP]"
    assert tokenizer.decode(short) == "[CLS] word5 [SEP]"


def test_weights_of_labels():
    train = [{"label": label} for label in (0, 0, 0, 2)]
    weights = recipe.class_weights(train, 3)
    assert weights[0] == pytest.approx(4 / (2 * 3))
    assert weights[2] == pytest.approx(4 / (2 * 1))
    assert sum(weights[row["label"]] for row in train) == pytest.approx(4)


@pytest.mark.parametrize(
    ("text", "is_contrast"),
    [
        ("although the cast shines, it bores", True),
        ("the cast shines, but it bores", True),
        ("the cast shines. but it bores", False),
        ("it bores", False),
    ],
)
def test_contrast_is_what_the_model_sees(text, is_contrast):
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint("minilm")[0])
    whole, cut = (recipe.encode([text], tokenizer, length, "tail")[0] for length in (32, 4))
    assert bool(recipe.CONTRAST.search(tokenizer.decode(whole))) == is_contrast
    assert not recipe.CONTRAST.search(tokenizer.decode(cut))
