"""Texts as documents of tokens: what decoders are trained on, measured on and asked to continue."""

from __future__ import annotations

import argparse
from typing import Any

from data import add_source_arguments, splits
from packing import Document
from settings import count


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Which texts."""
    add_source_arguments(parser, labels=False)
    parser.add_argument("--words", type=count, nargs=2, metavar=("LOW", "HIGH"), help="documents of so many words only")
    parser.add_argument("--train-rows", type=count, metavar="N", help="at most so many documents")
    parser.add_argument("--test-rows", type=count, metavar="N", help="at most so many documents")


def texts_of(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Texts to train on and held out."""
    found = []
    for split, table in zip(("train", "test"), splits(options.data, options.test), strict=True):
        if options.text_column not in table.columns:
            raise ValueError(
                f"expected the column {options.text_column!r} in {options.data}, got {list(table.columns)}."
            )
        texts = table[options.text_column].dropna().astype(str)
        texts = texts[texts.str.strip() != ""]
        if options.words:
            texts = texts[texts.str.split().str.len().between(*options.words)]
        limit = options.train_rows if split == "train" else options.test_rows
        if texts.empty:
            raise ValueError(f"expected texts in both splits of {options.data}, got an empty {split} split.")
        found.append(texts.sample(min(limit or len(texts), len(texts)), random_state=0).tolist())
    return found[0], found[1]


def marks(tokenizer: Any) -> tuple[int, int]:
    """Tokens that begin and end a document.

    Raises:
        ValueError: if the tokenizer has neither.
    """
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if begin is None and end is None:
        raise ValueError("expected a tokenizer with a token that begins or ends a text (bos or eos), got none.")
    return (end if begin is None else begin), (begin if end is None else end)


def encode(texts: list[str], tokenizer: Any) -> list[Document]:
    """Token ids of every text between its marks."""
    begin, end = marks(tokenizer)
    return [[begin, *ids, end] for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]


def pieces(documents: list[Document], length: int) -> list[Document]:
    """Documents cut to at most `length` tokens, nothing lost but a last piece of one token, which predicts nothing."""
    cut = [document[at : at + length] for document in documents for at in range(0, len(document), length)]
    return [piece for piece in cut if len(piece) > 1]


def held_out(texts: list[str], tokenizer: Any, length: int) -> list[tuple[Document, int]]:
    """The first `length` tokens of every document, and how many bytes of text they stand for.

    Raises:
        ValueError: for a tokenizer that does not say where its tokens come from.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"expected a fast tokenizer, which bits per byte need, got {type(tokenizer).__name__}.")
    found = []
    for text, document in zip(texts, encode(texts, tokenizer), strict=True):
        told = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ends = [end for _, end in told["offset_mapping"][: length - 1]]
        found.append((document[:length], len(text[: max(ends, default=0)].encode())))
    return found
