"""A forecaster of series: a small causal Transformer whose positions, feed-forward and attention plan are all choices.

Dimensions: B batch, N readings, C series, D hidden width.

It reads N readings of C series and says, at each of them, what the next will be; `predict` feeds what it said back in.
It has no cache: the window moves with every step, and with it every position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel, initialization
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

from hf_fullpay.core.errors import check_choice, check_count, check_number, wrong
from hf_fullpay.hf.checkpoints import REGISTERED, FullPayConfigMixin, FullPayModelMixin
from hf_fullpay.hf.forward import STRENGTHS
from hf_fullpay.layers import FEED_FORWARDS, Learned, Rotary, Sinusoidal

POSITIONS = ("sinusoidal", "learned", "rotary", "none")


@strict(accept_kwargs=True)
class FullPayForecasterConfig(FullPayConfigMixin, PreTrainedConfig):
    """What a forecaster is made of.

    Args:
        channels: C, series that are read and forecast together.
        context_length: readings that the model looks back on at most.
        hidden_size: D.
        num_hidden_layers: layers.
        num_attention_heads: heads, which divide D (with rotary positions into an even width).
        intermediate_size: width inside the feed-forward, None for its own default.
        positions: "sinusoidal", "learned", "rotary" or "none".
        feed_forward: "gelu" or "swiglu".
        dropout: probability, of attention weights and inner channels.
        fullpay: the attention plan as `AttentionPlan.to_dict()` gives it; or name one by `attn_implementation`.
    """

    model_type = "fullpay_forecaster"
    channels: int = 1
    context_length: int = 64
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    intermediate_size: int | None = None
    positions: str = "rotary"
    feed_forward: str = "gelu"
    dropout: float = 0.0
    initializer_range: float = 0.02
    fullpay: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for option in ("channels", "context_length", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            check_count(f"FullPayForecasterConfig({option}=...)", getattr(self, option))
        check_choice("FullPayForecasterConfig(positions=...)", self.positions, POSITIONS)
        check_choice("FullPayForecasterConfig(feed_forward=...)", self.feed_forward, tuple(FEED_FORWARDS))
        check_number("FullPayForecasterConfig(dropout=...)", self.dropout, low=0, high=1, open_high=True)
        check_number("FullPayForecasterConfig(initializer_range=...)", self.initializer_range, low=0)
        if self.hidden_size % self.num_attention_heads:
            raise wrong(
                "FullPayForecasterConfig(num_attention_heads=...)", f"a divisor of hidden_size ({self.hidden_size})",
                self.num_attention_heads,
            )  # fmt: skip
        super().__post_init__(**kwargs)


class ForecasterAttention(nn.Module):
    """Causal self-attention that runs whatever the config names."""

    is_causal = True

    def __init__(self, config: FullPayForecasterConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        width = config.hidden_size
        self.head_dim = width // config.num_attention_heads
        self.rotary = Rotary(self.head_dim) if config.positions == "rotary" else None
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = nn.Linear(width, width)

    def forward(self, hidden_states: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        split = (*hidden_states.shape[:-1], self.config.num_attention_heads, self.head_dim)
        query, key, value = (one(hidden_states).view(split).transpose(1, 2) for one in projections)
        if self.rotary is not None:
            query, key = self.rotary(query, key)
        run = ALL_ATTENTION_FUNCTIONS.get_interface(str(self.config._attn_implementation), _eager)
        dropout = self.config.dropout if self.training else 0.0
        output, weights = run(self, query, key, value, mask, scaling=self.head_dim**-0.5, dropout=dropout, **kwargs)
        return self.o_proj(output.reshape(hidden_states.shape)), weights


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float,
    dropout: float, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scores = query @ key.mT * scaling
    weights = torch.softmax(scores if mask is None else scores + mask, -1, dtype=torch.float32).to(value.dtype)
    output = nn.functional.dropout(weights, dropout, module.training) @ value
    return output.transpose(1, 2).contiguous(), weights


class ForecasterLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual path."""

    def __init__(self, config: FullPayForecasterConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm_before, self.norm_after = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)
        self.attention = ForecasterAttention(config, layer_idx)
        kind: Any = FEED_FORWARDS[config.feed_forward]
        self.feed_forward = kind(config.hidden_size, config.intermediate_size, config.dropout)

    def forward(self, hidden_states: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        attended, weights = self.attention(self.norm_before(hidden_states), mask, **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.feed_forward(self.norm_after(hidden_states)), weights


@dataclass
class ForecastOutput(ModelOutput):
    """What a forecaster gives.

    Args:
        loss: mean squared error against the labels.
        prediction: the reading after each reading, (B, N, C).
        attentions: weights of every layer, (B, H, N, N), if asked for.
    """

    loss: Tensor | None = None
    prediction: Tensor | None = None
    attentions: tuple[Tensor, ...] | None = None


class FullPayForecaster(FullPayModelMixin, PreTrainedModel):
    """The model of this module. An untrained one predicts that nothing changes: the head starts at zero."""

    config_class = FullPayForecasterConfig
    base_model_prefix = "forecaster"
    main_input_name = "values"
    _supports_sdpa = True
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict = {STRENGTHS, "positions"}  # noqa: RUF012 - Transformers reads a class attribute

    def __init__(self, config: FullPayForecasterConfig) -> None:
        super().__init__(config)
        tables: dict[str, Any] = {"sinusoidal": Sinusoidal, "learned": Learned}
        table = tables.get(config.positions)
        self.embed = nn.Linear(config.channels, config.hidden_size)
        self.positions = None if table is None else table(config.hidden_size, config.context_length)
        self.layers = nn.ModuleList(ForecasterLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.channels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Sinusoidal):
            module.initialize()
        elif module is self.head:
            initialization.zeros_(module.weight)

    def forward(
        self,
        values: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> ForecastOutput:
        """Predictions for one window.

        Args:
            values: (B, N, C), N at most `context_length`; finite, but for pads.
            attention_mask: (B, N), 1 for readings and 0 for pads; None for no pads.
            labels: (B, N, C), the reading that follows each one; NaN where it is unknown.
            output_attentions: also return the weights.
            kwargs: what the plan reads besides, such as times and delays.

        Raises:
            ValueError: for another shape, a window longer than `context_length`, or NaN among the readings.
        """
        self._check(values)
        if values.shape[1] > self.config.context_length:
            raise ValueError(
                f"FullPayForecaster: expected at most context_length={self.config.context_length} readings, got "
                f"{values.shape[1]}. Give the last ones, or use predict(), which cuts them."
            )
        if attention_mask is not None and attention_mask.shape == values.shape[:2]:
            values = values.masked_fill(attention_mask[..., None] == 0, 0)  # whatever pads hold
        if not torch.compiler.is_compiling() and not values.isfinite().all():
            raise ValueError(
                "FullPayForecaster: expected finite values, got NaN or infinity. Fill gaps beforehand, or hide readings at "
                "the start by attention_mask."
            )
        if labels is not None and labels.shape != values.shape:
            raise ValueError(f"labels: expected the shape of values, {tuple(values.shape)}, got {tuple(labels.shape)}.")
        values = values.to(self.embed.weight.dtype)
        hidden_states = self.embed(values)
        if self.positions is not None:
            hidden_states = self.positions(hidden_states)
        mask = create_causal_mask(self.config, hidden_states, attention_mask, None)
        attentions: tuple[Any, ...] = ()
        for layer in self.layers:
            hidden_states, weights = layer(hidden_states, mask, output_attentions=output_attentions, **kwargs)
            attentions += (weights,)
        prediction = values + self.head(self.norm(hidden_states))
        loss = None
        if labels is not None:
            known = labels.isfinite()
            error = torch.where(known, prediction - labels.masked_fill(~known, 0), 0)
            loss = error.square().sum() / known.sum().clamp_min(1)
        return ForecastOutput(loss, prediction, attentions if output_attentions else None)

    @torch.no_grad()
    def predict(self, values: Tensor, horizon: int) -> Tensor:
        """The next `horizon` readings, each computed from the last `context_length` ones, predicted ones included.

        Args:
            values: (B, N, C), the past; N is at least 1.
            horizon: readings to predict.

        Returns:
            (B, horizon, C).

        Raises:
            ValueError: for another shape, or a horizon below 1.
        """
        self._check(values)
        check_count("predict(horizon)", horizon)
        found = values
        for _ in range(horizon):
            following = self(found[:, -self.config.context_length :]).prediction[:, -1:]
            found = torch.cat([found, following.to(found.dtype)], 1)
        return found[:, -horizon:]

    def _check(self, values: Tensor) -> None:
        channels = self.config.channels
        if not isinstance(values, Tensor) or values.is_complex():
            got = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"FullPayForecaster: expected values as a tensor of real numbers, got {got}.")
        if values.ndim != 3 or values.shape[1] == 0 or values.shape[2] != channels:
            raise ValueError(
                f"FullPayForecaster: expected values as (batch, readings, {channels}), got {tuple(values.shape)}."
            )


def register_forecaster() -> None:
    """Make AutoConfig and AutoModel load it. Calling it again changes nothing."""
    classes = REGISTERED.setdefault("AutoModel", set())
    if FullPayForecaster not in classes:
        AutoConfig.register(FullPayForecasterConfig.model_type, FullPayForecasterConfig)
        AutoModel.register(FullPayForecasterConfig, FullPayForecaster)
        classes.add(FullPayForecaster)
