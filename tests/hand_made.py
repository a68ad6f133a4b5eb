"""A model whose heads have known roles, with its tokenizer and gold data.

Four heads in one layer of a BERT: the first attends to the token before, the second from a word of type ASKS to a word
of type ANSWERS, wherever that is, the third to the separator, the fourth to everything alike.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

GOLD = Path(__file__).parents[1] / "recipes" / "data"
PREVIOUS, FOLLOWING, SEPARATOR, UNIFORM = range(4)
ASKS, ANSWERS = ("she", "her"), ("runs", "ann")
FILLERS = ("now", "then", "here", "there", "so", "bob")
WORDS = (*ASKS, *ANSWERS, *FILLERS)
LONGEST, WIDTH = 32, 64  # positions take one half of a hidden state, types of words another


def tokenizer(pieces: list[str] | tuple[str, ...] = WORDS, marked: bool = True) -> Any:
    """A WordPiece tokenizer of these pieces, with or without class and separator tokens."""
    vocabulary = {piece: index for index, piece in enumerate(["[UNK]", "[CLS]", "[SEP]", *pieces])}
    built = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if marked:
        built.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=built, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


def model() -> BertModel:
    """Scores are 40 where a head should look, and 0 elsewhere, before LayerNorm scales both sides alike."""
    config = BertConfig(
        vocab_size=3 + len(WORDS), hidden_size=4 * LONGEST, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=8, max_position_embeddings=LONGEST,
    )  # fmt: skip
    built = BertModel(config).eval()
    with torch.no_grad():
        embeddings = built.embeddings
        for table in (embeddings.word_embeddings, embeddings.token_type_embeddings, embeddings.position_embeddings):
            table.weight.zero_()
        embeddings.position_embeddings.weight[:, :LONGEST] = torch.eye(LONGEST)
        for index, word in enumerate(WORDS, 3):
            embeddings.word_embeddings.weight[index, LONGEST + (0 if word in ASKS else 1 if word in ANSWERS else 2)] = (
                1.0
            )
        embeddings.word_embeddings.weight[2, LONGEST + 3] = 1.0
        attention = built.encoder.layer[0].attention.self
        query, key = attention.query, attention.key
        for linear in (query, key):
            linear.weight.zero_()
            linear.bias.zero_()
        at = [slice(head * LONGEST, (head + 1) * LONGEST) for head in range(4)]
        query.weight[at[PREVIOUS], :LONGEST] = torch.eye(LONGEST)
        key.weight[at[PREVIOUS], :LONGEST] = torch.eye(LONGEST).roll(1, 0)
        query.weight[at[FOLLOWING].start, LONGEST] = 1.0
        key.weight[at[FOLLOWING].start, LONGEST + 1] = 1.0
        query.bias[at[SEPARATOR].start] = 8.0
        key.weight[at[SEPARATOR].start, LONGEST + 3] = 1.0
    return built


def treebank(path: Path, sentences: int = 240) -> Path:
    """ "she" depends on "runs" at any distance to either side; all others depend on "runs" too."""
    draw, lines = random.Random(0), []
    for _ in range(sentences):
        words = ["she", "runs", *draw.choices(FILLERS, k=draw.randint(4, 9))]
        draw.shuffle(words)
        head = words.index("runs") + 1
        for place, word in enumerate(words, 1):
            governor, label = (0, "root") if word == "runs" else (head, "nsubj" if word == "she" else "advmod")
            lines.append("\t".join([str(place), word, *"____", str(governor), label, "_", "_"]))
        lines.append("")
    path.write_text("\n".join(lines) + "\n")
    return path


def pronouns(path: Path, cases: int = 240) -> Path:
    """ "her" is always Ann, before or after Bob, and either may be the nearer one."""
    draw = random.Random(0)
    lines = [
        "\t".join(["ID", "Text", "Pronoun", "Pronoun-offset", "A", "A-offset", "A-coref", "B", "B-offset", "B-coref"])
    ]
    for index in range(cases):
        words = ["ann", "bob", "her", *draw.choices(FILLERS[:-1], k=draw.randint(2, 9))]
        draw.shuffle(words)
        text = " ".join(words)
        first, second = draw.sample(["ann", "bob"], 2)
        at = {word: len(" ".join([*words[: words.index(word)], ""])) for word in ("ann", "bob", "her")}
        cells = [index, text, "her", at["her"]]
        for name in (first, second):
            cells += [name, at[name], str(name == "ann").upper()]
        lines.append("\t".join(map(str, cells)))
    path.write_text("\n".join(lines) + "\n")
    return path
