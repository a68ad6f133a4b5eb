"""Window + global reach in pieces: chunks of queries with the keys around them, random blocks and the global keys, in one
softmax; and the global queries by themselves, over all keys. Time and memory grow with N.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D width; C rows of a chunk, P chunks, T global
tokens, R random blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_fullpay.core.draws import drawn_blocks
from hf_fullpay.core.places import origins
from hf_fullpay.core.visible import Visible
from hf_fullpay.fast.cut import Cut, Piece, spread, take, whole


def sliding_cut(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    allowed: Visible,
    half: int,
    tokens: tuple[int, ...] = (),
    named: Tensor | None = None,
    random_blocks: int = 0,
    seed: int = 0,
) -> Cut:
    """Pieces in which every query sees the keys at most `half` slots away, the global and the drawn ones.

    Args:
        query: (B, H, N, D).
        key: (B, G, M, D).
        value: (B, G, M, Dv).
        allowed: the model's mask, without a dense part or a window; without an offset N = M.
        half: reach of the window to each side.
        tokens: global positions, counted from the first key of a row that is no padding.
        named: (B or 1, M) bool, the global keys in place of `tokens`.
        random_blocks: number of blocks of max(half, 1) keys drawn for each block of queries.
        seed: of the draws.
    """
    if allowed.dense is not None or allowed.window is not None:
        raise ValueError("allowed: expected neither a dense part nor a window.")
    if not torch.compiler.is_exporting() and half >= max(allowed.n_queries, allowed.n_keys) - 1:
        return whole(query, key, value, allowed)  # the window holds everything
    if random_blocks and allowed.keys is not None:
        size = max(half, 1)
        first = origins(allowed.keys)
        return _aligned(
            query, key, value, allowed=allowed, named=named, move=-first % size, size=size,
            half=half, tokens=tokens, random_blocks=random_blocks, seed=seed,
        )  # fmt: skip
    return _cut(query, key, value, allowed, half, tokens, named, random_blocks, seed)


def step_cut(
    query: Tensor, key: Tensor, value: Tensor, *, allowed: Visible, half: int, tokens: tuple[int, ...]
) -> Cut | None:
    """One token of generation: a piece with the keys that the newest query sees, and no others. None where padding or a
    traced length leaves open which these are."""
    newest = allowed.n_keys - 1
    if allowed.keys is not None or allowed.offset not in (None, newest) or torch.compiler.is_compiling():
        return None
    low = max(newest - half, 0)
    if low == 0 or newest in tokens:
        return whole(query, key, value, allowed)
    far = torch.tensor([token for token in tokens if token < low], dtype=torch.long, device=key.device)
    rows = (torch.cat([rows.index_select(2, far), rows[:, :, low:]], 2) for rows in (key, value))
    key, value = rows
    return whole(query, key, value, Visible(1, key.shape[2], key.device))


def _aligned(
    query: Tensor, key: Tensor, value: Tensor, *, allowed: Visible, named: Tensor | None, move: Tensor, size: int,
    half: int, tokens: tuple[int, ...], random_blocks: int, seed: int,
) -> Cut:  # fmt: skip
    """`sliding_cut` of rows moved right, each by less than a block, such that its blocks begin where chunks do."""

    def moved(rows: Tensor, pad: int) -> Tensor:
        return take(rows, (torch.arange(rows.shape[2] + pad, device=rows.device) - move).clamp(0, rows.shape[2] - 1))

    assert allowed.keys is not None
    slots = torch.arange(allowed.n_keys + size, device=key.device) - move
    inside = (slots >= 0) & (slots < allowed.n_keys)
    flags = [allowed.keys] if named is None else [allowed.keys, named.expand_as(allowed.keys)]
    flags = [moved(flag[:, None, :, None], size)[:, 0, :, 0] & inside for flag in flags]
    n = allowed.n_queries
    longer = replace(allowed, n_queries=n + size, n_keys=allowed.n_keys + size, keys=flags[0])
    cut = _cut(
        moved(query, size), moved(key, size), moved(value, size), longer, half, tokens,
        None if named is None else flags[1], random_blocks, seed,
    )  # fmt: skip
    back = torch.arange(n, device=key.device) + move
    return Cut(cut.pieces, lambda parts: take(cut.join(parts), back))


def _cut(
    query: Tensor, key: Tensor, value: Tensor, allowed: Visible, half: int, tokens: tuple[int, ...],
    named: Tensor | None, random_blocks: int, seed: int,
) -> Cut:  # fmt: skip
    batch, device = query.shape[0], key.device
    # As in `band_attention`: shorter chunks waste fewer products on hidden pairs, longer ones fill the matrix units.
    size = max(half, 1) if random_blocks else 32 if half <= 64 else 64 if half <= 256 else 256
    chunks = _Chunks.of(allowed, size, -(-half // size))
    keys = allowed.keys
    if keys is None:
        keys = torch.ones(1, 1, dtype=torch.bool, device=device).expand(batch, allowed.n_keys)
    slots, valid, named = _global_slots(keys, tokens, named)
    # A key is counted once: global ones are not part of the window or of a random block.
    ordinary = (keys & ~named)[:, None, :, None]

    parts = [(chunks.around(key), chunks.around(value))]
    masks = [chunks.around(ordinary).mT & chunks.near(half, device)]
    if random_blocks:
        drawn = _drawn(keys, chunks, random_blocks, seed)
        parts.append((_rows_at(key, drawn), _rows_at(value, drawn)))
        there = _rows_at(ordinary, drawn).mT & (drawn >= 0).flatten(0, 1)[:, None, None]
        masks.append(there.expand(-1, 1, size, -1))
    if slots.shape[1]:
        parts.append((_to_each(take(key, slots), chunks.count), _to_each(take(value, slots), chunks.count)))
        seen = valid[:, None, None].expand(-1, chunks.count, size, -1)
        if chunks.causal:
            seen = seen & (slots[:, None, None] <= chunks.places(device)[..., None])
        masks.append(seen.flatten(0, 1)[:, None])
    together = [torch.cat(rows, 2) if len(rows) > 1 else rows[0] for rows in zip(*parts, strict=True)]
    seen_here = Visible(size, together[0].shape[2], device, dense=torch.cat(masks, -1))
    local = Piece(chunks.own(query), together[0], together[1], seen_here)
    if not slots.shape[1]:
        return Cut([local], lambda found: chunks.in_order(found[0], batch))
    far, number = _global_queries(query, key, value, allowed, slots, valid)

    def join(found: list[Tensor]) -> Tensor:
        everywhere = take(spread(found[1], batch, slots.shape[1]), number.clamp(min=0))
        return torch.where((number >= 0)[:, None, :, None], everywhere, chunks.in_order(found[0], batch))

    return Cut([local, far], join)


@dataclass(frozen=True)
class _Chunks:
    """`count` chunks of `size` queries. Chunk 0 begins at key slot base * size, `lead` slots before the first query."""

    count: int
    size: int
    sides: int  # chunks of keys before the own one and, without causality, after it
    base: int
    lead: int
    causal: bool
    queries: int
    keys: int

    @classmethod
    def of(cls, allowed: Visible, size: int, sides: int) -> _Chunks:
        base, lead = (allowed.offset or 0) // size, (allowed.offset or 0) % size
        rows = allowed.n_queries + lead
        # Traced, one chunk would be a case of its own: never fewer than two.
        count = rows // size + 2 if torch.compiler.is_compiling() else -(-rows // size)
        return cls(count, size, sides, base, lead, allowed.offset is not None, allowed.n_queries, allowed.n_keys)

    @property
    def pieces(self) -> int:
        """Chunks of keys around a chunk of queries."""
        return self.sides + 1 + (0 if self.causal else self.sides)

    def around(self, rows: Tensor) -> Tensor:
        """Keys around each chunk, (B, G, M, D) -> (B * P, G, pieces * C, D)."""
        front = (self.sides - self.base) * self.size
        back = (self.count + self.pieces - 1) * self.size - front - self.keys
        return self._windows(F.pad(rows, (0, 0, front, back)), self.pieces)

    def own(self, rows: Tensor) -> Tensor:
        """Queries of each chunk, (B, H, N, D) -> (B * P, H, C, D)."""
        return self._windows(F.pad(rows, (0, 0, self.lead, self.count * self.size - self.lead - self.queries)), 1)

    def in_order(self, part: Tensor, batch: int) -> Tensor:
        """(B * P, h, C, x) -> (B, h, N, x)."""
        part = part.unflatten(0, (batch, self.count))
        if torch.compiler.is_exporting():
            place = torch.arange(self.queries, device=part.device) + self.lead
            return part[:, place // self.size, :, place % self.size].permute(1, 2, 0, 3)
        return part.transpose(1, 2).flatten(2, 3)[:, :, self.lead : self.lead + self.queries]

    def near(self, half: int, device: torch.device) -> Tensor:
        """Which of the keys around a chunk lie in the window of each of its queries, (C, pieces * C)."""
        row = torch.arange(self.size, device=device)[:, None] + self.sides * self.size
        slot = torch.arange(self.pieces * self.size, device=device)
        near = (slot - row).abs() <= half
        return near & (slot <= row) if self.causal else near

    def places(self, device: torch.device) -> Tensor:
        """Key slot of each query, (P, C)."""
        place = torch.arange(self.count * self.size, device=device) + self.base * self.size
        return place.unflatten(0, (self.count, self.size))

    def _windows(self, rows: Tensor, pieces: int) -> Tensor:
        """(B, G, (pieces + P - 1) * C, D) -> (B * P, G, pieces * C, D), the window moving by C."""
        if torch.compiler.is_exporting():  # views of symbolic sizes would put conditions on the length
            cut = rows.unfold(2, pieces * self.size, self.size).transpose(3, 4)
        else:  # a cheaper gradient
            rows = rows.unflatten(2, (-1, self.size))
            cut = (
                torch.cat([rows[:, :, first : first + self.count] for first in range(pieces)], 3)
                if pieces > 1
                else rows
            )
        return cut.transpose(1, 2).flatten(0, 1)


def _global_queries(
    query: Tensor, key: Tensor, value: Tensor, allowed: Visible, slots: Tensor, valid: Tensor
) -> tuple[Piece, Tensor]:
    """The global queries with all keys, and which of them each query is, (B, N), -1 for none."""
    n, total, device = allowed.n_queries, slots.shape[1], key.device
    place = slots - (allowed.offset or 0)
    target = torch.where(valid & (place >= 0) & (place < n), place, n)
    number = torch.full((query.shape[0], n + 1), -1, device=device)
    number = number.scatter(1, target, torch.arange(total, device=device).expand_as(slots))[:, :n]
    before = None
    if allowed.offset is not None:
        before = (torch.arange(allowed.n_keys, device=device) <= slots[..., None])[:, None]
    visible = Visible(total, allowed.n_keys, device, keys=allowed.keys, dense=before)
    return Piece(take(query, place.clamp(0, n - 1)), key, value, visible), number


def _global_slots(keys: Tensor, tokens: tuple[int, ...], named: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of the global keys (B, T), which of them exist, and the same as flags (B, M)."""
    if named is None:
        length = keys.shape[1]
        first = origins(keys)
        slots = first + torch.tensor(tokens, dtype=torch.long, device=keys.device)
        valid = slots < length
        slots = slots.clamp(max=length - 1)
        valid = valid & keys.gather(1, slots)
        flags = torch.zeros_like(keys, dtype=torch.bool)
        flags = F.pad(flags, (0, 1)).scatter(1, torch.where(valid, slots, length), True)[:, :length]
        return slots, valid, flags
    flags = keys & named
    most = int(flags.sum(-1).max())
    slots = flags.int().sort(dim=-1, descending=True, stable=True).indices[:, :most]
    return slots, flags.gather(1, slots), flags


