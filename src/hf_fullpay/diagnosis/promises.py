"""Does a model keep what its attention promises? `check` answers for every layer and head, with the worst number found."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from hf_fullpay.diagnosis.as_found import as_found
from hf_fullpay.diagnosis.inputs import Batch, batches_of
from hf_fullpay.diagnosis.interventions import check_interventions
from hf_fullpay.diagnosis.ledger import Ledger
from hf_fullpay.diagnosis.report import shown
from hf_fullpay.diagnosis.trials import trials_of
from hf_fullpay.diagnosis.watching import check_rows
from hf_fullpay.hf.unwrap import body_of, label_of, unwrapped

NONE = "Ordinary attention promises nothing of its own; checked is what holds for every attention."


@dataclass(frozen=True)
class Kind:
    """What one promise says.

    Args:
        about: in words, with what is measured.
        allowed: the number that a value may reach; a multiple of rounding where it follows the model's type.
        at_least: whether a value must reach it instead of staying under it.
    """

    about: str
    allowed: float
    at_least: bool = False


KINDS = {
    "finite": Kind("no NaN and no infinity: how many", 0),
    "rows": Kind("weights of a row sum to one: distance", 1e-4),
    "order": Kind("a key with a larger score never gets less: by how much, over the largest weight", 1e-5),
    "reach": Kind("no weight outside the reach: largest", 0),
    "gradients": Kind("no gradient from an output to a key or value that it must not see: largest", 0),
    "agreement": Kind("these weights give what the model computed: distance, over the largest output", 1e-4),
    "floor": Kind("every visible key gets min(floor, budget_h / n): smallest weight over that", 0.999, at_least=True),
    "budget": Kind("learned budgets lie inside (0, budget_max]: how far outside", 0),
    "bound": Kind("no compressed score beyond its bound: largest, over the bound", 1 + 1e-5),
    "certificate": Kind("weights stay within what the bound certifies: ratio to its ends", 1 + 1e-4),
    "causal": Kind("what follows changes nothing before it: largest change, over the largest output", 1e-5),
    "padding": Kind("what stands in padding changes nothing: largest change, over the largest output", 1e-5),
    "batch mates": Kind("other documents of a batch change nothing: largest change, over the largest output", 1e-5),
    "alone": Kind("a document alone gives what it gives beside longer ones: distance, over the largest output", 1e-3),
}
# Distances between two ways to compute the same thing grow with the rounding of the model's type.
ROUNDED = {"agreement": 4, "alone": 32}


@dataclass(frozen=True)
class Promise:
    """One promise, and how it went.

    Attributes:
        name: as in the table.
        about: what it says, and what `value` is.
        kept: whether it is kept everywhere.
        value: the worst number; of the first layer that breaks it, if any.
        allowed: what it may be at most, or at least where `at_least`.
        where: layer and head of `value`.
        at_least: whether larger is better.
    """

    name: str
    about: str
    kept: bool
    value: float
    allowed: float
    where: str
    at_least: bool = False


@dataclass(frozen=True)
class Promises:
    """All that was promised.

    Attributes:
        model: class name, and path where known.
        attention: name of the attention.
        plan: what that is, in words.
        promises: in the order of checks.
        notes: what was not checked, and why.
    """

    model: str
    attention: str
    plan: str
    promises: list[Promise]
    notes: list[str] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether every promise is."""
        return all(promise.kept for promise in self.promises)

    @property
    def broken(self) -> list[Promise]:
        """Those that are not."""
        return [promise for promise in self.promises if not promise.kept]

    def to_dict(self) -> dict[str, Any]:
        """JSON form; a value that is not finite becomes None."""
        written = asdict(self) | {"kept": self.kept}
        for promise in written["promises"]:
            promise["value"] = promise["value"] if math.isfinite(promise["value"]) else None
        return written

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1)

    def cells(self) -> Iterator[list[str]]:
        """Lines of the table: promise, what it says, value, allowed, verdict, where."""
        for one in self.promises:
            sign = ">=" if one.at_least else "<="
            yield [
                one.name, one.about, shown(one.value), f"{sign} {shown(one.allowed)}",
                "kept" if one.kept else "BROKEN", one.where,
            ]  # fmt: skip

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        title, notes = f"{self.model}, {self.attention} ({self.plan})", "\n".join(self.notes)
        table = Table(title=Text(title), caption=Text(notes) if notes else None, title_justify="left")
        for name in ("promise", "what it says", "worst", "allowed", "verdict", "where"):
            table.add_column(name, justify="right" if name in ("worst", "allowed") else "left")
        for cells in self.cells():
            style = "green" if cells[4] == "kept" else "bold red"
            table.add_row(*(Text(cell, style=style if place == 4 else "") for place, cell in enumerate(cells)))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = StringIO()
        Console(file=text, width=132, color_system=None, legacy_windows=False).print(self)
        return text.getvalue().rstrip()


