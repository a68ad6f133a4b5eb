"""The flags that fine-tuning recipes share, and what they make: an Accelerator, and a model under the chosen attention."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, TorchDynamoPlugin, parse_flag_from_env, set_seed
from torch import nn
from transformers import AutoConfig

import hf_fullpay
from data import checkpoint
from hf_fullpay.plan import with_options
from settings import count, folder
from training import start_of

ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")  # names in the families
HEADS = ("classifier", "score", "pooler")  # fresh, or near it: beside LoRA they are trained whole


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
    parser.add_argument(
        "--no-attention-dropout", action="store_true", help="on a CPU a step is 2 to 4 times faster without"
    )
    parser.add_argument("--report-to", metavar="TRACKER", help="tensorboard, wandb, ... besides log.jsonl")


def accelerator_of(parser: argparse.ArgumentParser, options: argparse.Namespace, values: dict[str, Any]) -> Accelerator:
    """An Accelerator; makes --out and seeds everything, too. Ends the program for a precision that the device does not
    have, and for a folder with another run's checkpoints."""
    folder(parser, options.out)
    try:
        start_of(options.out, options.resume)
    except ValueError as error:
        parser.error(f"--out: {error}")
    has_cuda = torch.cuda.is_available()
    if options.mixed_precision == "bf16" and has_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        parser.error("--mixed-precision: expected fp16 or no on this device, got bf16, which it does not have.")
    if options.mixed_precision == "fp16" and not has_cuda:
        parser.error("--mixed-precision: expected bf16 or no on this device, got fp16, which it does not have.")
    if options.seed is not None:
        values["seed"] = options.seed
    accelerator = Accelerator(
        mixed_precision=options.mixed_precision,
        gradient_accumulation_steps=options.accumulate,
        log_with=options.report_to,
        project_dir=options.out,
        cpu=not torch.accelerator.is_available(),
        dynamo_plugin=TorchDynamoPlugin(backend="inductor", dynamic=True) if options.compile else None,
    )
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and accelerator.distributed_type != DistributedType.FSDP:
        parser.error(
            "accelerate: expected GPUs for FSDP, got none, where it would run DDP without a word. Use torchrun."
        )
    set_seed(values["seed"])  # before the model: fresh heads are the same in all processes and under every attention
    if options.report_to:
        accelerator.init_trackers(
            "hf-fullpay", config={name: v for name, v in values.items() if isinstance(v, int | float | str)}
        )
    return accelerator


def plan_of(options: argparse.Namespace) -> hf_fullpay.AttentionPlan | None:
    """The plan that was asked for; None for an attention of Transformers.

    Raises:
        ValueError: for a file that holds no plan, or --learnable where nothing can be learned.
    """
    if options.attention.endswith(".json"):
        try:
            plan = hf_fullpay.AttentionPlan.from_dict(json.loads(Path(options.attention).read_text()))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(
                f"--attention: expected a plan in a JSON file, got {options.attention}: {error}"
            ) from error
    elif options.attention in hf_fullpay.PRESETS:
        plan = hf_fullpay.PRESETS[options.attention]
    elif options.learnable:
        raise ValueError(f"--learnable: expected a preset or a plan, got --attention {options.attention}.")
    else:
        return None
    return with_options(plan, {"learnable": True}) if options.learnable else plan


def config_of(options: argparse.Namespace) -> Any:
    """The config of --model.

    Raises:
        ValueError: for a checkpoint that is not there.
    """
    try:
        return AutoConfig.from_pretrained(checkpoint(options.model)[0])
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model: expected a Hub id or the folder of a checkpoint, got {options.model}: {error}"
        ) from error


def model_of(options: argparse.Namespace, auto: Any, *, channel_attention: bool = False, **changes: Any) -> nn.Module:
    """A checkpoint under the chosen attention: converted where the plan is ours, so that it is saved with it.

    Args:
        options: of `add_arguments`.
        auto: AutoModelFor..., which knows the head.
        channel_attention: of `convert`; the ordinary softmax of --attention sdpa is converted then, too.
        changes: for `from_pretrained`, such as num_labels.

    Raises:
        ValueError, OSError: for a checkpoint that is not there, or one that the plan does not fit.
    """
    plan, place, config = plan_of(options), checkpoint(options.model)[0], config_of(options)
    if channel_attention and plan is None:
        if options.attention != "sdpa":
            raise ValueError(
                f"channel attention: expected a preset, a plan or sdpa, got --attention {options.attention}."
            )
        plan = hf_fullpay.AttentionPlan()
    if options.no_attention_dropout:
        changes |= {name: 0.0 for name in ATTENTION_DROPOUT if hasattr(config, name)}
    attention = "sdpa" if plan is not None else options.attention
    model = auto.from_pretrained(place, attn_implementation=attention, **changes)
    if plan is not None:
        model = hf_fullpay.convert(model, plan, channel_attention=channel_attention)
    if options.gradient_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return adapted(model, options.lora) if options.lora else model


def adapted(model: Any, rank: int) -> nn.Module:
    """The model with LoRA on all its linear layers; heads, learned numbers and channel attention stay whole."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("--lora: expected the package peft, got none. Install it with: pip install peft") from error
    parts = {part for path, _ in model.named_modules() for part in path.split(".")}
    heads = [name for name in HEADS if name in parts]
    learned = [name for name in ("fullpay", "channel_attention") if name in parts]
    return get_peft_model(
        model,
        LoraConfig(r=rank, target_modules="all-linear", exclude_modules=heads, modules_to_save=heads + learned),
    )
