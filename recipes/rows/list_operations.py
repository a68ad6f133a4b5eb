"""ListOps: what a local window loses on nested lists, and what a floor, relays or a global token win back.

The classifier reads the first token of an encoder trained from scratch. Its window ends long before the list does, in two
layers, so it cannot know the operators of the later parts. Won back is (accuracy - window) / (full - window), of means.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import hf_fullpay
import listops
from hf_fullpay import AttentionPlan, Blocks, Mixture, WindowGlobal
from rows.row import HOLDS, IN_PART, NOT, Figures, Row, Verdict, gain, mean, seeds

OTHERS = ("window + floor", "fullpay_block", "window_global")
WIN_BACK = 0.9
OPERATORS = ("[MAX", "[MIN", "[MED")
SIZES = {
    "quick": {
        "seeds": 2, "steps": 2, "rows": 40, "test": 20, "depth": 2, "arguments": [3, 5], "length": [10, 40], "window": 4,
        "width": 16, "layers": 1, "rate": 3e-3,
    },
    "here": {
        "seeds": 3, "steps": 400, "rows": 8000, "test": 1000, "depth": 2, "arguments": [4, 7], "length": [40, 64],
        "window": 8, "width": 48, "layers": 2, "rate": 3e-3,
    },
    "full": {
        "seeds": 10, "steps": 50000, "rows": 96000, "test": 2000, "depth": 4, "arguments": [2, 8], "length": [500, 2000],
        "window": 64, "width": 512, "layers": 6, "rate": 1e-4,
    },
}  # fmt: skip


def plans(window: int) -> dict[str, AttentionPlan | None]:
    """By label; None for ordinary attention over everything."""
    local = WindowGlobal(window, tokens=())
    return {
        "full": None, "window": AttentionPlan(reach=local),
        "window + floor": AttentionPlan(reach=local, payment=Mixture(floor=None, budget=0.2, pay="visible")),
        "fullpay_block": AttentionPlan(reach=Blocks(window), payment=Mixture(floor=None, budget=0.05)),
        "window_global": AttentionPlan(reach=WindowGlobal(window)),
    }  # fmt: skip


def drawn(number: int, seed: int, values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Token ids, (rows, longest), zero where a row has ended, and labels."""
    rows = listops.rows(
        number, seed, depth=values["depth"], arguments=tuple(values["arguments"]), length=tuple(values["length"]),
        operators=OPERATORS,
    )  # fmt: skip
    known = {word: i for i, word in enumerate(listops.VOCABULARY)}
    ids = torch.zeros(number, values["length"][1] + 1, dtype=torch.long)
    for row, (words, _) in zip(ids, rows, strict=True):
        row[: len(words) + 1] = torch.tensor([known["[CLS]"], *(known[word] for word in words)])
    return ids, torch.tensor([answer for _, answer in rows])


def accuracy(name: str, seed: int, values: dict[str, Any], train: Any, test: Any) -> float:
    """Of a model trained under an attention."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = BertConfig(
        vocab_size=len(listops.VOCABULARY), hidden_size=values["width"], num_hidden_layers=values["layers"],
        num_attention_heads=4, intermediate_size=2 * values["width"], max_position_embeddings=values["length"][1] + 1,
        num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.08,
        attn_implementation=name,
    )  # fmt: skip
    model = BertForSequenceClassification(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), values["rate"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, values["rate"], values["steps"], pct_start=0.1)
    order = torch.Generator().manual_seed(seed)  # the same batches for every attention

    def logits(ids: Tensor) -> Tensor:
        return model(input_ids=ids.to(device), attention_mask=(ids > 0).long().to(device)).logits

    for _ in range(values["steps"]):
        chosen = torch.randint(len(train[0]), (32,), generator=order)
        loss = nn.functional.cross_entropy(logits(train[0][chosen]), train[1][chosen].to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        answers = torch.cat([logits(ids).argmax(-1).cpu() for ids in test[0].split(100)])
    return (answers == test[1]).double().mean().item()


def run(values: dict[str, Any]) -> dict[str, Any]:
    """Accuracy by attention and seed; every seed has lists of its own to train on, all have the same test."""
    test = drawn(values["test"], 10_000, values)
    figures: Figures = {}
    for seed in seeds(values):
        train = drawn(values["rows"], seed, values)
        for number, (label, plan) in enumerate(plans(values["window"]).items()):
            name = "sdpa" if plan is None else f"evidence_lists_{number}"
            if plan is not None:
                hf_fullpay.register(name, plan)
            found = figures.setdefault(label, {}).setdefault("accuracy", [])
            found.append(accuracy(name, seed, values, train, test))
    return {"figures": figures, "against": "window"}


def judge(result: dict[str, Any]) -> Verdict:
    """Who wins back nine tenths of what the window loses, in the mean over seeds."""
    full, window = (mean(result, label, "accuracy") for label in ("full", "window"))
    change, chance = gain(result, "full", "accuracy")
    ours = f"full {full:.3f}, window {window:.3f} (gap {100 * change:.1f} ± {50 * chance:.1f} points)"
    if change <= chance:
        return Verdict(
            NOT, ours, "full attention learned no more than the window here, so there is nothing to win back"
        )
    shares = {label: gain(result, label, "accuracy")[0] / change for label in OTHERS}
    ours += "; won back: " + ", ".join(f"{label} {share:.0%}" for label, share in shares.items())
    good = [label for label, share in shares.items() if share >= WIN_BACK]
    word = HOLDS if len(good) == len(OTHERS) else IN_PART if good else NOT
    missing = [label for label in OTHERS if label not in good]
    return Verdict(word, ours, f"not by {', '.join(missing)}" if missing and good else "")


LISTOPS = Row(
    name="ListOps",
    figure='relays and floors keep "a non-zero path between any two tokens" (F2): they win back 90 % of what a '
    "local window loses",
    measured="accuracy on nested lists whose answer depends on far parts, the first token classified; window, window "
    "with a floor over everything (budget 0.2), blocks with relays, window with one global token, full "
    "attention",
    material="ListOps by recipes/listops.py, equal labels (chance 10 %); BERT of 2 layers, width 48, from scratch",
    rule="holds if all three win back 90 % of the gap in the mean over seeds; in part if one does",
    judge=judge,
    run=run,
    sizes=SIZES,
)
