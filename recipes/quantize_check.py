"""What 8 bits cost a checkpoint, before and after its logits were bounded.

    python recipes/quantize_check.py --out int8.json --before runs/plain/model --after runs/bounded/model
    python recipes/quantize_check.py --out int8.json --before a-1/model a-2/model --after b-1/model b-2/model       two seeds
    python recipes/quantize_check.py --out int8.json --before minilm                            an encoder's embeddings

Weights and inputs of every linear layer become 8-bit integers, one scale for a whole tensor, from its smallest to its
largest number; so one outlier takes the others' precision. Attention itself, norms and embeddings stay as they are.

    fake      in FP32, rounded to the 256 values that the integers stand for: weights symmetric; inputs from the range that
              --calibrate-rows of the training split have, so what lies beyond it later is cut off. Runs everywhere.
    torchao   true integers (pip install --no-deps torchao): weights and inputs symmetric, the inputs' scale taken anew in
              every call.

By the checkpoint: a classifier's accuracy and loss on held-out rows, a language model's perplexity, an encoder's
embeddings (the mean over tokens); and how far the logits or embeddings move. With several checkpoints, paired by place
(one for each seed): mean and standard error of after - before. Beside them the largest logit, hidden state and input of
a linear layer.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from transformers.pytorch_utils import Conv1D

from data import add_source_arguments, checkpoint, splits
from extremes import extremes
from finetune_text import KEEP, encode, label_ids, length_of
from hf_fullpay.hf.unwrap import label_of, no_cache
from origin import provenance
from settings import count, folder, refusing

BACKENDS = ("fake", "torchao")
BATCH = 16
KINDS: dict[str, Any] = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForCausalLM": AutoModelForCausalLM,
    "LMHeadModel": AutoModelForCausalLM,
}


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """By path, also GPT-2's own kind."""
    return {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}


