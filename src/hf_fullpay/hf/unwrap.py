"""The model inside what users wrap around it."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_fullpay.hf.bind import is_ours
from hf_fullpay.hf.forward import plan_of


def unwrapped(model: nn.Module) -> nn.Module:
    """The Transformers model under torch.compile, DDP, FSDP, DeepSpeed and PEFT. Adapters stay in it.

    Raises:
        ValueError: for anything that is no PyTorch module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a Transformers model, got {type(model).__name__}.")
    from accelerate.utils import extract_model_from_parallel

    model = extract_model_from_parallel(getattr(model, "_orig_mod", model), keep_fp32_wrapper=True)
    inner: Any = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def body_of(model: nn.Module) -> nn.Module:
    """The model without its head, whose logits over a vocabulary would take more memory than all the rest."""
    body = getattr(model, "base_model", model)
    return body if isinstance(body, nn.Module) else model


def label_of(model: nn.Module) -> tuple[str, str]:
    """Name of the attention that a model runs, and what it does in words."""
    config: Any = getattr(model, "config", None)
    name = getattr(config, "_attn_implementation", None) or "eager"
    return name, plan_of(config, name).describe() if is_ours(name) else "ordinary attention"


def no_cache(model: nn.Module) -> dict[str, Any]:
    """Argument of a call that keeps a model from building a cache, where it would build one."""
    config: Any = getattr(model, "config", None)
    return {"use_cache": False} if getattr(config, "use_cache", False) else {}
