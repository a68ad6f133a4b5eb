"""Roles of attention heads, by published criteria, each against a baseline that needs no attention.

    positional   the largest weight is at one fixed offset in 90 % of rows; beside it, chance
    syntactic    for a relation of gold dependency trees, the largest weight from a word goes to its governor (or from a
                 governor to its dependent) 10 points more often than the best fixed offset finds it
    coreference  of two candidates the pronoun gives more weight to its antecedent, 10 points more often than the best
                 of three rules finds it, and significantly so
    global       half of the weight lies on class, separator or start tokens; beside it, what uniform attention gives

Syntactic heads and those for coreference are chosen on one half of the data and judged by the same line on the other;
their scores and baselines are those of the second half. A head can have several roles.

Sources: positional and syntactic, E. Voita et al., "Analyzing Multi-Head Self-Attention: Specialized Heads Do the Heavy
Lifting, the Rest Can Be Pruned", 2019; word-level weights, all relations and both directions, K. Clark et al., "What
Does BERT Look At? An Analysis of BERT's Attention", 2019, where also the line for global heads is from (over half of
the attention of BERT's middle layers goes to [SEP]). What differs: the two halves, and that class, separator and start
tokens are no candidates for the largest weight, where the tokenizer marks them. For coreference Clark et al. ask among
all words; GAP has gold for two candidates, so the head is asked which of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_fullpay.core.errors import check_count, check_number, wrong
from hf_fullpay.diagnosis.coreference import Case, read_gap
from hf_fullpay.diagnosis.report import Findings, Table
from hf_fullpay.diagnosis.role_counts import BASELINES, Antecedents, Places, Relations, Sums
from hf_fullpay.diagnosis.run import as_found
from hf_fullpay.diagnosis.spans import Between, Pieces, by_length, cut
from hf_fullpay.diagnosis.treebank import Sentence, read_treebank
from hf_fullpay.hf.unwrap import body_of, no_cache, unwrapped
from hf_fullpay.hf.watch import Seen, watch

ROLES = ("positional", "syntactic", "coreference", "global")
COLUMNS = ["layer", "head", "role", "evidence", "score", "baseline"]


@dataclass(frozen=True)
class RoleSettings:
    """The lines that a role asks for.

    Args:
        positional: share of rows with the largest weight at one offset.
        farthest: largest offset that counts as fixed, in pieces (positional) and in words (baseline of relations).
        margin: how far above its baseline a head must be, on either half of the data; 0.1 is 10 points.
        instances: how many instances of a relation each half must have.
        significance: largest p of a one-sided binomial test against the baseline, for coreference.
        marked: mean weight on class, separator or start tokens.
    """

    positional: float = 0.9
    farthest: int = 8
    margin: float = 0.1
    instances: int = 50
    significance: float = 0.01
    marked: float = 0.5

    def __post_init__(self) -> None:
        for name in ("positional", "margin", "significance", "marked"):
            check_number(name, getattr(self, name), low=0, high=1, open_low=True)
        for name in ("farthest", "instances"):
            check_count(name, getattr(self, name))


def head_roles(
    model: nn.Module,
    tokenizer: Any,
    *,
    treebank: str | Path | None = None,
    coreference: str | Path | None = None,
    documents: Sequence[str] | None = None,
    settings: RoleSettings | None = None,
) -> Findings:
    """Find the roles of every head.

    Args:
        model: any Transformers text model whose attention routes, in any mode, on any device. It is left as it was.
        tokenizer: its tokenizer, a fast one.
        treebank: CoNLL-U file of gold trees; without it no head is syntactic.
        coreference: GAP file; without it no head is coreferent.
        documents: texts for positional and global heads; those of `coreference` by default, else of `treebank`.
        settings: the lines that a role asks for.

    Returns:
        Findings: tables "roles" (one row per layer, head, role and, for syntactic heads, relation), "relations" (the best
        head of every relation, whether it passes or not) and "candidates" (the best head for coreference); values
        "positional_heads", "syntactic_heads", "coreference_heads", "global_heads", the share of every layer's heads; notes
        say what was counted and what was left out. Texts longer than the model takes are left out.

    Raises:
        ValueError: without any data, for data in another format, for a slow tokenizer, for a model that takes no text
            or whose attention does not route.
    """
    lines, model = settings or RoleSettings(), unwrapped(model)
    if treebank is None and coreference is None and documents is None:
        raise ValueError("head_roles: expected treebank, coreference or documents, got none of them.")
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise wrong("model", "one that takes text", type(model).__name__)
    sentences = [] if treebank is None else read_treebank(treebank)
    cases = [] if coreference is None else read_gap(coreference)
    if documents is None:
        documents = [case.text for case in cases] or [sentence.text for sentence in sentences]
    findings = Findings()
    run = _Run(body_of(model), tokenizer, findings)
    with as_found(model):
        found = _places(run, documents, lines)
        found += _syntactic(run, sentences, lines) if sentences else []
        found += _coreferent(run, cases, lines) if cases else []
    order = {role: index for index, role in enumerate(ROLES)}
    found.sort(key=lambda row: (row[0], row[1], order[row[2]], -row[4]))
    findings.tables["roles"] = Table("roles of heads", COLUMNS, found)
    asked = {"positional": True, "syntactic": bool(sentences), "coreference": bool(cases), "global": True}
    for role in (role for role in ROLES if asked[role]):
        having = [{row[1] for row in found if row[0] == layer and row[2] == role} for layer in range(len(run.heads))]
        shares = [len(heads) / count for heads, count in zip(having, run.heads, strict=True)]
        findings.values[f"{role}_heads"] = shares
    return findings


class _Run:
    """Texts through a model, one call of attention at a time."""

    def __init__(self, model: nn.Module, tokenizer: Any, findings: Findings) -> None:
        self.model, self.tokenizer, self.findings = model, tokenizer, findings
        self.device = next(model.parameters()).device
        config = getattr(model, "config", None)
        limits = (getattr(config, "max_position_embeddings", None), getattr(tokenizer, "model_max_length", None))
        self.longest = min([limit for limit in limits if limit], default=math.inf)
        self.heads: list[int] = []

    def __call__(self, what: str, texts: Sequence[Pieces], take: Callable[[int, list[int], Seen], None]) -> None:
        """`take(layer, indices of texts, seen)` for every layer and batch."""
        fitting = [index for index, pieces in enumerate(texts) if 0 < len(pieces.ids) <= self.longest]
        left = f"{len(texts) - len(fitting)} of {len(texts)} are empty or longer than {self.longest} tokens"
        if not fitting:
            raise ValueError(f"{what}: expected texts that the model takes, {left}.")
        if len(fitting) < len(texts):
            self.findings.notes.append(f"{what}: {left}, and were left out.")
        for batch in by_length([texts[index] for index in fitting]):
            indices = [fitting[index] for index in batch]
            ids = torch.tensor([texts[index].ids for index in indices], device=self.device)

            def see(seen: Seen, indices: list[int] = indices, length: int = ids.shape[1]) -> None:
                if seen.query.shape[2] != length or seen.key.shape[2] != length:
                    raise wrong("model", "attention from every token to every token", f"{seen.path} with others")
                self.heads += [seen.query.shape[1]] * (seen.index == len(self.heads))
                take(seen.index, indices, seen)

            with watch(self.model, see):
                self.model(input_ids=ids, **no_cache(self.model))


def _between(seen: Seen, texts: Sequence[Pieces], indices: Sequence[int]) -> Between:
    between = Between([texts[index] for index in indices], seen.query.device)
    for start, stop in seen.tiles():
        between.add(seen.rows(start, stop), start, stop)
    return between


def _places(run: _Run, documents: Sequence[str], lines: RoleSettings) -> list[list[Any]]:
    """Positional and global heads."""
    places = Places(lines.farthest)
    texts = [cut(run.tokenizer, text) for text in documents]

    def take(layer: int, indices: list[int], seen: Seen) -> None:
        for start, stop in seen.tiles():
            places.add(layer, [texts[index] for index in indices], seen.rows(start, stop), start, stop)

    run("documents", texts, take)
    sums, found = places.sums, []
    for layer, (hits, counts) in enumerate(zip(sums["hits"], sums["counts"], strict=True)):
        rows, others = sums["rows"][layer].clamp_min(1), sums["others"][layer].clamp_min(1)
        shares, at = (hits / counts.clamp_min(1)).max(-1)
        chance, marked, uniform = (
            sums["chance"][layer] / rows,
            sums["marked"][layer] / others,
            sums["uniform"][layer] / others,
        )
        for head in range(len(shares)):
            if shares[head] >= lines.positional:
                told = f"offset {places.offsets[int(at[head])]:+d}"
                found.append([layer, head, "positional", told, float(shares[head]), float(chance[head])])
            if marked[head] >= lines.marked:
                told = "weight on marks" if any(any(pieces.marks) for pieces in texts) else "weight on the first token"
                found.append([layer, head, "global", told, float(marked[head]), float(uniform[head])])
    run.findings.notes.append(f"Positional and global heads: {len(documents)} texts, {int(sums['rows'][0][0])} rows.")
    return found


def _syntactic(run: _Run, sentences: Sequence[Sentence], lines: RoleSettings) -> list[list[Any]]:
    """Syntactic heads, and the best head of every relation."""
    relations = Relations(sentences, lines.farthest)
    texts = [cut(run.tokenizer, sentence.text, sentence.words) for sentence in sentences]
    run("treebank", texts, lambda layer, indices, seen: relations.add(layer, indices, _between(seen, texts, indices)))
    found: list[list[Any]] = []
    best: dict[int, tuple[float, list[Any]]] = {}
    for layer, (score, base, at, counts) in enumerate(_judged(relations.sums, "fixed")):
        for head, question in (counts.amin(0) >= lines.instances).nonzero().tolist():
            cell = (1, head, question)
            (label, way), count = relations.questions[question], int(counts[cell])
            right, fixed, offset = float(score[cell]), float(base[cell]), f"{relations.offsets[int(at[cell])]:+d}"
            chosen = float(score[0, head, question] - base[0, head, question])
            if question not in best or chosen > best[question][0]:
                best[question] = (chosen, [label, way, layer, head, right, fixed, offset, count])
            if chosen >= lines.margin and right - fixed >= lines.margin:
                told = f"{label}, {way} ({count} instances; baseline: offset {offset})"
                found.append([layer, head, "syntactic", told, right, fixed])
    columns = ["relation", "direction", "layer", "head", "accuracy", "baseline", "offset", "instances"]
    rows = [best[question][1] for question in sorted(best)]
    run.findings.tables["relations"] = Table("best head of every relation", columns, rows)
    seen = torch.cat([counts.sum((0, 2)) for counts in relations.sums["counts"]]).mean()
    run.findings.notes.append(
        f"Syntactic heads: {len(rows)} relations in one direction with {lines.instances} instances in each half; of "
        f"{relations.instances} instances {seen:.0f} were counted for a head, those whose answer it may see."
    )
    return found


def _coreferent(run: _Run, cases: Sequence[Case], lines: RoleSettings) -> list[list[Any]]:
    """Heads that find antecedents, and the best of them."""
    texts = [cut(run.tokenizer, case.text, case.spans) for case in cases]
    antecedents = Antecedents(cases, texts)
    run(
        "coreference",
        texts,
        lambda layer, indices, seen: antecedents.add(layer, indices, _between(seen, texts, indices)),
    )
    found: list[list[Any]] = []
    best: tuple[float, list[Any]] | None = None
    for layer, (score, base, at, counts) in enumerate(_judged(antecedents.sums, "rules")):
        for head in (counts.amin(0) > 0).nonzero().flatten().tolist():
            right, rule, count = float(score[1, head]), float(base[1, head]), int(counts[1, head])
            name, chosen = BASELINES[int(at[1, head])], float(score[0, head] - base[0, head])
            p = binomial_tail(round(right * count), count, rule)
            if best is None or chosen > best[0]:
                best = (chosen, [layer, head, right, rule, name, count, p])
            if chosen >= lines.margin and right - rule >= lines.margin and p <= lines.significance:
                told = f"p = {p:.1e} ({count} cases; baseline: {name} candidate)"
                found.append([layer, head, "coreference", told, right, rule])
    columns = ["layer", "head", "accuracy", "baseline", "rule", "cases", "p"]
    run.findings.tables["candidates"] = Table("best head for coreference", columns, [best[1]] if best else [])
    seen = torch.cat([counts.sum(0) for counts in antecedents.sums["counts"]]).mean()
    run.findings.notes.append(
        f"Coreference: of {antecedents.cases} cases with one right candidate {seen:.0f} were counted for a head, those "
        "whose candidates it may both see."
    )
    return found


def _judged(sums: Sums, baseline: str) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """By layer: accuracy, accuracy of the best baseline on the same instances, which one that is, and their number."""
    for hits, counts, rules in zip(sums["hits"], sums["counts"], sums[baseline], strict=True):
        best, at = rules.max(-1)
        yield hits / counts.clamp_min(1), best / counts.clamp_min(1), at, counts


def binomial_tail(hits: int, count: int, chance: float) -> float:
    """Probability of at least `hits` of `count` where each has the probability `chance`."""
    if not 0 < chance < 1:
        return float(chance >= 1 or hits <= 0)
    logs = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        + k * math.log(chance) + (count - k) * math.log1p(-chance)
        for k in range(max(hits, 0), count + 1)
    ]  # fmt: skip
    return min(1.0, math.fsum(math.exp(log) for log in logs))
