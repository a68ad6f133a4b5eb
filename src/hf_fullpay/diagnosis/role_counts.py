"""What is counted of a head before it is given a role: where its largest weight goes, and how often that is right.

Everything is counted in two halves of the data (even and odd texts), so that a head can be chosen on the one and judged
on the other: among some hundred heads and fifty relations the best would otherwise be good by luck.

Dimensions: H heads, K questions (a relation in one direction), O offsets, B texts, N pieces, W words, I instances.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_fullpay.diagnosis.coreference import Case
from hf_fullpay.diagnosis.spans import Between, Pieces
from hf_fullpay.diagnosis.treebank import ROOT, Sentence
from hf_fullpay.reference import Rows

TO_GOVERNOR, TO_DEPENDENT = "dependent to governor", "governor to dependent"
LEFT_OUT = ("root", "punct")  # no governor; no choice of a speaker
BASELINES = ("nearest", "first", "longer")


class Sums:
    """Running sums by name and layer, in FP64 on the CPU."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, Tensor]] = defaultdict(dict)

    def add(self, name: str, layer: int, found: Tensor) -> None:
        """Add to a sum."""
        found = found.double().cpu()
        self._sums[name][layer] = self._sums[name].get(layer, 0.0) + found

    def __getitem__(self, name: str) -> list[Tensor]:
        """A sum, by layer."""
        return [found for _, found in sorted(self._sums[name].items())]


class Places:
    """Offsets of the largest weight, and the weight on marks, over the rows of all pieces that are no marks.

    Sums by layer: `hits` and `counts` (H, O) of rows with their largest weight at an offset, and of rows in which that
    offset exists; `chance` and `rows` (H,) of one over the keys to choose from, and of rows; `marked` and `uniform` (H,)
    of the weight on marks (on the first piece where the tokenizer marks none) and of what uniform attention gives them.
    """

    def __init__(self, farthest: int) -> None:
        self.offsets = list(range(-farthest, farthest + 1))
        self.sums = Sums()

    def add(self, layer: int, texts: Sequence[Pieces], rows: Rows, start: int, stop: int) -> None:
        """Take in the rows of queries start..stop-1."""
        weights, sums = rows.weights, self.sums
        marks = torch.tensor([pieces.marks for pieces in texts], device=weights.device)
        words = rows.paid & ~marks[:, None, None]  # (B, 1 or H, R, N)
        choices = words.sum(-1)
        counted = (choices > 1) & ~marks[:, None, start:stop]
        here = torch.arange(start, stop, device=weights.device)
        steps = torch.tensor(self.offsets, device=weights.device)
        at = here[:, None] + steps  # (R, O)
        inside = (at >= 0) & (at < weights.shape[-1])
        band = words.gather(-1, at.clamp(0, weights.shape[-1] - 1).expand(*words.shape[:2], -1, -1))
        exists = band & inside & counted[..., None]  # (B, 1 or H, R, O)
        offset = weights.masked_fill(~words, -1.0).argmax(-1) - here
        hits = exists & (offset[..., None] == steps)
        heads = weights.shape[1]
        sums.add("hits", layer, hits.sum((0, 2)))
        sums.add("counts", layer, exists.sum((0, 2)).expand(heads, -1))
        sums.add("chance", layer, (counted / choices.clamp_min(1)).sum((0, 2)).expand(heads))
        sums.add("rows", layer, counted.sum((0, 2)).expand(heads))
        first = torch.arange(marks.shape[1], device=marks.device) == 0
        targets = torch.where(marks.any(1, keepdim=True), marks, first)
        seen = rows.paid.sum(-1)
        counted = ~targets[:, None, start:stop] & (seen > 0)
        uniform = (rows.paid & targets[:, None, None]).sum(-1) / seen.clamp_min(1)
        marked = (weights @ targets[:, None, :, None].to(weights.dtype)).squeeze(-1)
        sums.add("marked", layer, (marked * counted).sum((0, 2)))
        sums.add("uniform", layer, (uniform * counted).sum((0, 2)).expand(heads))
        sums.add("others", layer, counted.sum((0, 2)).expand(heads))


