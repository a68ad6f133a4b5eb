"""The FullPay classes: BERT, ViT, GPT-2 and Llama with the heads that people use.

Each is the stock class with `FullPayModelMixin` in front, and a model type of its own. A new head is one class here;
the table at the end follows from the classes.
"""

from __future__ import annotations

import re
from typing import Any

import transformers
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from hf_fullpay.hf.checkpoints import REGISTERED, FullPayConfigMixin, FullPayModelMixin


@strict(accept_kwargs=True)
class FullPayBertConfig(FullPayConfigMixin, transformers.BertConfig):
    """BertConfig with a plan under `fullpay`."""

    model_type = "fullpay_bert"
    fullpay: dict[str, Any] | None = None


@strict(accept_kwargs=True)
class FullPayViTConfig(FullPayConfigMixin, transformers.ViTConfig):
    """ViTConfig with a plan under `fullpay`, and whether channel attention follows every feed-forward."""

    model_type = "fullpay_vit"
    fullpay: dict[str, Any] | None = None
    channel_attention: bool = False


@strict(accept_kwargs=True)
class FullPayGPT2Config(FullPayConfigMixin, transformers.GPT2Config):
    """GPT2Config with a plan under `fullpay`."""

    model_type = "fullpay_gpt2"
    fullpay: dict[str, Any] | None = None


@strict(accept_kwargs=True)
class FullPayLlamaConfig(FullPayConfigMixin, transformers.LlamaConfig):
    """LlamaConfig with a plan under `fullpay`."""

    model_type = "fullpay_llama"
    fullpay: dict[str, Any] | None = None


class FullPayBertModel(FullPayModelMixin, transformers.BertModel):
    config_class = FullPayBertConfig


class FullPayBertForMaskedLM(FullPayModelMixin, transformers.BertForMaskedLM):
    config_class = FullPayBertConfig


class FullPayBertForSequenceClassification(FullPayModelMixin, transformers.BertForSequenceClassification):
    config_class = FullPayBertConfig


class FullPayBertForTokenClassification(FullPayModelMixin, transformers.BertForTokenClassification):
    config_class = FullPayBertConfig


class FullPayBertForQuestionAnswering(FullPayModelMixin, transformers.BertForQuestionAnswering):
    config_class = FullPayBertConfig


class FullPayBertForMultipleChoice(FullPayModelMixin, transformers.BertForMultipleChoice):
    config_class = FullPayBertConfig


class FullPayViTModel(FullPayModelMixin, transformers.ViTModel):
    config_class = FullPayViTConfig


class FullPayViTForImageClassification(FullPayModelMixin, transformers.ViTForImageClassification):
    config_class = FullPayViTConfig


class FullPayViTForMaskedImageModeling(FullPayModelMixin, transformers.ViTForMaskedImageModeling):
    config_class = FullPayViTConfig


class FullPayGPT2Model(FullPayModelMixin, transformers.GPT2Model):
    config_class = FullPayGPT2Config


class FullPayGPT2LMHeadModel(FullPayModelMixin, transformers.GPT2LMHeadModel):
    config_class = FullPayGPT2Config


class FullPayGPT2ForSequenceClassification(FullPayModelMixin, transformers.GPT2ForSequenceClassification):
    config_class = FullPayGPT2Config


class FullPayGPT2ForTokenClassification(FullPayModelMixin, transformers.GPT2ForTokenClassification):
    config_class = FullPayGPT2Config


class FullPayGPT2ForQuestionAnswering(FullPayModelMixin, transformers.GPT2ForQuestionAnswering):
    config_class = FullPayGPT2Config


class FullPayLlamaModel(FullPayModelMixin, transformers.LlamaModel):
    config_class = FullPayLlamaConfig


class FullPayLlamaForCausalLM(FullPayModelMixin, transformers.LlamaForCausalLM):
    config_class = FullPayLlamaConfig


class FullPayLlamaForSequenceClassification(FullPayModelMixin, transformers.LlamaForSequenceClassification):
    config_class = FullPayLlamaConfig


class FullPayLlamaForTokenClassification(FullPayModelMixin, transformers.LlamaForTokenClassification):
    config_class = FullPayLlamaConfig


class FullPayLlamaForQuestionAnswering(FullPayModelMixin, transformers.LlamaForQuestionAnswering):
    config_class = FullPayLlamaConfig


CONFIGS: dict[str, type[Any]] = {
    value.__name__: value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, FullPayConfigMixin) and value is not FullPayConfigMixin
}
MODELS: dict[str, type[Any]] = {
    value.__name__: value
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, FullPayModelMixin) and value is not FullPayModelMixin
}
HEADS = {"Model": "AutoModel", "LMHeadModel": "AutoModelForCausalLM"}  # the others are named ForTask


def register_models() -> None:
    """Make AutoConfig and the Auto classes load our classes. Calling it again changes nothing."""
    if REGISTERED:
        return
    for config in CONFIGS.values():
        AutoConfig.register(config.model_type, config)
    for name, model in MODELS.items():
        stock = stock_of(model)
        head = re.sub("^FullPay(Bert|ViT|GPT2|Llama)", "", name)
        auto = HEADS.get(head, f"AutoModel{head}")
        getattr(transformers, auto).register(model.config_class, model)
        REGISTERED.setdefault(auto, set()).add(model)
        # Transformers renames the keys of old checkpoints for its own classes only.
        mapping = get_checkpoint_conversion_mapping(stock.__name__) or get_checkpoint_conversion_mapping(
            stock.config_class.model_type
        )
        if mapping:
            register_checkpoint_conversion_mapping(name, mapping)


def stock_of(kind: type[Any]) -> type[Any]:
    """The class of Transformers that a FullPay class stands on."""
    return next(base for base in kind.__mro__ if base.__module__.startswith("transformers."))


def architecture(config: Any) -> type[Any] | None:
    """The model class that a config names first, ours or of Transformers; None if there is no such class."""
    name = (config.architectures or [""])[0]
    kind = MODELS.get(name) or getattr(transformers, str(name), None)
    return kind if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) else None


def fullpay_of(kind: type[Any]) -> type[Any]:
    """The FullPay class of a stock class.

    Raises:
        ValueError: if there is none, saying what is served.
    """
    if issubclass(kind, FullPayModelMixin):
        return kind
    found = MODELS.get(f"FullPay{kind.__name__}")
    if found is None or stock_of(found) is not kind:
        served = ", ".join(sorted(stock_of(model).__name__ for model in MODELS.values()))
        raise ValueError(
            f"convert: expected one of {served}; got {kind.__name__}. Other families run without learned numbers: load "
            'them with attn_implementation="fullpay" or another preset.'
        )
    return found


__all__ = [*CONFIGS, *MODELS]
