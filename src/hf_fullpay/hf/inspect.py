"""What a checkpoint does: layers, promises, learned numbers. Reads the structure, not the weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from hf_fullpay.hf.bind import is_ours, layers_of
from hf_fullpay.hf.models import architecture
from hf_fullpay.hf.strengths import Strengths
from hf_fullpay.plan import LENGTHS, AttentionPlan


def inspect_model(path: str, attention: str | None = None) -> str:
    """A report on a checkpoint.

    Args:
        path: Hub id or folder.
        attention: look at it under this preset instead of its own attention.

    Raises:
        ValueError: if the model cannot run under that name, with the reason.
        OSError: if there is no checkpoint.
    """
    config = AutoConfig.from_pretrained(path)
    if attention:
        config._attn_implementation = attention
    name = config._attn_implementation or "sdpa"
    model = _structure(config)
    lines = [f"{path}: {type(model).__name__}, attn_implementation={name!r}"]
    if not is_ours(name):
        lines.append("ordinary attention; see it under a preset with --attention NAME")
        return "\n".join(lines)
    layers = list(layers_of(model))
    lines.append(f"{'layer':>5}  {'module':<44} runs")
    for module_path, _, layer in layers:
        lines.append(f"{layer.index:>5}  {module_path:<44} {_alone(layer.plan).describe()}")
    for plan in dict.fromkeys(_alone(layer.plan) for _, _, layer in layers):
        if promised := [(n, promise) for n in LENGTHS for promise in plan.promises(n)]:
            lines.append(f"promises of {plan.describe()}:")
            lines += [f"  over {n:>4} keys: {promise}" for n, promise in promised]
    lines += _learned(path, model)
    return "\n".join(lines)


def _alone(plan: AttentionPlan) -> AttentionPlan:
    """The plan of one layer, without the policy that gave it to the layer."""
    return replace(plan, layers="all")


def _structure(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without memory for its weights."""
    kind = architecture(config)
    with torch.device("meta"):
        return kind(config) if kind else AutoModel.from_config(config)


def _learned(path: str, model: PreTrainedModel) -> list[str]:
    """Learned numbers by layer. Only a checkpoint that has some is loaded: names on disk may differ from the module's."""
    if not any(isinstance(module, Strengths) for module in model.modules()):
        return ["learned numbers: none"]
    loaded = type(model).from_pretrained(path)
    modules = {where: module for where, module in loaded.named_modules() if isinstance(module, Strengths)}
    count = sum(p.numel() for module in modules.values() for p in module.parameters())
    lines = [f"learned numbers: {count}, in {len(modules)} layers"]
    for where, module in modules.items():
        # A gate depends on the input; at zero input its own offset shows.
        numbers = module(torch.zeros(1, 1, loaded.config.hidden_size))
        shown = ", ".join(f"{key} {value.min():.4f} to {value.max():.4f}" for key, value in numbers.items())
        lines.append(f"  {where}: {shown}")
    return lines
