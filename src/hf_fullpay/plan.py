"""The plan: for every layer a reach, scores and a payment; and the one table of presets.

A name such as "fullpay" is an entry of PRESETS. Registration, tests, benchmarks, the command line and the README's
table iterate over that table, so a new preset is one line there.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hf_fullpay.core.errors import check_count, check_flag, wrong
from hf_fullpay.core.numbers import from_json, is_per_layer, to_json
from hf_fullpay.payment import Clamp, Mixture, Payment, Softmax
from hf_fullpay.reach import Band, Blocks, Chunks, Full, Reach, WindowGlobal, Windows
from hf_fullpay.scores import Bounded, DelayBias, DynamicScale, Plain, Scores

VERSION = 1
VANILLA = "vanilla"
CARRIER = "fullpay_custom"  # the name of a checkpoint whose plan is no preset
ALL = "all"
LENGTHS = (128, 512, 2048)  # at which cards and reports state promises
Layers = str | tuple[int, ...] | tuple[tuple[str, str], ...]  # a table is kept as pairs: hashable, fit for pickling

_KINDS: dict[str, dict[str, Any]] = {
    "reach": {kind.kind: kind for kind in (Full, Band, Blocks, Chunks, WindowGlobal, Windows)},
    "scores": {kind.kind: kind for kind in (Plain, Bounded, DynamicScale, DelayBias)},
    "payment": {kind.kind: kind for kind in (Softmax, Mixture, Clamp)},
}
_LAYERS = '"all", "all_but_last", "from:L", a list of layer numbers, or a table such as {"0-5": "vanilla", "6-": "all"}'


@dataclass(frozen=True)
class AttentionPlan:
    """How the layers of a model pay attention.

    Args:
        reach: which keys a query sees: Full, Band, Blocks, Chunks, WindowGlobal or Windows.
        scores: how logits are made: Plain, Bounded, DynamicScale or DelayBias.
        payment: how weights are made from logits: Softmax, Mixture or Clamp.
        gate: a learned output gate per head (needs `convert`).
        layers: where the plan applies; the other layers stay ordinary ("vanilla"). "all", "all_but_last", "from:6",
            [6, 7, 8] or {"0-5": "vanilla", "6-": "all"} (kept as pairs). Layers are counted from 0 within each stack.

    Raises:
        ValueError: for a bad value, naming the option, what is allowed and what came.
    """

    reach: Reach = field(default_factory=Full)
    scores: Scores = field(default_factory=Plain)
    payment: Payment = field(default_factory=Softmax)
    gate: bool = False
    layers: Layers = ALL

    def __post_init__(self) -> None:
        for option, kinds in _KINDS.items():
            value = getattr(self, option)
            if type(value) not in kinds.values():
                raise wrong(
                    f"AttentionPlan({option}=...)",
                    " or ".join(f"{kind.__name__}(...)" for kind in kinds.values()),
                    value,
                )
        _check_together(self.reach, self.scores, self.payment)
        check_flag("AttentionPlan(gate=...)", self.gate)
        if self.host is not None and not (isinstance(self.reach, Full) and isinstance(self.scores, Plain)):
            raise wrong(
                f"AttentionPlan(payment=Mixture(host={self.host!r}))", "reach=Full() and scores=Plain()", self.describe(),
                "A host computes ordinary attention; leave host out for the rest.",
            )  # fmt: skip
        object.__setattr__(self, "layers", _check_layers(self.layers))

    def __hash__(self) -> int:
        return hash((self.reach, self.scores, self.payment, self.gate, self.layers))

    @property
    def is_vanilla(self) -> bool:
        """Nothing differs from ordinary attention, in any layer."""
        return (self.reach, self.scores, self.payment, self.gate) == (Full(), Plain(), Softmax(), False)

    @property
    def is_learnable(self) -> bool:
        """Whether `convert` makes parameters for this plan."""
        return self.gate or any(getattr(part, "learnable", False) for part in (self.reach, self.scores, self.payment))

    @property
    def host(self) -> str | None:
        """The attention of Transformers that computes the softmax part, if the user chose one."""
        return getattr(self.payment, "host", None)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arguments of a call that this plan reads, such as positions or times."""
        return self.reach.inputs + self.scores.inputs

    def misfit(self, *, cross: bool, causal: bool, image: bool) -> str | None:
        """Why this plan makes no sense for an attention module; arguments as in `Full.misfit`."""
        scores = self.scores.misfit(cross=cross, causal=causal, image=image) if hasattr(self.scores, "misfit") else None
        return self.reach.misfit(cross=cross, causal=causal, image=image) or scores

    def for_layers(self, total: int) -> list[AttentionPlan]:
        """The plan of each of `total` layers: this one (with its own row of a table of bounds), or the ordinary attention.

        Raises:
            ValueError: if the policy names a layer that the model does not have, or leaves one out, or a table of bounds
                is for another number of layers.
        """
        chosen = _chosen(self.layers, total)
        return [self._of_layer(layer, total) if layer in chosen else ORDINARY for layer in range(total)]

    def _of_layer(self, layer: int, total: int) -> AttentionPlan:
        if not isinstance(self.scores, Bounded) or not self.scores.is_per_layer:
            return self
        return dataclasses.replace(self, scores=self.scores.for_layer(layer, total))

    def to_dict(self) -> dict[str, Any]:
        """JSON form; `from_dict` is its exact inverse."""
        parts = {
            option: {"kind": getattr(self, option).kind}
            | {
                f.name: to_json(getattr(getattr(self, option), f.name))
                for f in dataclasses.fields(getattr(self, option))
            }
            for option in _KINDS
        }
        layers = _table(self.layers) or to_json(self.layers)
        return {"version": VERSION, **parts, "gate": self.gate, "layers": layers}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionPlan:
        """Plan from its JSON form.

        Raises:
            ValueError: for anything that `to_dict` of this version would not write.
        """
        if not isinstance(data, Mapping):
            raise wrong("attention plan", "a dict as AttentionPlan.to_dict() writes it", data)
        version = data.get("version", VERSION)
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise wrong("attention plan version", f"a number from 1 to {VERSION}", version)
        if version > VERSION:
            raise wrong(
                "attention plan version", f"at most {VERSION}", version,
                "It was written by a newer hf-fullpay: pip install --upgrade hf-fullpay.",
            )  # fmt: skip
        known = {"version", "gate", "layers", *_KINDS}
        if unknown := set(data) - known:
            raise wrong("attention plan", f"the keys {sorted(known)}", sorted(map(str, unknown)))
        parts = {option: _part(option, data[option]) for option in _KINDS if option in data}
        rest = {key: from_json(data[key]) for key in ("gate", "layers") if key in data}
        if missing := set(_KINDS) - set(parts):
            # A part that got lost must not turn into ordinary attention in silence.
            raise wrong("attention plan", f"the parts {sorted(_KINDS)}", f"no {', '.join(sorted(missing))}")
        return cls(**parts, **rest)

    def promises(self, n: int) -> list[str]:
        """What holds for every row of n visible keys, whatever the inputs, as sentences with numbers."""
        check_count("promises(n)", n)
        found = []
        if isinstance(self.payment, Mixture | Clamp):
            if getattr(self.payment, "signed", False):
                found.append("no floor: a signed mixture may sharpen")
            elif self.payment.learnable:
                found.append("every visible key gets min(floor, budget_h / n), budget_h as learned")
            else:
                least = self.payment.least(n)
                found.append(f"every visible key gets a weight of at least {least:.3g} ({least * n:.3g} of uniform)")
        if isinstance(self.scores, Bounded) and self.scores.bound is not None:
            low, high = self.scores.certificate(n)
            found.append(f"the softmax gives every key in reach at least {low:.3g} and none more than {high:.3g}")
        if isinstance(self.scores, DynamicScale):
            found.append(
                f"scores are multiplied by a gain between 0 and {self.scores.max_scale:g}; their order is kept"
            )
        if isinstance(self.scores, DelayBias):
            found.append("a key one unit of time further out of step loses a factor exp(-beta_h) of its weight")
        if isinstance(self.reach, Band | WindowGlobal | Windows):
            paid_outside = isinstance(self.payment, Mixture) and self.payment.pay == "visible"
            outside = (
                "only the floor comes from outside"
                if paid_outside
                else "nothing comes from outside, in values and gradients"
            )
            found.append(f"the softmax sees {self.reach.sees}; {outside}")
        if isinstance(self.reach, Blocks) or (isinstance(self.reach, Chunks) and self.reach.mixes):
            found.append("every output depends on every visible input; no relay or summary tells of the future")
        return found

    def describe(self) -> str:
        """One line for tables."""
        words = [
            _words(part) for part in (self.reach, self.scores, self.payment) if part not in (Full(), Plain(), Softmax())
        ]
        words += ["gate"] if self.gate else []
        words += [] if self.layers == ALL else [f"layers {_table(self.layers) or self.layers}"]
        return ", ".join(words) or "ordinary attention"


