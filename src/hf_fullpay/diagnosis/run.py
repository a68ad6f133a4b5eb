"""Ask a model what its attention does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_fullpay.core.errors import check_number, wrong
from hf_fullpay.diagnosis.as_found import as_found
from hf_fullpay.diagnosis.gradients import check_reach
from hf_fullpay.diagnosis.importance import check_heads
from hf_fullpay.diagnosis.inputs import Batch, batches_of, documents_of, real_tokens, size_of, without_labels
from hf_fullpay.diagnosis.leaks import check_leak
from hf_fullpay.diagnosis.measures import CHECKS, MEASURES
from hf_fullpay.diagnosis.positions import check_positions
from hf_fullpay.diagnosis.report import Findings, Report
from hf_fullpay.diagnosis.settings import Settings
from hf_fullpay.diagnosis.sinks import KEPT, check_sinks
from hf_fullpay.diagnosis.spikes import Spikes
from hf_fullpay.diagnosis.stream import Entropy, Pictures, Promise, Range, Scores, Stream, Tile, Weights
from hf_fullpay.hf.blocks import watch_blocks
from hf_fullpay.hf.unwrap import body_of, label_of, no_cache, unwrapped
from hf_fullpay.hf.watch import Seen, watch

STREAMS: dict[str, type[Stream]] = {
    "weights": Weights, "promise": Promise, "entropy": Entropy, "scores": Scores, "range": Range,
}  # fmt: skip
Probe = Callable[[nn.Module, list[Batch], Settings], Findings]
PROBES: dict[str, Probe] = {
    "sinks": check_sinks, "reach": check_reach, "heads": check_heads, "positions": check_positions, "leak": check_leak,
}  # fmt: skip


def diagnose(
    model: nn.Module,
    inputs: Any,
    *,
    checks: Iterable[str] | None = None,
    layers: Sequence[int] | None = None,
    thresholds: Mapping[str, float | None] | None = None,
    settings: Settings | None = None,
    progress: bool = True,
) -> Report:
    """See what the attention of a model does, and whether it keeps what it should.

    Any Transformers model whose attention goes through the attention interface will do, stock or converted, on any device
    and in any type; numbers are FP32. Weights are computed anew from queries and keys, some rows at a time, so no n x n
    matrix is held. The model is left as it was, also when something fails or is interrupted.

    Args:
        model: the model. A wrapper (compiled, distributed, PEFT) is looked through.
        inputs: a dict of tensors as a tokenizer returns it, the main input as a tensor, or an iterable of such, for
            example a DataLoader. `attention_mask` (B, N) says what is padding, which no number counts.
        checks: which checks to run, out of `CHECKS`; None for all.
        layers: numbers of the attention layers to look at, from 0 in the order of their calls; None for all.
        thresholds: limit by measure, in place of the one in `MEASURES`; None takes a limit away.
        settings: what else the checks can be told.
        progress: whether to show a progress bar on the error output.

    Returns:
        A report: print it, or see `Report` for JSON, pandas, Markdown, pictures and a page.

    Raises:
        ValueError: for a model without attention that routes, an unknown check, layer or measure, or inputs of another
            kind or none.
    """
    chosen, limits, settings = _checks(checks), _limits(thresholds), settings or Settings()
    _check_numbers(layers)
    model, start = unwrapped(model), time.perf_counter()
    with as_found(model):
        reading = _Pass(chosen, layers, settings)
        total = len(inputs) if hasattr(inputs, "__len__") and not isinstance(inputs, Mapping | Tensor) else None
        bar = tqdm(
            batches_of(inputs, model), total=total, desc="inputs", unit="batch", disable=not progress, leave=False
        )
        found = reading.run(body_of(model), bar)
        broken = [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
        if "finite" in chosen:
            found.values["nonfinite_weights"] = float(len(broken))
        if broken:
            found.notes.insert(0, f"NaN or infinity among the model's weights, first in {broken[0]}.")
        probes = [name for name in chosen if name in PROBES]
        if probes and (broken or reading.spikes.broken_anywhere):
            found.notes.append(f"Left out, since they need a finite model: {', '.join(probes)}.")
            probes = []
        for name in tqdm(probes, desc="checks", unit="check", disable=not progress, leave=False):
            found.add(_only(PROBES[name](model, reading.kept, settings), layers, len(reading.paths)))
        if any(name != "sinks" for name in probes) and len(reading.kept) > settings.documents:
            few = ", ".join(name for name in probes if name != "sinks")
            found.notes.append(f"Looked at {settings.documents} inputs with most tokens only: {few}.")
    dtype = next(model.parameters()).dtype
    if reading.is_rounded and "error" not in (thresholds or {}):
        limits["error"] = 0.05  # what the model computed is rounded to its type
    attention, plan = label_of(model)
    return Report(
        model=type(model).__name__ + (f" ({model.name_or_path})" if getattr(model, "name_or_path", "") else ""),
        attention=attention, plan=plan, layers=reading.paths,
        data=reading.data | {
            "dtype": str(dtype).removeprefix("torch."), "device": str(next(model.parameters()).device),
            "seconds": round(time.perf_counter() - start, 2), "torch": torch.__version__,
        },
        findings=found, limits=limits,
    )  # fmt: skip


class _Pass:
    """One pass over all inputs, with everything that listens to it."""

    def __init__(self, checks: Sequence[str], layers: Sequence[int] | None, settings: Settings) -> None:
        self.checks, self.layers = checks, layers
        self.streams = [STREAMS[name](settings) for name in checks if name in STREAMS]
        if "weights" in checks:
            self.streams.append(Pictures(settings))
        self.spikes = Spikes()
        self.real: Tensor | None = None
        self.paths: list[str] = []
        self.kept: list[Batch] = []
        self.is_rounded = False  # whether the model computes in half precision, of its own or under autocast
        self.data: dict[str, Any] = {"documents": 0, "tokens": 0, "longest": 0}

    def run(self, model: nn.Module, batches: Iterable[Batch]) -> Findings:
        """Run the model on every batch.

        Raises:
            ValueError: for a layer that the model does not have.
        """
        for number, batch in enumerate(batches):
            self.real = real_tokens(batch)
            given = without_labels(batch, model)
            with watch(model, self._see), watch_blocks(model, leave=self._leave):
                model(**given, **no_cache(model))
            if number == 0:
                self._check_layers()
            documents, tokens = size_of(batch)
            self.data["documents"] += documents
            self.data["tokens"] += tokens
            if len(self.kept) < KEPT:
                self.kept += list(documents_of(batch | given))[: KEPT - len(self.kept)]
        found = Findings()
        for stream in self.streams:
            found.add(stream.findings(len(self.paths)))
        found.add(self.spikes.findings(self.checks))
        return found

    def _see(self, seen: Seen) -> None:
        if seen.index == len(self.paths):
            again = sum(path.split(" ")[0] == seen.path for path in self.paths)
            self.paths.append(f"{seen.path} (call {again + 1})" if again else seen.path)
        self.is_rounded |= seen.output.dtype in (torch.bfloat16, torch.float16)
        queries = seen.query.shape[2]
        self.data["longest"] = max(self.data["longest"], queries)
        if self.layers is not None and seen.index not in self.layers:
            return
        real = self.real if self.real is not None and self.real.shape[1] == queries else None
        for start, stop in seen.tiles() if self.streams else ():
            tile = Tile(seen, seen.rows(start, stop), start, stop, real)
            for stream in self.streams:
                stream.take(tile)

    def _leave(self, index: int, hidden: Tensor) -> None:
        self.spikes.take(index, hidden, self.real)

    def _check_layers(self) -> None:
        beyond = [layer for layer in self.layers or () if layer >= len(self.paths)]
        if beyond:
            raise wrong("layers", f"numbers from 0 to {len(self.paths) - 1}", beyond)


def _checks(checks: Iterable[str] | None) -> list[str]:
    known = [name for name in CHECKS if name in STREAMS or name in PROBES or name in ("spikes", "finite")]
    if checks is None:
        return known
    if isinstance(checks, str):
        checks = [checks]
    if not isinstance(checks, Iterable):
        raise wrong("checks", f"names out of {known}", checks)
    chosen = list(checks)
    if not chosen:
        raise wrong("checks", f"names out of {known}, or None for all", chosen)
    if unknown := [name for name in chosen if name not in known]:
        raise wrong("checks", f"names out of {known}", unknown)
    return chosen


def _limits(thresholds: Mapping[str, float | None] | None) -> dict[str, float]:
    if thresholds is not None and not isinstance(thresholds, Mapping):
        raise wrong("thresholds", "a dict of limits by measure", thresholds)
    limits = {name: measure.limit for name, measure in MEASURES.items()} | dict(thresholds or {})
    ruled = sorted(name for name, measure in MEASURES.items() if measure.better)
    if unknown := sorted(set(limits) - set(ruled) - set(MEASURES)):
        raise wrong("thresholds", f"names out of {ruled}", unknown)
    if aimless := sorted(name for name in thresholds or {} if name not in ruled):
        raise wrong("thresholds", f"names out of {ruled}", aimless, "No side of the others is better.")
    for name, limit in limits.items():
        if limit is not None:
            check_number(f"thresholds[{name!r}]", limit)
    return {name: float(limit) for name, limit in limits.items() if limit is not None}


def _check_numbers(layers: Sequence[int] | None) -> None:
    if layers is not None and (
        not layers or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in layers)
    ):
        raise wrong("layers", "numbers of layers, from 0", layers)


def _only(found: Findings, layers: Sequence[int] | None, total: int) -> Findings:
    """What probes say of the chosen layers; they look at all, since gradients go through all."""
    if layers is None:
        return found
    for name, values in found.values.items():
        if name != "position_decay" and isinstance(values, list) and len(values) == total:  # its two are no layers
            found.values[name] = [
                values[layer] if layer in layers else [math.nan] if isinstance(values[layer], list) else math.nan
                for layer in range(total)
            ]
    return found
