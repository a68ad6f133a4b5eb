"""Window + global reach in pieces: chunks of queries with the keys around them, random blocks and the global keys, in one
softmax; and the global queries by themselves, over all keys. Time and memory grow with N.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D width; C rows of a chunk, P chunks, T global
tokens, R random blocks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_fullpay.core.draws import drawn_blocks
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
        first = allowed.keys.int().argmax(-1, keepdim=True)
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
    n, causal, offset = allowed.n_queries, allowed.offset is not None, allowed.offset or 0
    # As in `band_attention`: shorter chunks waste fewer products on hidden pairs, longer ones fill the matrix units.
    size = max(half, 1) if random_blocks else 32 if half <= 64 else 64 if half <= 256 else 256
    sides = -(-half // size)
    pieces = sides + 1 + (0 if causal else sides)
    # Chunk 0 begins at slot base * size, `lead` slots before the first query.
    base, lead = offset // size, offset % size
    # Traced, one chunk would be a case of its own: never fewer than two.
    chunks = (n + lead) // size + 2 if torch.compiler.is_compiling() else -(-(n + lead) // size)
    front = (sides - base) * size
    back = (chunks + pieces - 1) * size - front - allowed.n_keys

    def around(rows: Tensor) -> Tensor:
        return windows(F.pad(rows, (0, 0, front, back)), pieces, chunks, size)

    keys = allowed.keys
    if keys is None:
        keys = torch.ones(1, 1, dtype=torch.bool, device=device).expand(batch, allowed.n_keys)
    slots, valid, named = _global_slots(keys, tokens, named)

    row = torch.arange(size, device=device)[:, None] + sides * size
    slot = torch.arange(pieces * size, device=device)
    near = (slot - row).abs() <= half
    near = near & (slot <= row) if causal else near
    # A key is counted once: global ones are not part of the window or of a random block.
    ordinary = (keys & ~named)[:, None, :, None]
    parts, masks = [(around(key), around(value))], [around(ordinary).transpose(2, 3) & near]
    if random_blocks:
        drawn = _drawn(keys, base, chunks, size, causal, random_blocks, seed)
        parts.append((_rows_at(key, drawn), _rows_at(value, drawn)))
        there = _rows_at(ordinary, drawn).transpose(2, 3) & (drawn >= 0).flatten(0, 1)[:, None, None]
        masks.append(there.expand(-1, 1, size, -1))
    if slots.shape[1]:
        parts.append((_to_each(take(key, slots), chunks), _to_each(take(value, slots), chunks)))
        seen = valid[:, None, None].expand(-1, chunks, size, -1)
        if causal:
            place = torch.arange(chunks * size, device=device).unflatten(0, (chunks, size)) + base * size
            seen = seen & (slots[:, None, None] <= place[..., None])
        masks.append(seen.flatten(0, 1)[:, None])
    mask = torch.cat(masks, -1)
    own = windows(F.pad(query, (0, 0, lead, chunks * size - lead - n)), 1, chunks, size)
    keys_of, values_of = (torch.cat(rows, 2) if len(rows) > 1 else rows[0] for rows in zip(*parts, strict=True))
    local = Piece(own, keys_of, values_of, Visible(size, keys_of.shape[2], device, dense=mask))
    if not slots.shape[1]:
        return Cut([local], lambda found: _in_order(found[0], batch, chunks, size, lead, n))

    # Each global query sees every key; `number` says which of them a query is, if any.
    place = slots - offset
    valid = valid & (place >= 0) & (place < n)
    number = torch.full((batch, n + 1), -1, device=device)
    number = number.scatter(
        1, torch.where(valid, place, n), torch.arange(slots.shape[1], device=device).expand_as(slots)
    )
    number = number[:, :n]
    before = torch.arange(allowed.n_keys, device=device) <= slots[..., None] if causal else None
    seen_by = Visible(
        slots.shape[1], allowed.n_keys, device, keys=allowed.keys, dense=None if before is None else before[:, None]
    )
    far = Piece(take(query, place.clamp(0, n - 1)), key, value, seen_by)

    def join(found: list[Tensor]) -> Tensor:
        rows = _in_order(found[0], batch, chunks, size, lead, n)
        everywhere = take(spread(found[1], batch, slots.shape[1]), number.clamp(min=0))
        return torch.where((number >= 0)[:, None, :, None], everywhere, rows)

    return Cut([local, far], join)


def windows(rows: Tensor, pieces: int, chunks: int, size: int) -> Tensor:
    """(B, G, (pieces + P - 1) * C, D) -> (B * P, G, pieces * C, D), the window moving by C."""
    if torch.compiler.is_exporting():  # views of symbolic sizes would put conditions on the length
        cut = rows.unfold(2, pieces * size, size).transpose(3, 4)
    else:  # a cheaper gradient
        rows = rows.unflatten(2, (-1, size))
        cut = torch.cat([rows[:, :, first : first + chunks] for first in range(pieces)], 3) if pieces > 1 else rows
    return cut.transpose(1, 2).flatten(0, 1)


def _in_order(part: Tensor, batch: int, chunks: int, size: int, lead: int, n: int) -> Tensor:
    """(B * P, h, C, x) -> (B, h, N, x)."""
    part = part.unflatten(0, (batch, chunks))
    if torch.compiler.is_exporting():
        place = torch.arange(n, device=part.device) + lead
        return part[:, place // size, :, place % size].permute(1, 2, 0, 3)
    return part.transpose(1, 2).flatten(2, 3)[:, :, lead : lead + n]


def _global_slots(keys: Tensor, tokens: tuple[int, ...], named: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of the global keys (B, T), which of them exist, and the same as flags (B, M)."""
    if named is None:
        length = keys.shape[1]
        first = keys.int().argmax(-1, keepdim=True)
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


def _drawn(keys: Tensor, base: int, chunks: int, size: int, causal: bool, many: int, seed: int) -> Tensor:
    """Slots of the drawn keys, (B, P, R * C), -1 for none."""
    length = keys.shape[1]
    first = keys.int().argmax(-1, keepdim=True) // size
    last = (length - 1 - keys.flip(-1).int().argmax(-1, keepdim=True)) // size
    own = torch.arange(chunks, device=keys.device) + base - first
    total = last - first + 1
    total = torch.minimum(total, own + 1) if causal else total.expand_as(own)
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
