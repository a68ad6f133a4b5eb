"""What the FullPay classes add to a stock config and a stock model, written once for all families.

A stock class drops the name of the attention on saving and ignores learned numbers on loading, both in silence. So a
converted checkpoint has a model type of its own, which fails loudly where the plugin is missing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_fullpay.hf.bind import CARRIER, bind, is_ours, layers_of
from hf_fullpay.hf.channels import attach_channels, initialize_channels
from hf_fullpay.hf.forward import PLAN, STRENGTHS, pass_input
from hf_fullpay.hf.strengths import Strengths, strengths_of
from hf_fullpay.layers import SqueezeExcite
from hf_fullpay.plan import AttentionPlan

SHIM = "modeling_fullpay"


class InstalledCode:
    """Shared by both parts: their code is an installed package, also when a checkpoint with a shim led to it."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "") -> None:
        """Nothing to do: the shim in the checkpoint says it. Transformers calls this after loading remote code, and
        would otherwise copy this package's source into every checkpoint saved afterwards."""


class FullPayConfigMixin(InstalledCode):
    """Config part: the plan as a JSON dict under `fullpay`, and the name of the attention, both kept on saving."""

    holds_strengths = True  # its models have a place for learned numbers
    fullpay: dict[str, Any] | None
    _attn_implementation: str | None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]
        # The way to the code is written anew whenever a model is saved; a stale one would point to a file that is not
        # there. And the config of a stock checkpoint brings the stock type.
        for key in ("auto_map", "model_type"):
            vars(self).pop(key, None)
        if self.fullpay is not None:
            self.fullpay = AttentionPlan.from_dict(self.fullpay).to_dict()
        if self._attn_implementation is None:
            self._attn_implementation = "fullpay" if self.fullpay is None else CARRIER

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in Transformers; a plan among the arguments takes the place of the plan and the name in the dict."""
        if PLAN in kwargs:
            config_dict = {k: v for k, v in config_dict.items() if k != "attn_implementation"} | {
                PLAN: kwargs.pop(PLAN)
            }
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        return self._with_name(super().to_dict())  # type: ignore[misc]

    def to_diff_dict(self) -> dict[str, Any]:
        return self._with_name(super().to_diff_dict())  # type: ignore[misc]

    def _with_name(self, written: dict[str, Any]) -> dict[str, Any]:
        if is_ours(self._attn_implementation):
            written["attn_implementation"] = self._attn_implementation
        return written


class FullPayModelMixin(InstalledCode):
    """Model part: a `fullpay` module in every attention layer whose plan learns something."""

    _keep_in_fp32_modules_strict: Any = {STRENGTHS}  # noqa: RUF012 - Transformers reads a class attribute
    # Continuous batching would swap the attention for a flash kernel, and context parallelism knows SDPA only.
    _supports_flash_attn = False
    _supports_context_parallel = False

    def post_init(self) -> None:
        attach_channels(self)  # type: ignore[arg-type]
        attach(self)  # type: ignore[arg-type]
        super().post_init()  # type: ignore[misc]

    def initialize_weights(self) -> None:
        # The initialiser descends into a stock base model, whose own rules know nothing of our modules.
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, Strengths):
                module.initialize()
            elif isinstance(module, SqueezeExcite):
                initialize_channels(module)
        super().initialize_weights()  # type: ignore[misc]

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As in Transformers, and a shim beside the weights that lets `trust_remote_code=True` find the plugin."""
        config: Any = self.config  # type: ignore[attr-defined]
        if kwargs.get("is_main_process", True):
            write_shim(Path(save_directory), type(self))
        config.auto_map = auto_map(type(self))
        try:
            super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        finally:
            del config.auto_map


def attach(model: PreTrainedModel) -> None:
    """Bind the model and give its layers their learned numbers."""
    if not is_ours(model.config._attn_implementation):
        return
    bind(model)
    config: Any = model.config
    for _, module, layer in layers_of(model):
        if isinstance(getattr(module, STRENGTHS, None), nn.Module):
            continue
        strengths = strengths_of(layer.plan, config.num_attention_heads, config.hidden_size)
        if strengths is not None:
            module.add_module(STRENGTHS, strengths)
            if layer.plan.gate:
                module.register_forward_pre_hook(pass_input, with_kwargs=True)


def auto_class_of(kind: type) -> str:
    """The Auto class that loads a FullPay class: AutoModelForQuestionAnswering for FullPayBertForQuestionAnswering."""
    return next(auto for auto, classes in REGISTERED.items() if published(kind) in classes)


def published(kind: type[Any]) -> type[Any]:
    """The registered class that a class is or stands on: a user's subclass is saved as what others can load."""
    everyone = set().union(*REGISTERED.values())
    return next(base for base in kind.__mro__ if base in everyone)


REGISTERED: dict[str, set[type]] = {}


def auto_map(kind: type[Any]) -> dict[str, str]:
    """Entries of config.json that lead Transformers to the shim."""
    return {
        "AutoConfig": f"{SHIM}.{kind.config_class.__name__}",
        auto_class_of(kind): f"{SHIM}.{published(kind).__name__}",
    }


def write_shim(folder: Path, kind: type[Any]) -> None:
    """A module of one import: without the plugin it fails with a sentence that names the package to install."""
    folder.mkdir(parents=True, exist_ok=True)
    names = f"{kind.config_class.__name__}, {published(kind).__name__}"
    (folder / f"{SHIM}.py").write_text(
        f'"""This checkpoint needs hf-fullpay: pip install hf-fullpay"""\n\nfrom hf_fullpay import {names}  # noqa: F401\n'
    )