class Relations:
    """Edges of gold trees that a head's largest weight finds, and that a fixed offset finds.

    An instance is a word and what it should attend to: its governor, or any of its dependents by one relation. It is
    counted where the head may see that. Sums by layer, by half: `hits`, `counts` (2, H, K), `fixed` (2, H, K, O).
    """

    def __init__(self, sentences: Sequence[Sentence], farthest: int) -> None:
        self.offsets = [step for step in range(-farthest, farthest + 1) if step]
        self.sums = Sums()
        labels = sorted({label for sentence in sentences for label in sentence.relations} - set(LEFT_OUT))
        self.questions = [(label, way) for label in labels for way in (TO_GOVERNOR, TO_DEPENDENT)]
        number = {question: index for index, question in enumerate(self.questions)}
        self._instances = [_instances(sentence, number) for sentence in sentences]

    @property
    def instances(self) -> int:
        """How many there are in the gold trees."""
        return sum(len(questions) for questions, _, _ in self._instances)

    def add(self, layer: int, indices: Sequence[int], between: Between) -> None:
        """Take in the weights between the words of some sentences."""
        best = between.weights.masked_fill(~between.visible, -1.0).argmax(-1)
        device, shape = best.device, (2, best.shape[1], len(self.questions))
        sums = {name: torch.zeros(shape, device=device) for name in ("hits", "counts")}
        sums["fixed"] = torch.zeros(*shape, len(self.offsets), device=device)
        steps = torch.tensor(self.offsets, device=device)
        for row, index in enumerate(indices):
            questions, words, targets = (part.to(device) for part in self._instances[index])
            width = targets.shape[1]
            seen = (between.visible[row][:, words, :width] & targets).any(-1)  # (1 or H, I)
            chosen = best[row][:, words]  # (H, I)
            hits = seen & targets[torch.arange(len(words), device=device), chosen]
            at = words[:, None] + steps
            fixed = targets.gather(1, at.clamp(0, width - 1)) & (at >= 0) & (at < width)  # (I, O)
            counted = {
                "hits": hits, "counts": seen.expand_as(hits),
                "fixed": (seen[..., None] & fixed).expand(*hits.shape, -1),
            }  # fmt: skip
            for name, found in counted.items():
                sums[name][index % 2].index_add_(1, questions, found.float())
        for name, found in sums.items():
            self.sums.add(name, layer, found)


def _instances(sentence: Sentence, number: dict[tuple[str, str], int]) -> tuple[Tensor, Tensor, Tensor]:
    """Questions (I,), words that ask (I,) and what answers them (I, W) bool."""
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    for word, (governor, label) in enumerate(zip(sentence.governors, sentence.relations, strict=True)):
        if governor != ROOT and label not in LEFT_OUT:
            found[number[label, TO_GOVERNOR], word].add(governor)
            found[number[label, TO_DEPENDENT], governor].add(word)
    targets = torch.zeros(len(found), len(sentence.words), dtype=torch.bool)
    for row, answers in enumerate(found.values()):
        targets[row, list(answers)] = True
    keys = torch.tensor(list(found), dtype=torch.long).view(-1, 2)
    return keys[:, 0], keys[:, 1], targets


class Antecedents:
    """Pronouns whose weight to the right candidate is the larger one, and those that a rule gets right.

    A case is counted where the head may see both candidates. Sums by layer, by half: `hits`, `counts` (2, H) and
    `rules` (2, H, 3) in the order of BASELINES: the candidate nearest to the pronoun, the first of the text, and the one
    of more pieces, which uniform weights would choose.
    """

    def __init__(self, cases: Sequence[Case], texts: Sequence[Pieces]) -> None:
        self.sums = Sums()
        self.cases = len(cases)
        self._answers = [case.answer for case in cases]
        self._rules = [_rules(case, pieces) for case, pieces in zip(cases, texts, strict=True)]

    def add(self, layer: int, indices: Sequence[int], between: Between) -> None:
        """Take in the weights between the mentions of some cases."""
        device, heads = between.weights.device, between.weights.shape[1]
        half = torch.tensor([index % 2 for index in indices], device=device)
        answers = torch.tensor([self._answers[index] for index in indices], device=device)
        rules = torch.tensor([self._rules[index] for index in indices], device=device) == answers[:, None]
        first, second = between.weights[:, :, 0, 1:3].unbind(-1)
        right = torch.where(answers[:, None] == 0, first > second, second > first)
        seen = between.visible[:, :, 0, 1:3].all(-1).expand(-1, heads)
        counted = {"hits": seen & right, "counts": seen, "rules": seen[..., None] & rules[:, None]}
        for name, found in counted.items():
            sums = torch.zeros(2, *found.shape[1:], device=device)
            self.sums.add(name, layer, sums.index_add_(0, half, found.float()))


def _rules(case: Case, pieces: Pieces) -> list[int]:
    """Which candidate each baseline chooses."""
    pronoun, *candidates = case.spans
    gaps = [max(pronoun[0] - stop, start - pronoun[1]) for start, stop in candidates]
    sizes = [pieces.owners.count(1), pieces.owners.count(2)]
    return [int(gaps[1] < gaps[0]), int(candidates[1] < candidates[0]), int(sizes[1] > sizes[0])]
