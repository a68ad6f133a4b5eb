"""Window + global reach: a sliding window, named global tokens, and blocks drawn at random.

    visible(i, j)  iff  |i - j| <= size // 2                      the window, half of `size` to each side
                    or  i or j is a global token                  which see all and are seen by all
                    or  j lies in a block drawn for the block of i

and always within the model's mask: in a decoder the window looks back only (size // 2 tokens and the query itself), a
global token sees what came before it, and all later queries see it. So WindowGlobal(2 * (k - 1), tokens=()) on a decoder
is Band(k). Distances are counted in slots; `tokens`, and blocks, from the first key that the mask lets a query see, so
padding on either side, packing and a cache change nothing.

Random blocks (BigBird) are size // 2 tokens long, at least one. Every block of queries sees `random_blocks` blocks out of
those between the first and the last key that it may see, never itself or its neighbours. They depend on `seed` and the
number of the block: the same in every layer and call.

Promise: the output of a query, and its gradient, depend on no key outside the reach. Cost: N x (size + globals + random
blocks x size / 2) scores, and globals x M.
Source: Beltagy et al. 2020, Longformer (size is its attention_window; there the global tokens have projections of their
own, here they share those of the model); Zaheer et al. 2020, BigBird (there the window consists of blocks, too).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_fullpay.core.draws import drawn_blocks
from hf_fullpay.core.errors import check_count, wrong
from hf_fullpay.core.visible import Visible
from hf_fullpay.reach.band import LONGEST

MASK = "global_attention_mask"
MOST = 1024  # random blocks and named tokens
SEEDS = 2**31 - 1


@dataclass(frozen=True)
class WindowGlobal:
    """Sliding window with global tokens and random blocks.

    Args:
        size: of the window: a query sees size // 2 tokens to each side.
        tokens: positions of the global tokens, counted from 0 at the first token that is no padding. A position counted
            from the end would move while a decoder generates; name the token in `global_attention_mask` instead.
        random_blocks: how many random blocks each block of queries sees.
        seed: which ones.

    The argument `global_attention_mask` of a call takes the place of `tokens`: (B, M), an entry for every key, non-zero
    where it is global. In a decoder keys past its end are not global, so a prompt's mask serves its continuation
    (`generate` of a stock model refuses arguments that its forward does not name: use `tokens` there).
    """

    size: int = 256
    tokens: tuple[int, ...] = (0,)
    random_blocks: int = 0
    seed: int = 0
    kind: ClassVar[str] = "window_global"
    inputs: ClassVar[tuple[str, ...]] = (MASK,)

    def __post_init__(self) -> None:
        check_count("WindowGlobal(size=...)", self.size, high=LONGEST)
        check_count("WindowGlobal(random_blocks=...)", self.random_blocks, low=0, high=MOST)
        check_count("WindowGlobal(seed=...)", self.seed, low=0, high=SEEDS)
        expected = f"up to {MOST} different positions, integers from 0 on"
        if isinstance(self.tokens, str) or not isinstance(self.tokens, Sequence):
            raise wrong("WindowGlobal(tokens=...)", expected, self.tokens)
        tokens = tuple(self.tokens)
        if len(tokens) > MOST or any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in tokens):
            hint = "Name tokens near the end in global_attention_mask."
            raise wrong("WindowGlobal(tokens=...)", expected, self.tokens, hint)
        if len(set(tokens)) < len(tokens) or max(tokens, default=0) > LONGEST:
            raise wrong("WindowGlobal(tokens=...)", expected, self.tokens)
        object.__setattr__(self, "tokens", tokens)

    @property
    def half(self) -> int:
        """How far the window reaches to each side."""
        return self.size // 2

    @property
    def sees(self) -> str:
        """What a query sees, for promises."""
        drawn = f" and {self.random_blocks} random blocks of {max(self.half, 1)}" if self.random_blocks else ""
        return f"a token, the {self.half} to each side, the global tokens{drawn}, and a global token sees all"

    def misfit(self, *, cross: bool, causal: bool, image: bool) -> str | None:
        """Why this reach makes no sense for an attention module; arguments as in `Full.misfit`."""
        if cross:
            return "a window has no meaning in cross-attention, whose queries and keys are different sequences"
        if image:
            return (
                "a window over a row of tokens has no meaning for patches, which lie on a grid: Windows(...) does that"
            )
        return None

    def named(self, allowed: Visible, given: Mapping[str, Any] | None, batch: int) -> Tensor | None:
        """The global keys of a call, (B or 1, M) bool, or None where `tokens` names them.

        Raises:
            ValueError: for a mask of a wrong shape, or tokens outside the sequence.
        """
        keys, whole = allowed.n_keys, allowed.n_queries == allowed.n_keys
        mask = (given or {}).get(MASK)
        if mask is None:
            if whole and max(self.tokens, default=0) >= keys:
                raise wrong("WindowGlobal(tokens=...)", f"positions below {keys}, the number of tokens", self.tokens)
            return None
        # Where a decoder writes, the mask of its prompt may be shorter (steps) or longer (pieces) than what is there.
        growing = not whole or allowed.offset is not None
        length = mask.shape[1] if isinstance(mask, Tensor) and mask.ndim == 2 else 0
        fits = length > 0 and (length == keys or (growing and length >= allowed.n_queries))
        if not fits or mask.shape[0] not in (1, batch):
            got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"{MASK}: expected an entry for every token, {(batch, keys)}, got {got}.")
        if mask.is_complex() or (not torch.compiler.is_compiling() and mask.isnan().any()):
            raise ValueError(f"{MASK}: expected bool, integers or floats without NaN, got {mask.dtype}.")
        found = mask.to(allowed.device) != 0
        return torch.nn.functional.pad(found, (0, keys - length)) if length != keys else found

    def restrict(self, allowed: Visible, given: Mapping[str, Any] | None = None, batch: int = 1) -> Visible:
        """Keys within reach, out of those that the mask allows, pair by pair: N x M, the reference.

        Raises:
            ValueError: as `named`, or if nothing places the queries among the keys.
        """
        named = self.named(allowed, given, batch)
        mask, slots = allowed.to_dense(), torch.arange(allowed.n_keys, device=allowed.device)
        place = _places(allowed, mask, slots)[..., None]  # of every query among the keys
        first = torch.where(mask, slots, allowed.n_keys).amin(-1, keepdim=True) % allowed.n_keys
        if named is None:
            tokens = torch.tensor(self.tokens, dtype=torch.long, device=allowed.device)
            everywhere = torch.isin(slots - first, tokens)
        else:
            everywhere = named[:, None, None]
        # A token that nobody may see is padding, and names nothing.
        everywhere, _ = torch.broadcast_tensors(everywhere & mask.any(-2, keepdim=True), mask[:, :, :, :1])
        inside = (place >= 0) & (place < allowed.n_keys)
        itself = place.clamp(0, allowed.n_keys - 1).expand(*everywhere.shape[:3], 1)
        seen = ((slots - place).abs() <= self.half) | everywhere | (everywhere.gather(-1, itself) & inside)
        if self.random_blocks:
            block = max(self.half, 1)
            own, last = (place - first) // block, torch.where(mask, slots, -1).amax(-1, keepdim=True)
            own, total = torch.broadcast_tensors(own, (last - first) // block + 1)
            drawn = drawn_blocks(own[..., 0], total[..., 0], self.random_blocks, self.seed)
            for number in range(self.random_blocks):
                seen = seen | ((slots - first) // block == drawn[..., number, None])
        return Visible(allowed.n_queries, allowed.n_keys, allowed.device, dense=mask & seen)


def _places(allowed: Visible, mask: Tensor, slots: Tensor) -> Tensor:
    """Slot of every query among the keys, broadcastable to (B, H, N).

    With a cache and a mask of pairs a query stands at the last key that it sees, its own slot in a decoder.
    """
    if allowed.offset is not None or allowed.n_queries == allowed.n_keys:
        queries = torch.arange(allowed.n_queries, device=allowed.device) + (allowed.offset or 0)
        return queries[None, None]
    if allowed.dense is None and allowed.n_queries > 1:
        raise ValueError(
            f"window: expected as many queries as keys or a causal mask that places them, got {allowed.n_queries} queries "
            f"and {allowed.n_keys} keys without one. A window has no meaning in cross-attention."
        )
    return torch.where(mask, slots, -1).amax(-1)
