"""The loop that the fine-tuning recipes share: Accelerate does the work, this says when to log, save and stop.

Checkpoints are whole or not there (written beside their place and renamed), and hold everything that decides the next
loss: weights, optimiser, schedule, random states, place in the data. So a run that was killed and resumed gives the same
losses as one that was not. Ctrl-C saves before it ends, and says how to go on.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import get_linear_schedule_with_warmup

from hf_fullpay.hf.strengths import no_decay_parameters

KEEP = 2  # checkpoints
INTERRUPTED = 130


class Progress:
    """Where a run is; saved with every checkpoint."""

    def __init__(self) -> None:
        self.step = self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def parameter_groups(model: nn.Module, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Three groups: weights with decay; biases and norms without; the learned numbers of the attention, without decay and
    with a rate of their own, since they are few and far from zero."""
    learned = set(no_decay_parameters(model))
    groups: list[dict[str, Any]] = [
        {"params": [], "lr": values["learning_rate"], "weight_decay": values["weight_decay"]},
        {"params": [], "lr": values["learning_rate"], "weight_decay": 0.0},
        {"params": [], "lr": values["learned_rate"], "weight_decay": 0.0},
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[2 if name in learned else 1 if parameter.ndim < 2 else 0]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def fit(
    accelerator: Accelerator,
    model: nn.Module,
    dataset: Any,
    collate: Callable[[list[Any]], dict[str, Tensor]],
    values: dict[str, Any],
    out: Path,
    *,
    resume: bool = False,
    steps: int | None = None,
    loss_of: Callable[[Any, dict[str, Tensor]], Tensor] | None = None,
    each_step: Callable[[nn.Module, int, int], dict[str, float] | None] | None = None,
) -> nn.Module:
    """Train, and give the prepared model back.

    Args:
        accelerator: decides on devices, processes, precision and accumulation.
        model: to be trained, on any device.
        dataset: rows for `collate`.
        collate: rows to the arguments of a model call.
        values: epochs, batch, learning_rate, learned_rate, weight_decay, warmup, clip, log_every, save_every, seed.
        out: folder for log.jsonl and checkpoints.
        resume: go on from the last checkpoint in `out`.
        steps: end after so many.
        loss_of: loss from the model's output and the batch; the output's own if not given.
        each_step: called before every step with model, step and total; what it returns is logged.

    Raises:
        SystemExit: with status 130 after Ctrl-C, once a checkpoint is written.
        ValueError: for a folder with checkpoints and no `resume`, or nothing to train on.
    """
    if len(dataset) == 0:
        raise ValueError("expected rows to train on, got an empty split.")
    size = values["batch"]
    loader = DataLoader(dataset, batch_size=size, shuffle=True, collate_fn=collate, drop_last=len(dataset) > size)
    optimizer = torch.optim.AdamW(parameter_groups(model, values))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    in_epoch = math.ceil(len(loader) / accelerator.gradient_accumulation_steps)
    total = min(steps or math.inf, in_epoch * values["epochs"])
    # Accelerate steps a schedule once for every process.
    count = accelerator.num_processes
    schedule = accelerator.prepare(
        get_linear_schedule_with_warmup(optimizer, int(values["warmup"] * total) * count, int(total) * count)
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    log = Log(accelerator, out / "log.jsonl")
    checkpoints = Checkpoints(accelerator, out / "checkpoints")
    if (last := checkpoints.last()) is not None:
        if not resume:
            raise ValueError(f"{out}: expected a folder without checkpoints, got {last.name}. Add --resume to go on.")
        accelerator.load_state(str(last))
        accelerator.print(f"resumed at step {progress.step} from {last}")
    log.cut(progress.step)
    model.train()
    bar = tqdm(total=int(total), initial=progress.step, desc="steps", disable=not accelerator.is_main_process)
    start, first, losses = time.perf_counter(), progress.step, []
    with stopping(accelerator) as stopped, bar:
        for epoch in range(progress.epoch, values["epochs"]):
            loader.set_epoch(epoch)
            for batch in skip_first_batches(loader, progress.batch) if progress.batch else loader:
                if progress.step >= total:
                    break
                extra = each_step(model, progress.step, int(total)) if each_step is not None else None
                with accelerator.accumulate(model):
                    output = model(**batch)
                    loss = output.loss if loss_of is None else loss_of(output, batch)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), values["clip"])
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(loss.detach().float())
                progress.batch += 1
                if not accelerator.sync_gradients:
                    continue
                progress.step += 1
                bar.update()
                mean = accelerator.gather(torch.stack(losses).mean()[None]).mean().item()
                losses.clear()
                bar.set_postfix(loss=f"{mean:.3f}")
                log.write(
                    progress.step,
                    {"loss": mean, "learning_rate": schedule.get_last_lr()[0], "epoch": epoch} | (extra or {}),
                )
                if progress.step - first == 5:
                    each = (time.perf_counter() - start) / 5
                    accelerator.print(f"{each:.2f} s a step: about {each * (total - progress.step) / 60:.0f} min to go")
                if stopped():
                    where = checkpoints.save(progress.step)
                    accelerator.print(f"interrupted at step {progress.step}, saved in {where}; go on with --resume")
                    raise SystemExit(INTERRUPTED)
                if progress.step % values["save_every"] == 0 and progress.step < total:
                    checkpoints.save(progress.step)
            progress.epoch, progress.batch = epoch + 1, 0
    accelerator.end_training()
    return model