def _drawn(keys: Tensor, chunks: _Chunks, many: int, seed: int) -> Tensor:
    """Slots of the drawn keys, (B, P, R * C), -1 for none."""
    length, size = keys.shape[1], chunks.size
    first = origins(keys) // size
    last = (length - 1 - origins(keys.flip(-1))) // size
    own = torch.arange(chunks.count, device=keys.device) + chunks.base - first
    total = last - first + 1
    total = torch.minimum(total, own + 1) if chunks.causal else total.expand_as(own)
    block = drawn_blocks(own, total, many, seed)
    slots = (block + first[..., None])[..., None] * size + torch.arange(size, device=keys.device)
    return torch.where((block[..., None] >= 0) & (slots < length), slots, -1).flatten(2)


def _rows_at(rows: Tensor, slots: Tensor) -> Tensor:
    """(B, G, M, D) and (B, P, n) -> (B * P, G, n, D); slots of -1 give any row."""
    entry = torch.arange(rows.shape[0], device=rows.device)[:, None, None]
    return rows.transpose(1, 2)[entry, slots.clamp(min=0)].transpose(2, 3).flatten(0, 1)


def _to_each(rows: Tensor, chunks: int) -> Tensor:
    """(B, G, T, D) -> (B * P, G, T, D), the same for every chunk."""
    return rows[:, None].expand(-1, chunks, -1, -1, -1).flatten(0, 1)
