"""Tiny models of other families that route, and of those that we refuse: class, configuration, inputs."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t
from transformers import PreTrainedModel

from families import VOCABULARY, randomise

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = SIZES | WORDS | {"num_key_value_heads": 2, "head_dim": 8}
IMAGE = {"image_size": 16, "patch_size": 4}
BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 2,
}  # fmt: skip
SLIDING = {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "dropout": 0.0, "attention_dropout": 0.0}
LOCAL = {"local_attention": 4, "global_attn_every_n_layers": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
SPEECH = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 64}
STAGES = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}

# Models that run; "text" and "causal" read tokens, "pair" reads two texts, "image" pixels, "speech" sound and tokens.
ROUTING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "roberta": ("text", "RobertaModel", SIZES | WORDS | STILL | {"pad_token_id": 0}),
    "distilbert": ("text", "DistilBertModel", {"vocab_size": VOCABULARY} | DISTIL),
    "electra": ("text", "ElectraModel", SIZES | WORDS | STILL | {"embedding_size": 32}),
    "albert": ("text", "AlbertModel", SIZES | WORDS | STILL | {"embedding_size": 32}),
    "splinter": ("text", "SplinterModel", SIZES | WORDS | STILL | {"question_token_id": 96}),
    "modernbert": ("text", "ModernBertModel", SIZES | WORDS | LOCAL | SPECIAL),
    "clip_text": ("causal", "CLIPTextModel", SIZES | WORDS | {"eos_token_id": 96, "bos_token_id": 1}),
    "mistral": ("causal", "MistralModel", GROUPED | {"sliding_window": 4}),
    "qwen3": ("causal", "Qwen3Model", GROUPED | {"use_sliding_window": True} | SLIDING),
    "gemma3": ("causal", "Gemma3TextModel", GROUPED | {"query_pre_attn_scalar": 8} | SLIDING),
    "opt": ("causal", "OPTModel", SIZES | WORDS | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "gpt_neox": ("causal", "GPTNeoXModel", SIZES | WORDS),
    "t5": ("pair", "T5Model", {"vocab_size": VOCABULARY, "decoder_start_token_id": 0} | T5),
    "bart": ("pair", "BartModel", BART | {"dropout": 0.0, "max_position_embeddings": 64}),
    "whisper": ("speech", "WhisperModel", BART | SPEECH | {"bos_token_id": 1, "dropout": 0.0}),
    "clip_vision": ("image", "CLIPVisionModel", SIZES | IMAGE),
    "siglip_vision": ("image", "SiglipVisionModel", SIZES | IMAGE),
    "dinov2": ("image", "Dinov2Model", SIZES | IMAGE),
    "beit": ("image", "BeitModel", SIZES | IMAGE | STILL | {"use_relative_position_bias": True, "drop_path_rate": 0.0}),
    "swin": ("image", "SwinModel", STAGES | STILL | {"drop_path_rate": 0.0}),
    "vit_mae": ("image", "ViTMAEModel", SIZES | IMAGE | STILL | {"mask_ratio": 0.0}),
}

# Models that we cannot serve, with a word of the reason.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "deberta_v2": ("DebertaV2Model", SIZES | WORDS, "interface"),
    "bloom": ("BloomModel", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "interface"),
    "mpnet": ("MPNetModel", SIZES | WORDS, "interface"),
    "falcon": ("FalconModel", SIZES | WORDS, "interface"),
    "gpt_neo": ("GPTNeoModel", {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2} | NEO, "interface"),
    "gemma2": ("Gemma2Model", GROUPED | {"query_pre_attn_scalar": 8, "sliding_window": 4}, "soft-capped"),
    "gpt_oss": ("GptOssModel", GROUPED | EXPERTS, "sinks"),
    "resnet": ("ResNetModel", {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [2, 1]}, "none"),
}


def make(name: str, attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
    """A peaky model of the zoo in eval mode; the same weights for every attention."""
    _, kind, options = ROUTING[name] if name in ROUTING else ("", *REFUSED[name][:2])
    torch.manual_seed(0)
    kind = getattr(t, kind)
    return randomise(kind(kind.config_class(**options | changes, attn_implementation=attention))).eval()


def given(name: str, *, pads: int = 0) -> dict[str, Any]:
    """Inputs; the first row of a text ends in `pads` pads."""
    kind = ROUTING[name][0]
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, VOCABULARY - 1, (2, 9), generator=generator)
    if kind == "image":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    if kind == "speech":
        return {"input_features": torch.randn(2, 8, 20, generator=generator), "decoder_input_ids": tokens[:, :6]}
    found = {"input_ids": tokens}
    if pads:
        found["attention_mask"] = torch.ones_like(tokens)
        found["attention_mask"][0, 9 - pads :] = 0
    if kind == "pair":
        found["decoder_input_ids"] = tokens[:, :6]
    return found