def check(model: nn.Module, inputs: Any = None, *, length: int | None = None) -> Promises:
    """Check everything that the attention of a model promises, and leave the model as it was.

    Checked for every layer and head: rows that sum to one, the order of keys, nothing outside the reach in weights and
    gradients, no future in a causal model, padding and batch mates that change nothing, the weights shown against what
    the model computed, NaN; and under a plan its floor, learned budgets, bounds and their certificate.

    Args:
        model: any Transformers model whose attention routes, stock or converted.
        inputs: as in `diagnose`; None for random tokens or pixels made from the config: one token, a few with padding on
            both sides, and as many as `length` or the plan's reach ask for.
        length: tokens of the longest random input.

    Raises:
        ValueError: for attention that cannot be seen, inputs of another kind, or a model for which none can be made up.
    """
    model = unwrapped(model)
    batches = trials_of(model, length) if inputs is None else list(batches_of(inputs, model))
    attention, plan = label_of(model)
    promises, notes = check_promises(body_of(model), batches)
    name = type(model).__name__ + (f" ({model.name_or_path})" if getattr(model, "name_or_path", "") else "")
    return Promises(name, attention, plan, promises, notes)


def check_promises(model: nn.Module, batches: list[Batch]) -> tuple[list[Promise], list[str]]:
    """Every promise that concerns a model, and what was not checked.

    Args:
        model: without its head.
        batches: keyword arguments, on the model's device.
    """
    ledger = Ledger()
    with as_found(model):
        for batch in batches:
            check_rows(model, batch, ledger)
        if ledger.worst["finite"] and not ledger.is_finite:
            ledger.notes.append("Not checked, since NaN and infinity hide it: what changes outputs.")
        else:
            for batch in batches:
                check_interventions(model, batch, ledger)
    if ledger.is_ordinary:
        ledger.notes.append(NONE)
    rounding = torch.finfo(next(model.parameters()).dtype).eps
    promises = [
        _verdict(name, kind, max(kind.allowed, ROUNDED.get(name, 0) * rounding), ledger)
        for name, kind in KINDS.items()
        if ledger.worst[name]
    ]
    return promises, ledger.notes


def _verdict(name: str, kind: Kind, allowed: float, ledger: Ledger) -> Promise:
    """The first layer that breaks a promise, since later ones only hand it on; the worst one where none does."""
    layers = {layer: _badness(values, kind) for layer, values in sorted(ledger.worst[name].items())}
    limit = -allowed if kind.at_least else allowed
    broken = next((layer for layer, values in layers.items() if not (values <= limit).all()), None)
    layer = max(layers, key=lambda layer: float(layers[layer].max())) if broken is None else broken
    head = int(layers[layer].argmax())
    value = float(ledger.worst[name][layer][head])
    where = ledger.block if name == "finite" and ledger.block_first(broken) else f"layer {layer}, head {head}"
    kept = broken is None and not (name == "finite" and ledger.block)
    return Promise(name, kind.about, kept, value, allowed, where, kind.at_least)


def _badness(values: Tensor, kind: Kind) -> Tensor:
    """Larger is worse; NaN is worst."""
    return (-values if kind.at_least else values).nan_to_num(math.inf, posinf=math.inf, neginf=-math.inf)
