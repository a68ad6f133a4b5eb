"""Tiny models of the four families, with weights large enough that attention is peaky, or wrong code would pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_fullpay import Band, Blocks, Chunks, WindowGlobal, Windows

VOCABULARY = 97
TEXT = ("llama", "gpt2", "bert")
FAMILIES = (*TEXT, "vit")
CAUSAL = ("llama", "gpt2")
SHORT = 4
# Short enough to cut a sentence of nine tokens.
SHORT_REACH = {
    Band: Band(SHORT), Blocks: Blocks(SHORT), Chunks: Chunks(SHORT, 1, exchange=0.3),
    WindowGlobal: WindowGlobal(SHORT), Windows: Windows(2),
}  # fmt: skip


def shortened(reach: Any) -> Any:
    """A reach cut to a few tokens; a full one as it is."""
    return SHORT_REACH.get(type(reach), reach)


@dataclass(frozen=True)
class Tiny:
    """Configuration and classes of one family."""

    config: Any
    base: type
    head: type
    auto: type


def tiny(family: str, **changes: Any) -> Tiny:
    """Hidden 32, 2 layers, 4 heads (2 key/value heads in Llama); 17 tokens in ViT."""
    t = transformers
    if family == "llama":
        options = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        config = t.LlamaConfig(**options | {"num_attention_heads": 4, "num_key_value_heads": 2} | changes)
        return Tiny(config, t.LlamaModel, t.LlamaForCausalLM, t.AutoModelForCausalLM)
    if family == "gpt2":
        options = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 160}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
        return Tiny(t.GPT2Config(**options | dropout | changes), t.GPT2Model, t.GPT2LMHeadModel, t.AutoModelForCausalLM)
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if family == "bert":
        config = t.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=160, **options | dropout | changes)
        return Tiny(config, t.BertModel, t.BertForSequenceClassification, t.AutoModelForSequenceClassification)
    config = t.ViTConfig(image_size=32, patch_size=8, num_labels=3, **options | dropout | changes)
    return Tiny(config, t.ViTModel, t.ViTForImageClassification, t.AutoModelForImageClassification)


def build(family: str, attention: str = "sdpa", *, seed: int = 0, head: bool = True, **changes: Any) -> PreTrainedModel:
    """A peaky model in eval mode; the same weights for every attention."""
    parts = tiny(family, **changes)
    torch.manual_seed(seed)
    kind = parts.head if head else parts.base
    parts.config._attn_implementation = attention
    return randomise(kind(parts.config)).eval()


def randomise(model: PreTrainedModel, scale: float = 0.35) -> PreTrainedModel:
    """Draw all matrices wide; leave our own learned numbers and the norms alone."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "fullpay" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def inputs(
    family: str, batch: int = 2, length: int = 9, *, left: int = 0, right: int = 0, seed: int = 1
) -> dict[str, Any]:
    """Model inputs; the first row has `left` and `right` pads."""
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=generator)}
    found = {"input_ids": torch.randint(3, VOCABULARY, (batch, length), generator=generator)}
    if left or right:
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[0, :left] = 0
        mask[0, length - right :] = 0
        found["attention_mask"] = mask
        if family == "gpt2":
            found["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    return found