class Log:
    """One line of JSON a step, for people and programs; trackers get the same."""

    def __init__(self, accelerator: Accelerator, path: Path) -> None:
        self.accelerator, self.path = accelerator, path

    def cut(self, step: int) -> None:
        """Forget what a killed run wrote after its last checkpoint."""
        if self.accelerator.is_main_process and self.path.exists():
            lines = [line for line in self.path.read_text().splitlines() if json.loads(line)["step"] <= step]
            self.path.write_text("".join(line + "\n" for line in lines))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self.accelerator.log(numbers, step=step)
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step} | numbers) + "\n")


class Checkpoints:
    """The last KEEP states of a run, each whole or absent."""

    def __init__(self, accelerator: Accelerator, folder: Path) -> None:
        self.accelerator, self.folder = accelerator, folder

    def last(self) -> Path | None:
        found = self._all()
        return found[-1] if found else None

    def save(self, step: int) -> Path | None:
        """Write one; when that fails (a full disk) the earlier ones stay, and the run goes on."""
        place = self.folder / f"step-{step:08d}"
        scratch = self.folder / f".{place.name}"
        error: OSError | RuntimeError | None = None
        try:
            self.accelerator.save_state(str(scratch))
        except (OSError, RuntimeError) as failure:  # torch turns a full disk into a RuntimeError
            error = failure
        failed = torch.tensor([float(error is not None)], device=self.accelerator.device)
        if self.accelerator.gather(failed).sum() > 0:
            if self.accelerator.is_main_process:
                shutil.rmtree(scratch, ignore_errors=True)
            self.accelerator.print(
                f"step {step} could not be saved ({error}); the last good checkpoint is {self.last()}"
            )
            return self.last()
        if self.accelerator.is_main_process:
            scratch.rename(place)
            for old in self._all()[:-KEEP]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()
        return place

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))


@contextmanager
def stopping(accelerator: Accelerator) -> Iterator[Callable[[], bool]]:
    """Ctrl-C (and a scheduler's SIGTERM) ask the run to stop after its step; a second Ctrl-C stops at once."""

    def ask(number: int, frame: Any) -> None:
        accelerator.set_trigger()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield accelerator.check_trigger
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def save_model(accelerator: Accelerator, model: nn.Module, folder: Path, *others: Any) -> None:
    """The trained model (in whole, also where it was sharded) and its tokenizer or image processor, whole or not at all."""
    state = accelerator.get_state_dict(model)
    inner = accelerator.unwrap_model(model, keep_torch_compile=False)
    scratch = folder.with_name(f".{folder.name}")
    if accelerator.is_main_process:
        shutil.rmtree(scratch, ignore_errors=True)
        inner.save_pretrained(scratch, state_dict=state)
        for other in others:
            other.save_pretrained(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    accelerator.wait_for_everyone()
