"""What a row of the evidence is: a figure of the sources, what is measured for it, and how the verdict follows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare import mean_and_error

ROOT = Path(__file__).parents[2]
HOLDS, IN_PART, NOT, NOT_MEASURED = "holds", "holds in part", "does not hold", "not measured"
Figures = dict[str, dict[str, list[float]]]  # numbers by seed, by measure, by variant
OWN = "recipes/results/evidence/{name}.json"


@dataclass(frozen=True)
class Verdict:
    """What came out.

    Args:
        word: HOLDS, IN_PART, NOT or NOT_MEASURED.
        ours: our figures, in the order of the source's.
        why: the reason, where the figures do not speak for themselves.
    """

    word: str
    ours: str = ""
    why: str = ""


@dataclass(frozen=True)
class Row:
    """One row.

    Args:
        name: as in the sources' table.
        figure: the source's claim and figures.
        measured: what is measured here.
        material: data and model.
        rule: how the verdict follows from the numbers.
        judge: the rule itself, from the contents of `reads`.
        run: measures, from values to {"figures": ..., "against": ..., and what else there is to say}; None for a row that
            other recipes measure.
        sizes: values by size: "quick" (a look), "here" (what is committed), "full" (for a GPU).
        command: that measures it in full, where that is not this script with --size full.
        reads: files that the verdict is read from, the row's own first.
        needed: how many of them it cannot do without, from the first on.
    """

    name: str
    figure: str
    measured: str
    material: str
    rule: str
    judge: Callable[..., Verdict]
    run: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    command: str = ""
    reads: tuple[str, ...] = ()
    needed: int = 1

    @property
    def files(self) -> tuple[str, ...]:
        """All that it reads."""
        return ((OWN.format(name=self.name),) if self.run is not None else ()) + self.reads

    @property
    def in_full(self) -> str:
        """The command of the full size."""
        return self.command or f"python recipes/evidence.py --run {self.name} --size full"

    def results(self) -> list[Any]:
        """Contents of its files, None for one that is not there."""
        paths = [ROOT / name for name in self.files]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]

    def verdict(self) -> Verdict:
        """Word, figures and reason, from committed results."""
        found = self.results()
        missing = [name for name, content in zip(self.files, found, strict=True) if content is None][: self.needed]
        if any(content is None for content in found[: self.needed]):
            return Verdict(NOT_MEASURED, why=f"no {Path(missing[0]).name} yet")
        return self.judge(*found)


def differences(ours: list[float], theirs: list[float]) -> list[float]:
    """Of what belongs together: the same seed, the same documents."""
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def summary(figures: Figures, against: str) -> dict[str, Any]:
    """Mean and standard error of every figure, and of its paired differences to `against`."""
    found: dict[str, Any] = {}
    for variant, measures in figures.items():
        for measure, numbers in measures.items():
            entry: dict[str, Any] = mean_and_error(numbers)
            theirs = figures.get(against, {}).get(measure)
            if variant != against and theirs is not None:
                apart = differences(numbers, theirs)
                entry["difference"] = mean_and_error(apart) | {"by_seed": apart}
            found.setdefault(variant, {})[measure] = entry
    return found


def mean(result: dict[str, Any], variant: str, measure: str) -> float:
    """Of a result's figures."""
    return result["summary"][variant][measure]["mean"]


def gain(result: dict[str, Any], variant: str, measure: str) -> tuple[float, float]:
    """Paired difference to the baseline and twice its standard error: below that it may be chance."""
    found = result["summary"][variant][measure]["difference"]
    return found["mean"], 2 * (found["error"] if found["error"] is not None else math.inf)


def seeds(values: dict[str, Any]) -> range:
    """Numbers of the seeds."""
    return range(values["seeds"])
