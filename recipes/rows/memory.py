"""E3, E11: peak memory of a training step of a whole model, by attention, precision and gradient checkpointing.

Each step runs in a process of its own, after a small one that brings up threads and code; the peak is the high-water mark
of resident memory above what the model, its gradients and the inputs take.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

from rows.row import HOLDS, IN_PART, NOT, OWN, Figures, Row, Verdict, gain, mean, seeds

MEMORY, LONG_TEXTS = (OWN.format(name=name) for name in ("E11", "F6"))
SIZES = {
    "quick": {"seeds": 1, "tokens": 128, "width": 32, "layers": 2, "window": 16, "cases": ["eager", "checkpointing"]},
    "here": {
        "seeds": 2, "tokens": 2048, "width": 128, "layers": 4, "window": 256,
        "cases": ["eager", "block-wise", "window + global", "checkpointing", "bf16"],
    },
    "full": {
        "seeds": 3, "tokens": 8192, "width": 768, "layers": 12, "window": 512,
        "cases": ["eager", "block-wise", "window + global", "checkpointing", "bf16"],
    },
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "eager": {"attention": "eager"},  # the n x n weights of every layer are kept
    "block-wise": {"attention": "sdpa"},
    "window + global": {"attention": "evidence_window"},
    "checkpointing": {"attention": "sdpa", "checkpointing": True},
    "bf16": {"attention": "sdpa", "bf16": True},
}


def peak(case: str, values: dict[str, Any]) -> float:
    """MiB of one training step, in this process, which is to be fresh."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    import hf_fullpay

    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = CASES[case]
    hf_fullpay.register("evidence_window", hf_fullpay.AttentionPlan(reach=hf_fullpay.WindowGlobal(values["window"])))
    config = BertConfig(
        vocab_size=1000, hidden_size=values["width"], num_hidden_layers=values["layers"], num_attention_heads=4,
        intermediate_size=4 * values["width"], max_position_embeddings=values["tokens"], hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation=options["attention"],
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = BertForSequenceClassification(config).train().to(device)
    if options.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def step(tokens: int) -> None:
        ids = torch.randint(0, 1000, (1, tokens), device=device)
        with torch.autocast(device, torch.bfloat16, enabled=options.get("bf16", False)):
            loss = model(input_ids=ids, labels=torch.zeros(1, dtype=torch.long, device=device)).loss
        loss.backward()

    step(min(64, values["tokens"]))  # gradients are there from now on
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(values["tokens"])
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")
    before = _high_water()
    step(values["tokens"])
    return (_high_water() - before) / 1024


def _high_water() -> int:
    """Peak resident memory in KiB since the mark was cleared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def run(values: dict[str, Any]) -> dict[str, Any]:
    """MiB by case; repeated, since pages make single measurements jump."""
    context = multiprocessing.get_context("spawn")
    figures: Figures = {}
    for case in values["cases"]:
        for _ in seeds(values):
            with context.Pool(1) as pool:
                figures.setdefault(case, {}).setdefault("peak (MiB)", []).append(pool.apply(peak, (case, values)))
    return {"figures": figures, "against": "eager"}


def judge(result: dict[str, Any]) -> Verdict:
    """E11: each of the three lowers the peak."""
    name = "peak (MiB)"
    eager, blockwise = mean(result, "eager", name), mean(result, "block-wise", name)
    others = {case: mean(result, case, name) for case in ("checkpointing", "bf16") if case in result["figures"]}
    ours = (
        f"block-wise softmax {blockwise / eager - 1:+.0%} against eager ({eager:.0f} to {blockwise:.0f} MiB); beside it "
        + ", ".join(f"{case} {number / blockwise - 1:+.0%}" for case, number in others.items())
    )
    lower = [blockwise < eager, *(number < blockwise for number in others.values())]
    return Verdict(HOLDS if all(lower) else IN_PART if any(lower) else NOT, ours)


def judge_window(result: dict[str, Any], trained: dict[str, Any]) -> Verdict:
    """E3: quality from F6, memory from E11."""
    name = "peak (MiB)"
    window, eager = mean(result, "window + global", name), mean(result, "eager", name)
    blockwise = mean(result, "block-wise", name)
    less = 1 - window / eager
    ours = f"memory {-less:+.0%} against eager attention, {window / blockwise - 1:+.0%} against block-wise SDPA"
    change, chance = gain(trained, "window", "reviews: accuracy")
    ours = f"accuracy on long reviews {100 * change:+.1f} ± {50 * chance:.1f} points; {ours}"
    kept, saved = change >= -0.012, less >= 0.76
    why = (
        "the saving is against attention that keeps all weights, and grows with length; block-wise softmax has it, too"
    )
    return Verdict(HOLDS if kept and saved else IN_PART if kept or saved else NOT, ours, why)


E11 = Row(
    name="E11",
    figure="memory: block-wise softmax, gradient checkpointing, mixed precision with FP32 softmax (no figure)",
    measured="peak memory of a training step above model, gradients and inputs, each alone: block-wise softmax "
    "against eager, the other two against block-wise",
    material="BERT of 4 layers, width 128, one text of 2,048 tokens",
    rule="holds if each lowers the peak; in part if one does",
    judge=judge,
    run=run,
    sizes=SIZES,
)
E3 = Row(
    name="E3",
    figure="sliding window plus global tokens: -1.2 % quality, -76 % memory",
    measured="peak memory of a training step with a window of 256 and a global first token (E11); accuracy on long "
    "reviews with a window of 64 and a global first token (F6)",
    material="as E11 and F6",
    rule="holds if memory is 76 % under eager attention's and accuracy at most 1.2 points under ordinary attention's; "
    "in part if one of them",
    judge=judge_window,
    command="python recipes/evidence.py --run E11 --size full; python recipes/evidence.py --run F6 --size full",
    reads=(MEMORY, LONG_TEXTS),
    needed=2,
)