def _check_together(reach: Reach, scores: Scores, payment: Payment) -> None:
    """Refuse choices that have no meaning, or no fast path, together."""
    reason = None
    if isinstance(reach, Blocks | Chunks) and isinstance(payment, Clamp):
        reason = (
            f"{type(reach).__name__} with Mixture or Softmax, since a relay or summary stands for many keys and has no "
        )
        reason += "weight of each to lift to a floor"
    elif isinstance(reach, Chunks) and isinstance(scores, Bounded):
        reason = (
            "Chunks with Plain or DynamicScale scores, since a row of several softmaxes has no one centre and length"
        )
    elif isinstance(reach, Blocks) and isinstance(scores, Bounded) and scores.centre == "median":
        reason = (
            'Blocks with centre="mean" or "none", since a relay knows the mean score of its keys and not each of them'
        )
    elif isinstance(scores, DelayBias) and isinstance(payment, Clamp):
        reason = "DelayBias with Softmax or Mixture (the same floor), since no fast path clamps delayed scores"
    elif isinstance(scores, DelayBias) and not isinstance(reach, Full | Band):
        reason = (
            "DelayBias with Full or Band, since relays have no time of their own and pieces of windows are not told it"
        )
    if reason:
        parts = ", ".join(type(part).__name__ for part in (reach, scores, payment))
        raise wrong("AttentionPlan(...)", reason, parts)


