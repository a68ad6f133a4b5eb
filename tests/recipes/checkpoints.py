"""What the tests of the fine-tuning recipes are run on: tiny checkpoints, tables and values, in a folder."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertTokenizer, PreTrainedTokenizerFast, ViTImageProcessorPil

from families import build
from hf_fullpay import AttentionPlan, Mixture

WORDS = [f"word{i}" for i in range(40)]
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ",", ".", "but", "although", "good", "bad"]
RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = {"epochs": 2, "batch": 2, "learning_rate": 0.01, "learned_rate": 0.1, "save_every": 3, "seed": 1}


def tiny_bert(folder: Path, **changes: Any) -> Path:
    """A BERT of two layers with its tokenizer; `changes` of the config, such as dropout."""
    build("bert", **changes).save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate([*MARKS, *WORDS])}
    BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    return folder


def tiny_vit(folder: Path) -> Path:
    """A ViT of two layers with its image processor."""
    model = build("vit")
    model.save_pretrained(folder)
    side = model.config.image_size
    ViTImageProcessorPil(size={"height": side, "width": side}).save_pretrained(folder)
    return folder


def tiny_llama(folder: Path) -> Path:
    """A Llama of two layers with a tokenizer of whole words."""
    build("llama").save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*MARKS, *WORDS])}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="[CLS]", eos_token="[SEP]").save_pretrained(folder)
    return folder


def texts(path: Path, rows: int, seed: int = 0) -> Path:
    """A .csv of documents, a third of them with a contrast, whose label is a word in them."""
    draw, lines = random.Random(seed), ["text,label"]
    for i in range(rows):
        label = draw.choice(["good", "bad"])
        words = [*draw.choices(WORDS, k=draw.randrange(3, 20)), label]
        draw.shuffle(words)
        if i % 3 == 0:
            words.insert(len(words) // 2, ", but")
        lines.append(f'"{" ".join(words)}",{label}')
    path.write_text("\n".join(lines) + "\n")
    return path


def values(recipe: str, path: Path, **changes: Any) -> Path:
    """A YAML of the recipe's own values, but for a training of a few steps."""
    usual = yaml.safe_load((RECIPES / "configs" / f"{recipe}.yaml").read_text())
    path.write_text(yaml.safe_dump(usual | SMALL | changes))
    return path


def learned(path: Path) -> Path:
    """A plan with a learned budget in every head."""
    plan = AttentionPlan(payment=Mixture(floor=None, budget=0.1, learnable=True))
    path.write_text(json.dumps(plan.to_dict()))
    return path


def losses(out: Path) -> list[float]:
    """Of all steps, in order."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]
