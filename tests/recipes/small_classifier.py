"""A classifier small enough to be trained in a second, and documents that it can learn."""

from __future__ import annotations

import random
from pathlib import Path

import pandas
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "plot", "the", "a", "was", "but", "although", ","]


def save_classifier(folder: Path, **changes: object) -> Path:
    """A BERT with sharp attention, with its tokenizer."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, initializer_range=0.3, attn_implementation="sdpa",
        **{"label2id": {"no": 0, "yes": 1}, "id2label": {0: "no", 1: "yes"}} | changes,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=16,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def save_documents(path: Path, rows: int = 40) -> Path:
    """Documents of different lengths; one with "good" is called yes."""
    draw = random.Random(0)
    found = []
    for number in range(rows):
        words = draw.choices(WORDS[6:], k=draw.randint(2, 9))
        words.insert(draw.randint(0, len(words)), "good" if number % 2 else "bad")
        found.append({"text": " ".join(words), "label": "yes" if number % 2 else "no"})
    pandas.DataFrame(found).to_csv(path, index=False)
    return path
