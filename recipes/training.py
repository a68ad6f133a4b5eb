"""The loop that the fine-tuning recipes share: Accelerate does the work, this says when to log, save and stop.

Checkpoints are whole or not there (written beside their place and renamed), and hold everything that decides the next
loss: weights, optimiser, schedule, random states, place in the data. So a run that was killed and resumed gives the same
losses as one that was not. Ctrl-C saves before it ends, and says how to go on.
"""

from __future__ import annotations

import copy
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
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import DataLoader, Sampler
from tqdm.auto import tqdm
from transformers import get_linear_schedule_with_warmup

from hf_fullpay.hf.strengths import no_decay_parameters

KEEP = 2  # checkpoints
INTERRUPTED = 130
# What a full disk looks like: torch, safetensors and sharded checkpoints each have their own way.
FAILURES = (OSError, RuntimeError, SafetensorError, CheckpointException)


class Progress:
    """Where a run is; saved with every checkpoint."""

    def __init__(self) -> None:
        self.step = self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


class Order(Sampler[int]):
    """Rows of an epoch, in an order that seed and epoch alone decide, from any place on.

    (Accelerate's own sampler is pickled into every checkpoint, with the whole data set in it.)
    """

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.seed, self.epoch, self.done = rows, seed, 0, 0

    def __iter__(self) -> Iterator[int]:
        # Far apart, so that no epoch of one seed is that of another; PyTorch's generator takes 32 bits.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**32)
        yield from torch.randperm(self.rows, generator=generator)[self.done :].tolist()

    def __len__(self) -> int:
        return self.rows - self.done


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
        dataset: rows for `collate`, by number.
        collate: rows to the arguments of a model call. It draws nothing at random: it runs a batch ahead of the training,
            which a resumed run could not repeat.
        values: epochs, batch (of a process), learning_rate, learned_rate, weight_decay, warmup (part of all steps), clip,
            save_every, seed.
        out: folder for log.jsonl and checkpoints.
        resume: go on from the last checkpoint in `out`, if there is one.
        steps: end after so many.
        loss_of: mean loss of the batch from the model's output and the batch; the output's own if not given.
        each_step: called before every step with the prepared model, the steps done and their total; what it returns is
            logged.

    Raises:
        SystemExit: with status 130 after Ctrl-C, once a checkpoint is written.
        ValueError: for a folder with checkpoints and no `resume`, or nothing to train on.
    """
    size, processes = values["batch"], accelerator.num_processes
    if len(dataset) == 0:
        raise ValueError("expected rows to train on, got an empty split.")
    last = start_of(out, resume)
    set_seed(values["seed"], device_specific=True)  # dropout differs between processes
    order = Order(len(dataset), values["seed"])
    # A generator of its own: otherwise every new pass over the data would draw from the one that dropout uses.
    loader = DataLoader(
        dataset, size, sampler=order, collate_fn=collate, drop_last=len(order) >= size * processes,
        generator=torch.Generator(),
    )  # fmt: skip
    name_layers(accelerator, model)
    optimizer = torch.optim.AdamW(parameter_groups(model, values))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    in_epoch = math.ceil(len(loader) / accelerator.gradient_accumulation_steps)
    total = min(steps or in_epoch * values["epochs"], in_epoch * values["epochs"])
    # Accelerate steps a schedule once for every process.
    schedule = accelerator.prepare(
        get_linear_schedule_with_warmup(optimizer, int(values["warmup"] * total) * processes, total * processes)
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    log = Log(accelerator, out / "log.jsonl")
    checkpoints = Checkpoints(accelerator, out)
    if last is not None:
        accelerator.load_state(str(last))
        accelerator.print(f"resumed at step {progress.step} from {last}")
    elif resume:
        accelerator.print(f"no checkpoint in {out} yet: starting at the beginning")
    log.cut(progress.step)
    model.train()
    bar = tqdm(total=total, initial=progress.step, desc="steps", disable=not accelerator.is_main_process)
    start, first, losses = time.perf_counter(), progress.step, []
    extra: dict[str, float] | None = None
    with stopping(accelerator) as stopped, bar:
        while progress.step < total:
            order.epoch, order.done = progress.epoch, progress.batch * size * processes
            for batch in loader:
                if each_step is not None and not losses:
                    extra = each_step(model, progress.step, total)
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
                numbers = {"loss": mean, "learning_rate": schedule.get_last_lr()[0], "epoch": progress.epoch}
                log.write(progress.step, numbers | (extra or {}))
                if progress.step - first == 5:
                    each = (time.perf_counter() - start) / 5
                    accelerator.print(f"{each:.2f} s a step: about {each * (total - progress.step) / 60:.0f} min to go")
                if stopped():
                    where = checkpoints.save(progress.step)
                    accelerator.print(f"interrupted at step {progress.step}, saved in {where}; go on with --resume")
                    raise SystemExit(INTERRUPTED)
                if progress.step == total:
                    break
                if progress.step % values["save_every"] == 0:
                    checkpoints.save(progress.step)
            progress.epoch, progress.batch = progress.epoch + 1, 0
    return model


def name_layers(accelerator: Accelerator, model: Any) -> None:
    """Which modules FSDP2 shards one by one, unless the user says it: those that the model calls unsplittable, but for
    what holds the input embeddings. Accelerate shards these by themselves, and would fail over BERT, where both hold."""
    if not accelerator.is_fsdp2 or accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap:
        return
    embeddings, names = model.get_input_embeddings(), set(model._no_split_modules or ())
    holders = {type(module).__name__ for module in model.modules() if embeddings in module.children()}
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(names - holders)


def start_of(out: Path, resume: bool) -> Path | None:
    """The checkpoint that a run starts from.

    Raises:
        ValueError: if there is one and it was not asked for: another run's work is not to be lost.
    """
    last = max((out / "checkpoints").glob("step-*"), default=None)
    if last is not None and not resume:
        raise ValueError(f"{out}: expected a folder without checkpoints, got {last.name}. Add --resume to go on.")
    return last


class Log:
    """One line of JSON a step, for people and programs; trackers get the same."""

    def __init__(self, accelerator: Accelerator, path: Path) -> None:
        self.accelerator, self.path = accelerator, path

    def cut(self, step: int) -> None:
        """Forget what a killed run wrote after its last checkpoint, down to half a line."""
        if self.accelerator.is_main_process and self.path.exists():
            lines = [line for line in self.path.read_text().splitlines() if 0 < _step(line) <= step]
            scratch = self.path.with_name(f".{self.path.name}")
            scratch.write_text("".join(line + "\n" for line in lines))
            scratch.replace(self.path)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self.accelerator.log(numbers, step=step)
        if self.accelerator.is_main_process:
            try:
                with self.path.open("a") as file:
                    file.write(json.dumps({"step": step} | numbers) + "\n")
            except OSError as error:  # a full disk
                self.accelerator.print(f"step {step} is missing in {self.path}: {error}")


def _step(line: str) -> int:
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return 0


class Checkpoints:
    """The last KEEP states of a run in `out`/checkpoints, each whole or absent."""

    def __init__(self, accelerator: Accelerator, out: Path) -> None:
        self.accelerator, self.out = accelerator, out

    def save(self, step: int) -> Path | None:
        """Write one and give the last good one back; when that fails (a full disk) the earlier ones stay."""
        place = self.out / "checkpoints" / f"step-{step:08d}"
        scratch = place.with_name(f".{place.name}")
        if self.accelerator.is_main_process:
            shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed while saving
        self.accelerator.wait_for_everyone()
        error: BaseException | None = None
        try:
            self.accelerator.save_state(str(scratch))
        except FAILURES as failure:
            error = failure
        failed = torch.tensor([float(error is not None)], device=self.accelerator.device)
        is_good = self.accelerator.gather(failed).sum() == 0
        if self.accelerator.is_main_process:
            if is_good:
                scratch.rename(place)
                for old in sorted(place.parent.glob("step-*"))[:-KEEP]:
                    shutil.rmtree(old)
            else:
                shutil.rmtree(scratch, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        last = start_of(self.out, resume=True)
        if not is_good:
            self.accelerator.print(f"step {step} could not be saved ({error}); the last good checkpoint is {last}")
        return last


@contextmanager
def stopping(accelerator: Accelerator) -> Iterator[Callable[[], bool]]:
    """Ctrl-C (and a scheduler's SIGTERM) ask the run to stop after its step; a second Ctrl-C, 2 s later, stops at once."""
    first: list[float] = []

    def ask(number: int, frame: Any) -> None:
        # Launchers send the terminal's Ctrl-C on to their processes, which then get it twice.
        if number == signal.SIGINT and first and time.monotonic() - first[0] > 2:
            raise KeyboardInterrupt
        first.append(time.monotonic())
        accelerator.set_trigger()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield accelerator.check_trigger
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def bare(accelerator: Accelerator, model: nn.Module) -> Any:
    """The model inside a prepared one, without compilation and adapters: for its config and class."""
    inner: Any = accelerator.unwrap_model(model, keep_torch_compile=False)
    return inner.get_base_model() if hasattr(inner, "peft_config") else inner


def save_model(accelerator: Accelerator, model: nn.Module, folder: Path, *others: Any, card: Any = None) -> None:
    """The trained model in one piece (gathered where it was sharded, adapters merged), with its tokenizer or image
    processor and its card: whole or not at all.

    Raises:
        SystemExit: if it cannot be written, saying how to go on.
    """
    state = {name.removeprefix("_orig_mod."): value for name, value in accelerator.get_state_dict(model).items()}
    inner: Any = accelerator.unwrap_model(model, keep_torch_compile=False)
    if accelerator.is_main_process:
        scratch = folder.with_name(f".{folder.name}")
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            if hasattr(inner, "peft_config"):
                _merged(inner, state).save_pretrained(scratch)
            else:
                inner.save_pretrained(scratch, state_dict=state)
            for other in others:
                other.save_pretrained(scratch)
            if card is not None:
                card.save(scratch / "README.md")
            shutil.rmtree(folder, ignore_errors=True)
            scratch.rename(folder)
        except FAILURES as error:
            shutil.rmtree(scratch, ignore_errors=True)
            raise SystemExit(f"{folder} could not be saved ({error}). Make room, and go on with --resume.") from error
    accelerator.wait_for_everyone()


def _merged(model: Any, state: dict[str, Tensor]) -> Any:
    """A copy with merged adapters. (An adapter alone would be put on the stock model, without our attention.)"""
    from peft import get_peft_model

    base = model.get_base_model()
    whole = get_peft_model(type(base)(copy.deepcopy(base.config)), model.peft_config["default"])
    whole.load_state_dict(state)
    return whole.merge_and_unload()