def _words(part: Any) -> str:
    shown = [
        f"{f.name}={_value(getattr(part, f.name))}"
        for f in dataclasses.fields(part)
        if f.name in ("size", "overlap", "floor", "budget", "bound", "centre", "temperature", "max_scale", "beta")
        or getattr(part, f.name) != f.default
    ]
    return f"{type(part).__name__}({', '.join(shown)})"


def _value(value: Any) -> str:
    """A table of numbers by its size, many numbers by their range."""
    if is_per_layer(value):
        return f"{len(value)} x {len(value[0])}"
    many = isinstance(value, tuple) and len(value) > 4 and all(isinstance(entry, float) for entry in value)
    return f"{min(value):.3g} to {max(value):.3g}" if many else repr(value)


def _part(option: str, data: Any) -> Any:
    kinds = _KINDS[option]
    if not isinstance(data, Mapping) or not isinstance(data.get("kind"), str) or data["kind"] not in kinds:
        raise wrong(f"attention plan {option}", f"a dict whose kind is one of {sorted(kinds)}", data)
    kind = kinds[data["kind"]]
    names = {f.name for f in dataclasses.fields(kind)}
    if unknown := set(data) - names - {"kind"}:
        raise wrong(f"attention plan {option} {data['kind']}", f"the options {sorted(names)}", sorted(unknown))
    return kind(**{key: from_json(value) for key, value in data.items() if key != "kind"})


def _check_layers(layers: Any) -> Layers:
    if isinstance(layers, str):
        if layers in (ALL, "all_but_last") or re.fullmatch(r"from:\d{1,6}", layers):
            return layers
    elif isinstance(layers, Mapping):
        if layers and all(
            isinstance(key, str) and re.fullmatch(r"\d{1,6}(-\d{0,6})?", key) and value in (VANILLA, ALL)
            for key, value in layers.items()
        ):
            return tuple(sorted(layers.items()))
    elif isinstance(layers, Sequence) and (table := _table(layers)):
        if len(table) == len(layers):  # else a choice is made twice
            return _check_layers(table)
    elif isinstance(layers, Sequence):
        numbers = tuple(layers)
        if all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers) and len(set(numbers)) == len(
            numbers
        ):
            return numbers
    raise wrong("AttentionPlan(layers=...)", _LAYERS, layers)