@contextmanager
def ranges(model: nn.Module) -> Iterator[dict[str, tuple[float, float]]]:
    """Smallest and largest input of every linear layer in the calls inside the context."""
    found: dict[str, tuple[float, float]] = {}

    def see(path: str, given: Tensor) -> None:
        low, high = found.get(path, (math.inf, -math.inf))
        found[path] = (min(low, float(given.min())), max(high, float(given.max())))

    handles = [
        module.register_forward_pre_hook(lambda _, given, path=path: see(path, given[0]))
        for path, module in linear_layers(model).items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def rounded(x: Tensor, low: float, high: float) -> Tensor:
    """The nearest of 256 values between low and high (and zero among them, as integers have it)."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255 or 1.0
    return torch.fake_quantize_per_tensor_affine(x, scale, round(-low / scale), 0, 255)


def fake(model: nn.Module, found: dict[str, tuple[float, float]]) -> nn.Module:
    """A copy in which linear layers compute with the values that 8-bit integers stand for."""
    model = copy.deepcopy(model)
    for path, module in linear_layers(model).items():
        weight: Tensor = module.weight  # type: ignore[assignment]
        scale = float(weight.detach().abs().max()) / 127 or 1.0
        weight.data = (weight.data / scale).round() * scale
        if path in found:  # else nothing passes through it
            module.register_forward_pre_hook(lambda _, x, ends=found[path]: (rounded(x[0], *ends), *x[1:]))
    return model


def with_torchao(model: nn.Module) -> nn.Module:
    """A copy in which linear layers compute with 8-bit integers.

    Raises:
        ValueError: for a model whose layers torchao does not know.
    """
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, PerTensor, quantize_

    if any(isinstance(module, Conv1D) for module in model.modules()):
        raise ValueError(
            "--backend: expected a model of nn.Linear layers, got Conv1D, which torchao leaves. --backend fake."
        )
    model = copy.deepcopy(model)
    quantize_(model, Int8DynamicActivationInt8WeightConfig(granularity=PerTensor(), set_inductor_config=False))
    return model


@torch.no_grad()
def answers(model: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor | None]:
    """What comes out: logits (rows, labels), embeddings (rows, width), or losses of single tokens (tokens, 1); and the
    labels of the rows, where there are some."""
    outputs, labels = [], []
    for batch in batches:
        given = {name: tensor for name, tensor in batch.items() if name != "labels"}
        found = model(**given, **no_cache(model))
        if not hasattr(found, "logits"):
            mask = given["attention_mask"][..., None]
            outputs.append((found.last_hidden_state * mask).sum(1) / mask.sum(1))
        elif found.logits.ndim == 2:
            outputs.append(found.logits.float())
            labels.append(batch["labels"])
        else:
            real = given["attention_mask"][:, 1:].bool() & given["attention_mask"][:, :-1].bool()
            logits, ids = found.logits[:, :-1][real].float(), given["input_ids"][:, 1:][real]
            outputs.append(nn.functional.cross_entropy(logits, ids, reduction="none")[:, None])
    return torch.cat(outputs), torch.cat(labels) if labels else None


def quality(outputs: Tensor, labels: Tensor | None) -> dict[str, float]:
    if labels is not None:
        return {
            "accuracy": float((outputs.argmax(-1) == labels).double().mean()),
            "loss": float(nn.functional.cross_entropy(outputs, labels)),
        }
    return {"perplexity": math.exp(float(outputs.double().mean()))} if outputs.shape[1] == 1 else {}


def moved(outputs: Tensor, others: Tensor, labels: Tensor | None) -> dict[str, float]:
    """How far 8 bits move the outputs: relative distance, mean cosine of rows, and decisions that change."""
    found = {"distance": float((others - outputs).norm() / outputs.norm())}
    if outputs.shape[1] > 1:
        found["cosine"] = float(nn.functional.cosine_similarity(outputs, others).mean())
    if labels is not None:
        found["decisions_changed"] = float((outputs.argmax(-1) != others.argmax(-1)).double().mean())
    return found


def check(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """One checkpoint.

    Raises:
        ValueError, OSError: for a checkpoint that is not there, or data that do not fit it.
    """
    place = checkpoint(name)[0]
    config, tokenizer = AutoConfig.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    architecture = (config.architectures or [""])[0]
    kind = next((kind for ending, kind in KINDS.items() if architecture.endswith(ending)), AutoModel)
    model = kind.from_pretrained(place, dtype=torch.float32).eval()
    length = length_of(options.length, config, tokenizer)
    train, test = splits(options.data, options.test)
    limits = (options.calibrate_rows, options.test_rows)
    batches = []
    for table, limit in zip((train, test), limits, strict=True):
        if missing := {options.text_column, options.label_column} - set(table.columns):
            raise ValueError(f"expected the columns {sorted(missing)} in {options.data}, got {list(table.columns)}.")
        some = table.sample(min(limit or len(table), len(table)), random_state=0)
        documents = encode(some[options.text_column].tolist(), tokenizer, length, options.keep)
        found = [str(label) for label in some[options.label_column]]
        known = label_ids(found, config) if kind is AutoModelForSequenceClassification else dict.fromkeys(found, 0)
        batches.append([
            {**tokenizer.pad({"input_ids": documents[i : i + BATCH]}, return_tensors="pt"),
             "labels": torch.tensor([known[label] for label in found[i : i + BATCH]])}
            for i in range(0, len(documents), BATCH)
        ])  # fmt: skip
    calibration, held_out = batches
    with ranges(model) as inputs:
        answers(model, calibration)
    eight = fake(model, inputs) if options.backend == "fake" else with_torchao(model)
    (outputs, labels), (others, _) = answers(model, held_out), answers(eight, held_out)
    fp32, int8 = quality(outputs, labels), quality(others, labels)
    return {
        "model": name, "attention": label_of(model)[1],
        "fp32": fp32, "int8": int8, "gap": {what: int8[what] - fp32[what] for what in fp32},
        "moved": moved(outputs, others, labels), "largest": extremes(model, calibration),
        "largest_input": max(max(-low, high) for low, high in inputs.values()),
        "ranges": {path: [round(end, 3) for end in ends] for path, ends in inputs.items()},
    }  # fmt: skip


def figures(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row that differences are taken of."""
    named = {f"{part}.{what}": value for part in ("fp32", "int8", "gap", "moved") for what, value in row[part].items()}
    largest = {f"largest.{what}": row["largest"][what] for what in ("logit", "score", "hidden")}
    return named | largest | {"largest_input": row["largest_input"]}


def over_seeds(numbers: list[float]) -> dict[str, float | None]:
    error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
    return {"mean": statistics.mean(numbers), "error": error}


def summary(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard error over seeds, and of the paired differences."""
    olds, news = [figures(row) for row in before], [figures(row) for row in after]
    found = {}
    for name in olds[0]:
        old = [row[name] for row in olds]
        found[name] = {"before": over_seeds(old)}
        if news:
            new = [row[name] for row in news]
            found[name] |= {
                "after": over_seeds(new),
                "difference": over_seeds([b - a for a, b in zip(old, new, strict=True)]),
            }
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", nargs="+", required=True, metavar="MODEL", help="Hub ids or folders")
    parser.add_argument("--after", nargs="+", default=[], metavar="MODEL", help="as many, in the same order")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file for the results")
    parser.add_argument("--backend", choices=BACKENDS, help="torchao where it is installed, else fake")
    add_source_arguments(parser)
    parser.add_argument("--calibrate-rows", type=count, default=64, metavar="N", help="for the ranges of inputs (64)")
    parser.add_argument("--test-rows", type=count, default=600, metavar="N", help="held-out rows (600)")
    parser.add_argument("--length", type=count, metavar="TOKENS", help="longest document (the model's positions)")
    parser.add_argument("--keep", choices=KEEP, default="tail", help="which part of a longer one (tail)")
    options = parser.parse_args(arguments)
    if options.after and len(options.after) != len(options.before):
        parser.error(f"--after: expected as many as --before ({len(options.before)}), got {len(options.after)}.")
    if options.backend == "torchao" and find_spec("torchao") is None:
        parser.error("--backend: expected fake, or the package torchao, got none. pip install --no-deps torchao")
    folder(parser, options.out.parent)
    options.backend = options.backend or ("torchao" if find_spec("torchao") else "fake")
    print(f"8 bits by {options.backend}" + ("" if options.backend == "torchao" else ", in FP32: values, not speed"))
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    origin, cpu = provenance(("torchao",) if options.backend == "torchao" else ()), time.process_time()
    rows: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    with refusing(parser):
        for side, found in rows.items():
            for name in getattr(options, side):
                found.append(check(options, name))
                print(side, name, json.dumps({k: round(v, 4) for k, v in figures(found[-1]).items()}))
        if len({frozenset(figures(row)) for found in rows.values() for row in found}) > 1:
            raise ValueError("--after: expected checkpoints of the same kind as --before.")
    told = summary(rows["before"], rows["after"])
    setting = {name: getattr(options, name) for name in ("backend", "data", "length", "calibrate_rows", "test_rows")}
    written = {
        "provenance": origin,
        "setting": setting,
        "summary": told,
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }
    options.out.write_text(json.dumps(written | rows, indent=2) + "\n")
    for name, sides in told.items():
        print(f"{name:<26}" + "  ".join(f"{side} {shown(value)}" for side, value in sides.items()))
    return 0


def shown(value: dict[str, float | None]) -> str:
    return f"{value['mean']:.4f}" + ("" if value["error"] is None else f" +- {value['error']:.4f}")


if __name__ == "__main__":
    raise SystemExit(main())
