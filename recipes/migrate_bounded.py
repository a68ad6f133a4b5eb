"""Bring a bound (or a floor) into a trained classifier, gradually, and stop where quality would be lost.

    python recipes/finetune_text.py --out runs/plain --attention sdpa                         a classifier to start from
    python recipes/migrate_bounded.py --out runs/bounded --model runs/plain/model             logits 4 times smaller
    python recipes/migrate_bounded.py --out runs/paid --model runs/plain/model --attention fullpay             a floor
    python recipes/migrate_bounded.py --out runs/control --model runs/plain/model --attention sdpa      tuned the same
    python recipes/migrate_bounded.py --out runs/mine --model my/classifier --data mine.csv --test held_out.csv

1. measure   Calibration makes a bound for every layer and head: what logits reach now, over `reduction`. (A plan of a JSON
             file with bounds of its own keeps them; a floor has nothing to calibrate.)
2. choose    Layers are tried alone, untrained; the least harmed come first, and others join while all together raise the
             loss by no more than `harm`. A classifier keeps its last layer ordinary. --layers chooses by hand.
3. tune      The bound grows from none to its target (a floor's budget from 0) in `stages`: with strength s from 0 to 1 the
             bound is target / s, so logits shrink in proportion, and the budget s * target. After each stage the
             loss on held-out rows is checked: within `budget` of the start the next one begins, else this one goes on.
4. stop      After `patience` checks in a row that are over it, or when the data end. model/ is the last that kept it.

Half of the held-out rows decide when to stop, the other half is measured once, before and after. The card and
results.json speak of that half: accuracy, macro F1, and the largest logit and the largest hidden state by layer, apart.
Both are written to --out, with model/, log.jsonl (loss, strength, checks) and checkpoints/ for --resume. The values are
those of recipes/configs/migrate_bounded.yaml or your --config.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import hf_fullpay
from arguments import ATTENTION_DROPOUT, accelerator_of, adapted, add_arguments, config_of, plan_of
from data import add_source_arguments, checkpoint
from extremes import extremes
from finetune_text import KEEP, length_of, rows
from hf_fullpay.diagnosis.as_found import as_found
from hf_fullpay.hf.cards import render_card
from hf_fullpay.hf.replan import replan
from hf_fullpay.hf.trial import trial
from hf_fullpay.payment import Clamp, Mixture
from hf_fullpay.plan import AttentionPlan, with_options
from hf_fullpay.scores import Bounded
from metrics import classification, predict
from origin import provenance
from settings import count, refusing, settings
from training import bare, fit, save_model

HERE = Path(__file__).parent
CONFIG = HERE / "configs" / "migrate_bounded.yaml"


class Spent(Exception):
    """The budget is: ends the training."""


def at(plan: AttentionPlan, strength: float) -> AttentionPlan:
    """The plan on its way: neutral at strength 0, itself at 1."""
    if isinstance(plan.scores, Bounded):
        plan = with_options(plan, {"bound": _over(plan.scores.bound, strength)})
    if isinstance(plan.payment, Mixture | Clamp):
        budget = plan.payment.budget
        scaled = tuple(one * strength for one in budget) if isinstance(budget, tuple) else budget * strength
        plan = with_options(plan, {"budget": scaled})
    return plan


def _over(bound: Any, strength: float) -> Any:
    if isinstance(bound, tuple):
        return tuple(_over(one, strength) for one in bound)
    return math.inf if bound is None or strength == 0 else bound / strength


def target(options: argparse.Namespace, model: nn.Module, probe: list[Any], reduction: float) -> AttentionPlan:
    """The plan to arrive at, in all layers.

    Raises:
        ValueError: for a plan with nothing that could grow.
    """
    plan = plan_of(options)
    if plan is None or plan.is_learnable or not (
        isinstance(plan.scores, Bounded) or isinstance(plan.payment, Mixture | Clamp)
    ):  # fmt: skip
        raise ValueError(
            "--attention: expected sdpa, bounded, fullpay, bounded_fullpay or another plan with a bound or a floor that is "
            f"not learned, got {options.attention}."
        )
    if isinstance(plan.scores, Bounded) and not plan.scores.is_per_layer:
        return hf_fullpay.calibrate(model, probe, plan=plan, reduction=reduction).plan()
    return plan


def chosen(
    model: nn.Module, probe: list[Any], plan: AttentionPlan, harm: float, asked: str | None
) -> tuple[Any, dict[str, Any] | None]:
    """Layers that shall run the plan, and by how much each "alone" and these "together" raise the loss, in nats.

    Raises:
        ValueError: if no layer bears it.
    """
    if asked is not None:
        return tuple(map(int, asked.split(","))) if asked[0].isdigit() else asked, None
    with as_found(model), trial(model, plan) as tried:

        def loss(layers: set[int]) -> float:
            tried.run(layers)
            return sum(float(model(**batch).loss) * len(batch["labels"]) for batch in probe)

        documents = sum(len(batch["labels"]) for batch in probe)
        start = loss(set())
        alone = [(loss({layer}) - start) / documents for layer in range(tried.total)]
        found, together = set[int](), 0.0
        for layer in sorted(range(tried.total - 1), key=alone.__getitem__):
            if (increase := (loss(found | {layer}) - start) / documents) <= harm:
                found, together = found | {layer}, increase
    if not found:
        told = ", ".join(f"{one:.2f}" for one in alone)
        raise ValueError(
            f"expected a layer that raises the loss by at most harm={harm:g} untrained, got {told} from the first to the "
            "last. Raise harm in --config, lower reduction, or choose with --layers."
        )
    return tuple(sorted(found)), {"alone": alone, "together": together}


def classifier(options: argparse.Namespace) -> tuple[Any, Any]:
    """The trained classifier and its tokenizer.

    Raises:
        ValueError: for a checkpoint without a head of its own.
    """
    if not options.model:
        raise ValueError(
            "--model: expected a trained classifier, got none. To make one: python recipes/finetune_text.py --out "
            "runs/plain --attention sdpa"
        )
    place = checkpoint(options.model)[0]
    config = config_of(options)
    if not any("ForSequenceClassification" in name for name in config.architectures or []):
        raise ValueError(
            f"--model: expected a trained classifier, got {options.model}, a {config.architectures}. Train one first: "
            f"python recipes/finetune_text.py --out runs/plain --attention sdpa --model {options.model}"
        )
    changes = {name: 0.0 for name in ATTENTION_DROPOUT if hasattr(config, name)}
    model = AutoModelForSequenceClassification.from_pretrained(
        place, attn_implementation="sdpa", **(changes if options.no_attention_dropout else {})
    )
    return model, AutoTokenizer.from_pretrained(place)


def layers_asked(text: str) -> str:
    if not re.fullmatch(r"all|all_but_last|from:\d+|\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f'expected "all", "all_but_last", "from:3" or "2,3,4", got {text!r}')
    return text


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, config=CONFIG, model=None)
    parser.set_defaults(attention="bounded")
    parser.add_argument("--layers", type=layers_asked, help='"from:3", "all_but_last", "2,3,4" (those least harmed)')
    add_source_arguments(parser)
    parser.add_argument("--words", type=count, nargs=2, metavar=("LOW", "HIGH"), help="documents of so many words only")
    parser.add_argument("--train-rows", type=count, metavar="N", help="at most so many")
    parser.add_argument("--test-rows", type=count, metavar="N", help="at most so many, half of them for the checks")
    parser.add_argument(
        "--probe-rows", type=count, default=64, metavar="N", help="to calibrate and to choose with (64)"
    )
    parser.add_argument("--length", type=count, metavar="TOKENS", help="longest document (the model's positions)")
    parser.add_argument("--keep", choices=KEEP, default="tail", help="which part of a longer one (tail)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of()
    options = parser.parse_args(arguments)
    values = settings(parser, options.config, CONFIG)
    if values["stages"] > values["checks"]:
        parser.error(
            f"--config: stages: expected at most as many as checks, {values['checks']}, got {values['stages']}."
        )
    if options.compile:
        parser.error("--compile: expected a run without it, since compiled graphs hold on to the plan, which changes.")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    accelerator = accelerator_of(parser, options, values)
    origin, cpu = provenance(("accelerate",)), time.process_time()
    with refusing(parser):
        model, tokenizer = classifier(options)
        options.length = length_of(options.length, model.config, tokenizer)
        train, held_out, _ = rows(options, tokenizer, model.config)
        if len(held_out) < 2:
            raise ValueError("expected at least 2 held-out rows, half of them for the checks, got 1.")

    def collate(batch: list[Any]) -> dict[str, Tensor]:
        padded = tokenizer.pad({"input_ids": [row["ids"] for row in batch]}, return_tensors="pt")
        return {**padded, "labels": torch.tensor([row["label"] for row in batch])}

    model.to(accelerator.device)
    size, half = values["batch"], len(held_out) // 2
    judges, test = held_out[:half], held_out[half:]
    some = [collate(train[i : i + size]) for i in range(0, min(options.probe_rows, len(train)), size)]
    probe = [{name: tensor.to(accelerator.device) for name, tensor in batch.items()} for batch in some]

    def quality(network: nn.Module, documents: list[Any]) -> dict[str, Any]:
        with accelerator.autocast():
            logits = predict(accelerator, network, documents, collate, size)
        wanted = torch.tensor([row["label"] for row in documents])
        loss = float(nn.functional.cross_entropy(logits, wanted))
        return classification(logits.argmax(-1).tolist(), wanted.tolist()) | {"loss": loss}

    def measured(network: nn.Module) -> dict[str, Any]:
        return quality(network, test) | {"largest": extremes(network, probe)}

    before, start = measured(model), quality(model, judges)["loss"]
    goal, untrained = None, None
    if options.attention != "sdpa":
        with refusing(parser):
            goal = target(options, model, probe, values["reduction"])
            layers, untrained = chosen(model, probe, goal, values["harm"], options.layers)
            goal = replace(goal, layers=layers)
            model = hf_fullpay.convert(model, at(goal, 0.0))
        accelerator.print(f"layers {layers}: {goal.describe()}")
    if accelerator.is_main_process and not options.resume:
        with refusing(parser):  # nothing has changed yet
            model.save_pretrained(options.out / "model")
            tokenizer.save_pretrained(options.out / "model")
    if options.gradient_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if options.lora:
        model = adapted(model, options.lora)

    def save(network: nn.Module) -> None:
        card = None if goal is None else render_card(bare(accelerator, network), base_model=options.model)
        save_model(accelerator, network, options.out / "model", tokenizer, card=card)

    migration = Migration(options.out, goal, start, values, lambda network: quality(network, judges), save)
    began = time.perf_counter()
    with suppress(Spent):
        model = fit(
            accelerator, model, train, collate, values, options.out,
            resume=options.resume, steps=options.steps, each_step=migration.each_step,
        )  # fmt: skip
        migration.finish(model)
    trained = time.perf_counter() - began
    final = AutoModelForSequenceClassification.from_pretrained(options.out / "model").to(accelerator.device)
    after = measured(final)
    reached = migration.reached
    result = {
        "before": before, "after": after, "change": {name: after[name] - before[name] for name in ("accuracy", "loss")},
        "smaller": {name: before["largest"][name] / after["largest"][name] for name in ("logit", "hidden")},
        "reached": reached, "harm_untrained": untrained, "checks": migration.checks, "held_out_loss_at_start": start,
        "seconds_training": round(trained, 1), "cpu_seconds": round(time.process_time() - cpu, 1),
    }  # fmt: skip
    if goal is not None:
        result["plan"] = at(goal, reached).to_dict()
        old, new = before["largest"], after["largest"]
        card = render_card(
            final, base_model=options.model,
            measured={
                "accuracy": f"{after['accuracy']:.3f} on {len(test)} held-out documents",
                "accuracy with ordinary attention": f"{before['accuracy']:.3f}, before the migration",
                "largest logit": f"{new['logit']:.2f} (before {old['logit']:.2f})",
                "largest hidden state": f"{new['hidden']:.2f} (before {old['hidden']:.2f})",
            },
            training=f"Migrated to {reached:.0%} of its target in {migration.checks[-1]['step']} steps by "
            f"`{origin['command']}`.",
        )  # fmt: skip
        if accelerator.is_main_process:
            card.save(options.out / "model" / "README.md")
    if accelerator.is_main_process:
        setting = {name: getattr(options, name) for name in ("data", "length", "train_rows", "test_rows", "layers")}
        written = {"provenance": origin, "values": values, "setting": setting, "attention": options.attention} | result
        (options.out / "results.json").write_text(json.dumps(written, indent=2) + "\n")
        print(table(before, after))
        print(f"reached {reached:.0%} of the target; checkpoint, card and results in {options.out}")
    accelerator.end_training()
    return 0


class Migration:
    """The bound on its way, and the checks that end it.

    Attributes:
        checks: what was found, oldest first.
        reached: the strength of the last check that kept the budget.
    """

    def __init__(
        self, out: Path, goal: AttentionPlan | None, start: float, values: dict[str, Any],
        judge: Callable[[nn.Module], dict[str, Any]], save: Callable[[nn.Module], None],
    ) -> None:  # fmt: skip
        self.out, self.goal, self.start, self.values, self.judge, self.save = out, goal, start, values, judge, save
        self.checks: list[dict[str, Any]] = []
        self.strength, self.total = 0.0, 0

    @property
    def reached(self) -> float:
        return next((check["strength"] for check in reversed(self.checks) if check["kept"]), 0.0)

    def each_step(self, model: nn.Module, step: int, total: int) -> dict[str, Any]:
        """Set the bound of this step, after a check where one is due."""
        if not self.total:
            self._begin(model, step)
        self.total, found = total, {}
        if step and step % math.ceil(total / self.values["checks"]) == 0:
            found = self._check(model, step)
        return {"strength": self.strength} | {f"check_{name}": value for name, value in found.items()}

    def finish(self, model: nn.Module) -> None:
        """The last check.

        Raises:
            Spent: as every check.
        """
        if not self.total:  # resumed after its last step
            self.total = json.loads((self.out / "log.jsonl").read_text().splitlines()[-1])["step"]
            self._begin(model, self.total)
        self._check(model, self.total)

    def _check(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Look at held-out rows; keep the model and go on, stay at this bound, or end the run."""
        found = self.judge(model)
        # A loss of NaN keeps nothing. A control, which brings nothing in, goes on as long as what it is compared with.
        kept = self.goal is None or found["loss"] - self.start <= self.values["budget"]
        told = {
            "step": step, "strength": self.strength, "loss": found["loss"], "accuracy": found["accuracy"], "kept": kept,
        }  # fmt: skip
        self.checks.append(told)
        recent = self.checks[-self.values["patience"] :]
        if kept:
            self.save(model)
        elif len(recent) == self.values["patience"] and not any(check["kept"] for check in recent):
            raise Spent
        self._set(model)
        return told

    def _set(self, model: nn.Module) -> None:
        strength = min(1.0, (1 + sum(check["kept"] for check in self.checks)) / self.values["stages"])
        if self.goal is not None and strength != self.strength:
            replan(model, at(self.goal, strength))
        self.strength = strength

    def _begin(self, model: nn.Module, step: int) -> None:
        """The first bound; of a run that is resumed, the one that its checks had led to, as the log has them."""
        for line in (self.out / "log.jsonl").read_text().splitlines() if step else ():
            found = {k.removeprefix("check_"): v for k, v in json.loads(line).items() if k.startswith("check_")}
            if found and found["step"] < step:
                self.checks.append(found)
        self._set(model)


def table(before: dict[str, Any], after: dict[str, Any]) -> str:
    """By layer, for the console."""
    lines = [f"accuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f} on held-out rows; loss "
             f"{before['loss']:.3f} -> {after['loss']:.3f}", "layer  largest logit      largest hidden state"]  # fmt: skip
    for layer, old in before["largest"]["layers"].items():
        new = after["largest"]["layers"][layer]
        lines.append(
            f"{layer:>5}  {old['logit']:6.2f} -> {new['logit']:6.2f}   {old['hidden']:6.2f} -> {new['hidden']:6.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
