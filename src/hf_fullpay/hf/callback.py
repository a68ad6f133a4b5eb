"""What attention does, logged while a model trains: a callback for Trainer, and a method for loops of one's own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_fullpay.core.errors import check_count, wrong
from hf_fullpay.core.warning import warn
from hf_fullpay.diagnosis.glance import glance
from hf_fullpay.diagnosis.settings import Settings
from hf_fullpay.hf.watch import attention_modules


class DiagnoseCallback(TrainerCallback):
    """Log coverage, entropy, sinks, gradient reach and learned numbers, under names such as "attention/coverage".

        trainer = Trainer(model, args, ..., callbacks=[DiagnoseCallback()])

    They go to `state.log_history` and to everything that `report_to` names, as an entry of their own at every measured
    step. The first documents of the step's first batch are looked at once more, in eval mode, after the optimizer's step;
    no data is loaded for it. The model, its gradients and the random state stay as they were, so a run gives the same
    losses, bit for bit, with and without the callback, also when it resumes.

    Works with gradient accumulation, autocast, adapters, DDP (the first process measures, the others wait for it in their
    next step) and torch.compile (the look itself runs uncompiled). Parameters that are sharded over processes (FSDP,
    DeepSpeed ZeRO-3, tensor parallelism) are refused: one process alone cannot run such a model.

    Args:
        every: steps between two looks; the first step is looked at too.
        rows: query rows of every layer that are looked at, evenly spaced.
        documents: documents of the batch that are looked at.
        batch: a batch of your own to look at instead of the training batch, as keyword arguments of the model, so that
            a curve shows the model change and not its data.
        reach: whether to measure `near_over_far`, which takes a backward pass; None for: unless the model recomputes its
            activations, whose memory that pass would want back.
        settings: what counts as near and far.
        prefix: of the names.

    Raises:
        ValueError: for an option out of range. At the start of training: for attention that does not route, or sharded
            parameters.
    """

    def __init__(
        self,
        every: int = 100,
        rows: int = 8,
        documents: int = 4,
        *,
        batch: Mapping[str, Any] | None = None,
        reach: bool | None = None,
        settings: Settings | None = None,
        prefix: str = "attention/",
    ) -> None:
        for name, value in (("every", every), ("rows", rows), ("documents", documents)):
            check_count(f"DiagnoseCallback({name}=...)", value)
        if batch is not None and not isinstance(batch, Mapping):
            raise wrong("DiagnoseCallback(batch=...)", "keyword arguments of the model", type(batch).__name__)
        self.every, self.rows, self.documents, self.batch = every, rows, documents, batch
        self.wants_reach, self.settings, self.prefix = reach, settings or Settings(), prefix
        self._trainer: Trainer | None = None
        self._captured: dict[str, Any] | None = None
        self._hook: RemovableHandle | None = None

    def measure(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, float]:
        """The numbers now, for a loop of one's own: `accelerator.log(callback.measure(model, batch), step=step)`.

        Args:
            model: also as Accelerate prepared it.
            batch: keyword arguments of the model; its first documents are looked at.

        Raises:
            ValueError: for attention that cannot be seen, or sharded parameters.
        """
        model = extract_model_from_parallel(getattr(model, "_orig_mod", model), keep_torch_compile=False)
        _refuse_sharded(model)
        device = next(model.parameters()).device
        given = {name: _to(value, device) for name, value in _first(batch, self.documents).items()}
        reach = (
            not getattr(model, "is_activation_checkpointing", False) if self.wants_reach is None else self.wants_reach
        )
        found = glance(model, given, rows=self.rows, reach=reach, settings=self.settings)
        return {f"{self.prefix}{name}": number for name, number in found.items()}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer = _calling_trainer()
        model: Any = self._trainer.model
        attention_modules(model)
        _refuse_sharded(model)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._is_due(state, state.global_step + 1) and self.batch is None and self._hook is None:
            outermost: Any = self._trainer.model_wrapped  # type: ignore[union-attr]
            self._hook = outermost.register_forward_pre_hook(self._capture, with_kwargs=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer, batch = self._trainer, self.batch or self._captured
        self._captured = None
        if not self._is_due(state, state.global_step) or batch is None or trainer is None:
            return
        model: Any = trainer.model
        try:
            numbers = self.measure(model, batch)
        except ValueError as error:  # a run of hours is not ended for a picture of it
            warn(f"DiagnoseCallback: nothing is measured in the rest of this run. {error}")
            self._trainer = None
            return
        # As an entry of its own, by the rule that all entries go; subclasses add to theirs what they keep count of.
        should_log = control.should_log
        Trainer.log(trainer, numbers)
        control.should_log = should_log

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer = None

    def _is_due(self, state: TrainerState, step: int) -> bool:
        return self._trainer is not None and state.is_world_process_zero and (step == 1 or step % self.every == 0)

    def _capture(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the model is called with, once, and be gone."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        inner: Any = self._trainer.model if self._trainer is not None else module
        names = inspect.signature(inner.forward).parameters
        self._captured = dict(zip(names, args, strict=False)) | kwargs


def _calling_trainer() -> Trainer:
    """The Trainer whose event this is. Transformers hands a callback everything but the Trainer, and tells trackers first,
    so what a callback adds to `logs` reaches neither them nor the history."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(trainer := frame.f_locals.get("self"), Trainer):
            return trainer
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError(
        "DiagnoseCallback: expected to be called by a Trainer. In a loop of your own use callback.measure(model, batch)."
    )


def _refuse_sharded(model: nn.Module) -> None:
    """Refuse parameters of which this process has a part only."""
    sharded = any(hasattr(p, "ds_id") or hasattr(p, "to_local") for p in model.parameters())
    if sharded or any("FullyShardedDataParallel" in type(module).__name__ for module in model.modules()):
        raise ValueError(
            "DiagnoseCallback: expected whole parameters in the first process, got sharded ones (FSDP, DeepSpeed ZeRO-3 "
            "or tensor parallelism). Measure a saved checkpoint with hf_fullpay.diagnose instead."
        )


def _first(batch: Mapping[str, Any], documents: int) -> dict[str, Any]:
    """The first documents of a batch; the whole batch where its tensors do not share their first dimension."""
    sizes = {value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.ndim}
    if len(sizes) != 1:
        return dict(batch)
    return {
        name: value[:documents] if isinstance(value, Tensor) and value.ndim else value for name, value in batch.items()
    }


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