def _table(layers: Any) -> dict[str, str]:
    """A table of layers out of its pairs; empty for any other policy."""
    if isinstance(layers, str) or not all(isinstance(entry, tuple | list) and len(entry) == 2 for entry in layers):
        return {}
    return dict(layers)


def _chosen(layers: Layers, total: int) -> set[int]:
    if layers == ALL:
        return set(range(total))
    if layers == "all_but_last":
        return set(range(total - 1))
    if isinstance(layers, str):
        first = int(layers.removeprefix("from:"))
        if first >= total:
            raise wrong("AttentionPlan(layers=...)", f"a first layer below {total}, the number of layers", layers)
        return set(range(first, total))
    if table := _table(layers):
        policy: dict[int, str] = {}
        for key, value in table.items():
            start, dash, last = key.partition("-")
            stop = int(last) + 1 if last else total if dash else int(start) + 1
            span = range(int(start), stop)
            if not span or stop > total or policy.keys() & set(span):
                raise wrong("AttentionPlan(layers=...)", f"ranges within 0-{total - 1} that do not overlap", table)
            policy |= dict.fromkeys(span, value)
        if len(policy) < total:
            raise wrong("AttentionPlan(layers=...)", f"a choice for each of the {total} layers", table)
        return {layer for layer, value in policy.items() if value == ALL}
    numbers: tuple[int, ...] = layers  # type: ignore[assignment]
    if beyond := [layer for layer in numbers if layer >= total]:
        raise wrong("AttentionPlan(layers=...)", f"layer numbers from 0 to {total - 1}", beyond)
    return set(numbers)


ORDINARY = AttentionPlan()

_presets: dict[str, AttentionPlan] = {
    "fullpay": AttentionPlan(payment=Mixture(floor=0.01, budget=0.05)),
    "fullpay_clamp": AttentionPlan(payment=Clamp(floor=0.01, budget=0.05)),
    "fullpay_band": AttentionPlan(reach=Band(128), payment=Mixture(floor=0.01, budget=0.05, pay="visible")),
    "bounded": AttentionPlan(scores=Bounded(bound=2.0, centre="mean", temperature="auto")),
    "bounded_fullpay": AttentionPlan(
        scores=Bounded(bound=2.0, centre="mean", temperature="auto"), payment=Mixture(floor=0.01, budget=0.05)
    ),
    "dynamic_scale": AttentionPlan(scores=DynamicScale(max_scale=2.0)),
    "band_causal": AttentionPlan(reach=Band(128)),
    "delay_aware": AttentionPlan(scores=DelayBias(beta=0.01)),
    "fullpay_block": AttentionPlan(reach=Blocks(128), payment=Mixture(floor=0.01, budget=0.05)),
    "lia": AttentionPlan(reach=Chunks(size=128, overlap=32)),
    "window_global": AttentionPlan(reach=WindowGlobal(size=256)),
    "shifted_window": AttentionPlan(reach=Windows(size=7)),
}
PRESETS: Mapping[str, AttentionPlan] = MappingProxyType(_presets)
BUILT_IN = frozenset(_presets)  # the names that every installation knows


def with_options(plan: AttentionPlan, options: Mapping[str, Any]) -> AttentionPlan:
    """A plan with some options changed: those of the plan itself (gate, layers) or of whichever part has them.

    Raises:
        ValueError: for an option that no part of this plan has, listing those that there are.
    """
    known = {f.name: option for option in _KINDS for f in dataclasses.fields(getattr(plan, option))}
    known |= {"gate": "", "layers": ""}
    changed: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise wrong("plan option", f"one of {sorted(known)} for {plan.describe()}", name)
        part = known[name]
        if part:
            changed[part] = dataclasses.replace(changed.get(part, getattr(plan, part)), **{name: value})
        else:
            changed[name] = value
    return dataclasses.replace(plan, **changed)


def resolve(plan: AttentionPlan | str) -> AttentionPlan:
    """A plan, or the preset of that name.

    Raises:
        ValueError: for an unknown name, listing the known ones.
    """
    if isinstance(plan, AttentionPlan):
        return plan
    if isinstance(plan, str) and plan in PRESETS:
        return PRESETS[plan]
    raise wrong("plan", f"an AttentionPlan or one of the presets {sorted(PRESETS)}", plan)
