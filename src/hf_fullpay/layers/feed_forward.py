"""Feed-forward layers: GELU and SwiGLU, on tokens of any leading shape (..., C).

    gelu     W2 gelu(W1 x)
    swiglu   W2 (silu(Wg x) * (W1 x))

SwiGLU has three matrices, so at equal cost it is two thirds as wide inside; `hidden` is what is asked for.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu

from hf_fullpay.core.errors import check_count, check_number


class GELUFeedForward(nn.Module):
    """Two matrices with a GELU between them.

    Args:
        width: C.
        hidden: width inside, None for 4 C.
        dropout: probability of dropping an inner channel.

    Source: Hendrycks & Gimpel 2016, "Gaussian error linear units", in the layer of Vaswani et al. 2017.
    """

    def __init__(self, width: int, hidden: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        hidden = _checked("GELUFeedForward", width, 4 * width if hidden is None else hidden, dropout)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """(..., C) to (..., C)."""
        _check_width("GELUFeedForward", tokens, self.up.in_features)
        return self.down(self.dropout(nn.functional.gelu(self.up(tokens))))


class SwiGLUFeedForward(nn.Module):
    """Three matrices: a gate through SiLU times a value, then down.

    Args:
        width: C.
        hidden: width inside, None for 8 C / 3 (as many parameters as GELU with 4 C).
        dropout: probability of dropping an inner channel.

    Source: Shazeer 2020, "GLU variants improve Transformer"; without biases, as there.
    """

    def __init__(self, width: int, hidden: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        hidden = _checked("SwiGLUFeedForward", width, max(8 * width // 3, 1) if hidden is None else hidden, dropout)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """(..., C) to (..., C)."""
        _check_width("SwiGLUFeedForward", tokens, self.up.in_features)
        return self.down(self.dropout(silu(self.gate(tokens)) * self.up(tokens)))


def _checked(name: str, width: int, hidden: int, dropout: float) -> int:
    check_count(f"{name}(width=...)", width)
    check_count(f"{name}(hidden=...)", hidden)
    check_number(f"{name}(dropout=...)", dropout, low=0, high=1, open_high=True)
    return hidden


def _check_width(name: str, tokens: Tensor, width: int) -> None:
    if tokens.ndim == 0 or tokens.shape[-1] != width:
        raise ValueError(f"{name}: expected tokens (..., {width}), got {tuple(tokens.shape)}.")


FEED_FORWARDS: dict[str, type[nn.Module]] = {"gelu": GELUFeedForward, "swiglu": SwiGLUFeedForward}
