"""The flags that fine-tuning recipes share, and what they make: an Accelerator, and a model under the chosen attention."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn

import hf_fullpay
from hf_fullpay.plan import with_options
from settings import count


def add_arguments(parser: argparse.ArgumentParser, *, config: Path, model: str | None) -> None:
    """Model, attention, training."""
    parser.add_argument("--model", default=model, help=f"Hub id or folder of a checkpoint ({model or 'see above'})")
    parser.add_argument(
        "--attention", default="fullpay", metavar="NAME", help='"sdpa", a preset, or a plan as JSON file (fullpay)'
    )
    parser.add_argument("--learnable", action="store_true", help="let the plan's numbers be learned, one per head")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where checkpoints and results go")
    parser.add_argument(
        "--config", type=Path, default=config, metavar="FILE", help=f"values of the training ({config.name})"
    )
    parser.add_argument("--seed", type=int, help="instead of the config's")
    parser.add_argument("--steps", type=count, help="end after so many steps")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    parser.add_argument("--mixed-precision", choices=("no", "bf16", "fp16"), help="instead of accelerate's own setting")
    parser.add_argument("--accumulate", type=count, default=1, metavar="N", help="batches of a step (1)")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory, a third more time")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument(
        "--lora", type=count, metavar="RANK", help="train adapters and the learned numbers only (needs peft)"
    )
    parser.add_argument("--report-to", metavar="TRACKER", help="tensorboard, wandb, ... besides log.jsonl")


def accelerator_of(parser: argparse.ArgumentParser, options: argparse.Namespace, values: dict[str, Any]) -> Accelerator:
    """Seeds everything, too. Ends the program for a precision that the device does not have."""
    if options.mixed_precision == "bf16" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(False):
        parser.error("--mixed-precision: expected fp16 or no on this device, got bf16, which it does not have.")
    accelerator = Accelerator(
        mixed_precision=options.mixed_precision,
        gradient_accumulation_steps=options.accumulate,
        log_with=options.report_to,
        project_dir=options.out,
        dynamo_backend="inductor" if options.compile else None,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    if options.seed is not None:
        values["seed"] = options.seed
    set_seed(values["seed"])
    if options.report_to:
        accelerator.init_trackers(
            "hf-fullpay", config={name: v for name, v in values.items() if isinstance(v, int | float | str)}
        )
    return accelerator


def plan_of(options: argparse.Namespace) -> hf_fullpay.AttentionPlan | None:
    """The plan that was asked for; None for an attention of Transformers."""
    if options.attention.endswith(".json"):
        plan = hf_fullpay.AttentionPlan.from_dict(json.loads(Path(options.attention).read_text()))
    elif options.attention in hf_fullpay.PRESETS:
        plan = hf_fullpay.PRESETS[options.attention]
    else:
        return None
    return with_options(plan, {"learnable": True}) if options.learnable else plan


def model_of(options: argparse.Namespace, auto: Any, **changes: Any) -> nn.Module:
    """A checkpoint under the chosen attention: converted where the plan is ours, so that it is saved with it.

    Args:
        options: of `add_arguments`.
        auto: AutoModelFor..., which knows the head.
        changes: for `from_pretrained`, such as num_labels.
    """
    plan = plan_of(options)
    model = auto.from_pretrained(
        options.model, attn_implementation="sdpa" if plan is not None else options.attention, **changes
    )
    if plan is not None:
        model = hf_fullpay.convert(model, plan)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.lora:
        from peft import LoraConfig, get_peft_model

        heads = [
            name
            for name in ("classifier", "score", "pooler")
            if any(part == name for path, _ in model.named_modules() for part in path.split("."))
        ]
        learned = ["fullpay"] if plan is not None and plan.is_learnable else []
        model = get_peft_model(
            model,
            LoraConfig(
                r=options.lora, target_modules="all-linear", exclude_modules=heads, modules_to_save=heads + learned
            ),
        )
    return model
