"""Sensitivity: what a plan changes when one layer alone runs it, and from which layer up it can run within a budget.

For each layer l, against the model as it is, over all real positions (padding left out):

    change   |y' - y| / |y| of the output: the last hidden states, or the logits of a model with a head
    kl       KL(softmax y || softmax y'), mean over positions in nats, where the output is logits of one class each
    loss     increase of the task's loss, where there are labels

Every forward pass is compared with one of the same model in which nothing but those layers differs. Cost: 2 L passes over
the inputs for L layers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_fullpay.core.errors import check_number
from hf_fullpay.diagnosis.inputs import Batch, batches_of, real_tokens
from hf_fullpay.diagnosis.losses import Loss, labelled
from hf_fullpay.diagnosis.report import Curve, Findings, Table
from hf_fullpay.diagnosis.run import as_found
from hf_fullpay.diagnosis.tables import as_text, rich_table
from hf_fullpay.hf.trial import trial
from hf_fullpay.hf.unwrap import no_cache, unwrapped
from hf_fullpay.plan import ALL, AttentionPlan, Layers, resolve

CHUNK = 1 << 22  # numbers of an output that are compared at a time


@dataclass(frozen=True)
class Change:
    """What running the plan in some layers changes; see above. None where it cannot be measured."""

    output: float
    kl: float | None
    loss: float | None


@dataclass(frozen=True)
class Sensitivity:
    """What every layer does not bear.

    Attributes:
        plan: the plan on trial.
        model: class name.
        alone: by layer, that layer alone runs the plan.
        upward: by layer, it and all above it run the plan, up to `last`; above `last` the same as `alone`.
        last: topmost layer that is to run the plan: the one below the last in a classifier.
        loss: of the model as it is, where there are labels.
        budget: how much of `judged` is allowed.
        judged: "loss", "kl" or "output": the first of them that could be measured.
    """

    plan: AttentionPlan
    model: str
    alone: list[Change]
    upward: list[Change]
    last: int
    loss: float | None
    budget: float
    judged: str

    @property
    def first(self) -> int | None:
        """The transition: the lowest layer from which on all up to `last` stay within the budget together, searched from
        the top; None where not even `last` does."""
        found = None
        for layer in reversed(range(self.last + 1)):
            if not self._judge(self.upward[layer]) <= self.budget:  # NaN is no loss that one could bear
                break
            found = layer
        return found

    @property
    def layers(self) -> Layers:
        """The same as a policy for `AttentionPlan(layers=...)`."""
        if self.first is None:
            return ()
        if self.last < len(self.alone) - 1:
            return "all_but_last" if self.first == 0 else tuple(range(self.first, self.last + 1))
        return ALL if self.first == 0 else f"from:{self.first}"

    @property
    def most(self) -> int:
        """The most sensitive layer."""
        return max(range(len(self.alone)), key=lambda layer: self._judge(self.alone[layer]))

    def suggestion(self) -> AttentionPlan:
        """The plan in the layers that bear it.

        Raises:
            ValueError: if none does.
        """
        if self.first is None:
            least = self._judge(self.upward[self.last])
            raise ValueError(
                f"{self.model}: expected a layer that changes {_WORDS[self.judged]} by at most {self.budget:g}, got "
                f"{least:.3g} from layer {self.last} alone. Allow a larger budget, or a plan that changes less."
            )
        return replace(self.plan, layers=self.layers)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with the transition and the policy."""
        policy = replace(self.plan, layers=self.layers).to_dict()["layers"]
        return asdict(self) | {"plan": self.plan.to_dict(), "first": self.first, "layers": policy}

    def findings(self) -> Findings:
        """A table and a curve for a report."""
        kinds = [kind for kind in _WORDS if getattr(self.alone[0], kind) is not None]
        columns = [
            "layer",
            *(f"{kind}, alone" for kind in kinds),
            *(f"{kind}, from here up" for kind in kinds),
            "runs it",
        ]
        run = range(0) if self.first is None else range(self.first, self.last + 1)
        rows = [
            [layer, *(getattr(part, kind) for part in (alone, up) for kind in kinds), "yes" if layer in run else "no"]
            for layer, (alone, up) in enumerate(zip(self.alone, self.upward, strict=True))
        ]
        curve = Curve(
            "What a layer does not bear", "layer", _WORDS[self.judged], [float(layer) for layer in range(len(rows))],
            {
                "this layer alone": [self._judge(change) for change in self.alone],
                "from here up": [self._judge(change) for change in self.upward],
                "budget": [self.budget] * len(rows),
            },
        )  # fmt: skip
        return Findings(
            curves={"sensitivity": curve}, tables={"sensitivity": Table(self._title, columns, rows)}, notes=[self._note]
        )

    def _judge(self, change: Change) -> float:
        found: float = getattr(change, self.judged)
        return found

    @property
    def _title(self) -> str:
        return f"Change of {self.model} under {replace(self.plan, layers=ALL).describe()}"

    @property
    def _note(self) -> str:
        policy = "none" if self.first is None else repr(self.layers)
        return f"Layers that bear it, with {_WORDS[self.judged]} changed by at most {self.budget:g}: {policy}."

    def __rich__(self) -> Any:
        return rich_table(self.findings().tables["sensitivity"], [self._note])

    def __str__(self) -> str:
        return as_text(self)


