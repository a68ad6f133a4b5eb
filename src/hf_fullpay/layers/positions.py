"""Positions: sinusoidal and learned ones are added to the tokens, rotary ones turn queries and keys.

Dimensions: B batch, H heads, N tokens, C width of a token, D width of a head.

    sinusoidal   p[n, 2c] = sin(n / base^(2c / C)),  p[n, 2c + 1] = cos(n / base^(2c / C))
    learned      p[n] is a parameter
    rotary       each pair (x[c], x[c + D/2]) of a head is turned by the angle n / base^(2c / D)

Promise: beyond their length sinusoidal and learned positions raise, they never wrap or clip. Rotary scores depend on
the distance of two tokens alone, however far both are from the start. Cost: N x C additions, or 4 N x D products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_fullpay.core.errors import check_count, check_number, wrong
from hf_fullpay.core.shapes import check_tokens


def _angles(positions: Tensor, width: int, base: float) -> Tensor:
    """n / base^(2c / width) in FP64, (N, width // 2): in FP32 an angle of 10,000 is off by half a thousandth."""
    rates = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width)
    return positions.to(torch.float64)[:, None] * rates


def _check_span(name: str, start: int, count: int, length: int) -> None:
    check_count(f"{name}(start=...)", start, low=0)
    if start + count > length:
        raise ValueError(
            f"{name}: expected positions below its length {length}, got {start} to {start + count - 1}. Build it with a "
            "greater length, or feed a shorter sequence."
        )


class Sinusoidal(nn.Module):
    """Fixed sines and cosines, computed in FP64 and kept in FP32.

    The table is a persistent buffer, so that a checkpoint holds it: `from_pretrained` empties other buffers. It stays
    in FP32 when the model is cast.

    Args:
        width: C, even.
        length: number of positions.
        base: longest wavelength over 2 pi.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.5. Different: an error past the length,
    where the formula would go on.
    """

    table: Tensor

    def __init__(self, width: int, length: int, base: float = 10_000.0) -> None:
        super().__init__()
        check_count("Sinusoidal(width=...)", width, low=2)
        if width % 2:
            raise wrong("Sinusoidal(width=...)", "an even number", width)
        check_count("Sinusoidal(length=...)", length)
        check_number("Sinusoidal(base=...)", base, low=1, open_low=True)
        self.width, self.length, self.base = width, length, base
        self.register_buffer("table", self._table())

    def _table(self) -> Tensor:
        angles = _angles(torch.arange(self.length), self.width, self.base)
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(1).float()

    def initialize(self) -> None:
        """Fill the table anew, where a loader left it empty."""
        with torch.no_grad():
            self.table.copy_(self._table())

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        kept = self.table
        super()._apply(fn, *args, **kwargs)
        if self.table.dtype != torch.float32:
            self.table = kept.to(self.table.device)
        return self

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Tokens (B, N, C) plus their positions start .. start + N - 1, in the type of tokens.

        Raises:
            ValueError: past the length, or for tokens of another width.
        """
        check_tokens("Sinusoidal", tokens, self.width)
        _check_span("Sinusoidal", start, tokens.shape[1], self.length)
        return tokens + self.table[start : start + tokens.shape[1]].to(tokens.dtype)

    def extra_repr(self) -> str:
        return f"width={self.width}, length={self.length}, base={self.base:g}"


class Learned(nn.Module):
    """One learned vector per position.

    Args:
        width: C.
        length: number of positions.

    Source: Gehring et al. 2017, "Convolutional sequence to sequence learning", as BERT and GPT-2 use it.
    """

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        check_count("Learned(width=...)", width)
        check_count("Learned(length=...)", length)
        self.length = length
        self.embedding = nn.Embedding(length, width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Tokens (B, N, C) plus their positions start .. start + N - 1, in the type of tokens.

        Raises:
            ValueError: past the length, or for tokens of another width.
        """
        check_tokens("Learned", tokens, self.embedding.embedding_dim)
        _check_span("Learned", start, tokens.shape[1], self.length)
        places = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        return tokens + self.embedding(places).to(tokens.dtype)


class Rotary(nn.Module):
    """Turns queries and keys by angles that grow with their positions. It has no length and holds no tensor.

    Args:
        width: D, even.
        base: longest wavelength over 2 pi.

    Source: Su et al. 2021, "RoFormer". Different: channel c is paired with c + D/2, as in Llama, instead of its
    neighbour; angles are computed in FP64.
    """

    def __init__(self, width: int, base: float = 10_000.0) -> None:
        super().__init__()
        check_count("Rotary(width=...)", width, low=2)
        if width % 2:
            raise wrong("Rotary(width=...)", "an even number", width)
        check_number("Rotary(base=...)", base, low=1, open_low=True)
        self.width, self.base = width, base

    def forward(self, query: Tensor, key: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Query (B, H, N, D) and key (B, G, N, D) at positions start .. start + N - 1, turned, in their types.

        Raises:
            ValueError: for another width, or other lengths of the two.
        """
        check_count("Rotary(start=...)", start, low=0)
        for name, rows in (("query", query), ("key", key)):
            if rows.ndim != 4 or rows.shape[2:] != (query.shape[2], self.width) or not rows.is_floating_point():
                raise ValueError(
                    f"Rotary: expected {name} as floating (batch, heads, {query.shape[-2]}, {self.width}), got {rows.dtype} "
                    f"{tuple(rows.shape)}."
                )
        places = torch.arange(start, start + query.shape[2], device=query.device)
        angles = _angles(places, self.width, self.base)
        cosine, sine = angles.cos().float(), angles.sin().float()
        return _turn(query, cosine, sine), _turn(key, cosine, sine)

    def extra_repr(self) -> str:
        return f"width={self.width}, base={self.base:g}"


def _turn(rows: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    first, second = rows.to(wide).chunk(2, -1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1).to(rows.dtype)