_WORDS = {"loss": "the loss", "kl": "the distribution (KL in nats)", "output": "the output (relative)"}


def sensitivity(
    model: nn.Module, inputs: Any, plan: AttentionPlan | str = "bounded", *, loss: Loss = None, budget: float = 0.05
) -> Sensitivity:
    """What changes when a layer alone runs a plan, and when all from a layer up do.

    Args:
        model: a Transformers model, stock or converted; it is left as it was.
        inputs: a dict of tensors, the main input as a tensor, or an iterable of such (a DataLoader).
        plan: a plan or a preset's name. Its `layers` have no say; a table of bounds gives each layer its own row.
        loss: None for the model's own loss on the labels that batches hold, if any do; "task" to insist on it; "lm" for
            the next token (labels are the inputs); or a function of the model's output and the batch, a mean over the
            batch's rows.
        budget: what the suggested layers may change together: increase of the loss (nats for a language model or a
            classifier), without labels the KL, and where the output is no distribution its relative change.

    Raises:
        ValueError: for a model that cannot run the plan, no inputs, or labels that are asked for and missing.
    """
    plan = resolve(plan)
    check_number("sensitivity(budget=...)", budget, low=0)
    model = unwrapped(model)
    with as_found(model), trial(model, plan) as tried:
        total = tried.total
        # Only the top layer of a classifier turns its hidden states into a decision.
        last = max(0, total - 2) if "Classification" in type(model).__name__ else total - 1
        ways = {("alone", layer): {layer} for layer in range(total)}
        ways |= {("upward", layer): set(range(layer, last + 1)) for layer in range(last)}
        sums, base = {way: _Sums() for way in ways}, _Loss()
        for batch in batches_of(inputs, model):
            batch, measured = labelled(model, batch, loss)
            real = real_tokens(batch)
            tried.run(())
            before = _call(model, batch)
            base.add(measured(before))
            for way, layers in ways.items():
                tried.run(layers)
                after = _call(model, batch)
                sums[way].add(_output(before), _output(after), real, _is_distribution(model, before), measured(after))
    alone = [sums["alone", layer].change(base) for layer in range(total)]
    upward = [sums["upward", layer].change(base) if layer < last else alone[layer] for layer in range(total)]
    judged = next(kind for kind in _WORDS if getattr(alone[0], kind) is not None)
    return Sensitivity(plan, type(model).__name__, alone, upward, last, base.mean, float(budget), judged)


@dataclass
class _Loss:
    """Mean of a loss over batches, each with its weight."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, measured: tuple[float, float] | None) -> None:
        if measured is not None:
            self.total, self.weight = self.total + measured[0] * measured[1], self.weight + measured[1]

    @property
    def mean(self) -> float | None:
        return self.total / self.weight if self.weight else None


@dataclass
class _Sums:
    """Over all real positions of all batches."""

    moved: float = 0.0
    size: float = 0.0
    kl: float = 0.0
    positions: int = 0
    loss: _Loss = field(default_factory=_Loss)

    def add(
        self, before: Tensor, after: Tensor, real: Tensor | None, distribution: bool, loss: tuple[float, float] | None
    ) -> None:
        """Outputs (B, ..., C) of a batch; (B, N, C) without its padding."""
        self.loss.add(loss)
        padded = real is not None and before.ndim == 3 and before.shape[:2] == real.shape
        pairs = [output[real] if padded else output.flatten(0, -2) for output in (before, after)]
        step = max(1, CHUNK // pairs[0].shape[-1])
        for one, other in zip(*(pair.split(step) for pair in pairs), strict=True):
            one, other = one.double(), other.double()
            self.moved += float((other - one).square().sum())
            self.size += float(one.square().sum())
            if distribution:
                logs = one.log_softmax(-1), other.log_softmax(-1)
                # A logit of minus infinity (a class ruled out) has no weight.
                terms = (logs[0].exp() * (logs[0] - logs[1])).masked_fill(one == -torch.inf, 0)
                self.kl += float(terms.sum())
                self.positions += len(one)

    def change(self, base: _Loss) -> Change:
        return Change(
            (self.moved / self.size) ** 0.5 if self.size else 0.0 if not self.moved else float("inf"),
            max(0.0, self.kl / self.positions) if self.positions else None,
            None if base.mean is None or self.loss.mean is None else self.loss.mean - base.mean,
        )


def _call(model: nn.Module, batch: Batch) -> Any:
    return model(**batch | no_cache(model))


def _output(found: Any) -> Tensor:
    """The logits, or the last hidden states: the first output that has rows."""
    values = found.values() if hasattr(found, "values") else found
    return next(value for value in values if isinstance(value, Tensor) and value.ndim > 1)


def _is_distribution(model: Any, found: Any) -> bool:
    """Whether the output is logits of which one softmax makes probabilities."""
    logits = getattr(found, "logits", None)
    other = getattr(model.config, "problem_type", None) in ("regression", "multi_label_classification")
    return isinstance(logits, Tensor) and logits.ndim > 1 and logits.shape[-1] > 1 and not other
