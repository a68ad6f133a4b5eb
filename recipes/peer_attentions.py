"""Other ways past N x N, to compare with: linear attention (FAVOR+) and top-k attention, as named attention functions.

    python recipes/peer_attentions.py --list      what there is
    python recipes/peer_attentions.py             error against softmax attention, by number of features and keys

    import peer_attentions; peer_attentions.register()      then attn_implementation="peer_linear" or "peer_topk"

They are peers for tables, small and plain, and no part of the package: no fused kernels, no decoding in pieces, and no
promise about weights. Both see what the model's mask allows.

Dimensions: B batch, H heads, G key/value heads, N queries, M keys, D width, R random features.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask


def orthogonal_features(features: int, width: int, seed: int = 0) -> Tensor:
    """Random directions (R, D), orthogonal within every block of D, with the lengths of normal vectors."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for _ in range(math.ceil(features / width)):
        square = torch.randn(width, width, generator=generator, dtype=torch.float64)
        rotation, triangle = torch.linalg.qr(square)
        # Without the signs the directions are not uniform, and the estimate is biased however many there are.
        blocks.append((rotation * triangle.diagonal().sign()).T)
    lengths = torch.randn(features, width, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
    return torch.cat(blocks)[:features] * lengths


def positive_features(rows: Tensor, directions: Tensor) -> Tensor:
    """exp(w . x - |x|^2 / 2), of which the mean product over w is exp(q . k): (B, H, N, R).

    Source: Choromanski et al. 2021, "Rethinking attention with Performers". The exponent never exceeds |w|^2 / 2; the
    largest such number is taken out, which cancels in the ratio. (The source takes out the largest exponent of all keys,
    through which a causal query would learn of later ones.)
    """
    exponent = rows @ directions.T.to(rows) - rows.square().sum(-1, keepdim=True) / 2
    return torch.exp(exponent - float(directions.square().sum(-1).max()) / 2)


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, keys: Tensor | None = None, causal: bool = False,
    features: int = 256, seed: int = 0,
) -> Tensor:  # fmt: skip
    """FAVOR+: softmax attention through R random features, N R D products in place of N M D. In FP64: its exponents
    spread far, and a peer should lose by its idea alone.

    Args:
        query: (B, H, N, D).
        key: (B, H, M, D).
        value: (B, H, M, Dv).
        scaling: factor of the scores.
        keys: (B, M) bool, False for padding.
        causal: query i sees keys j <= i (N = M).
        features: R.
        seed: of the directions.

    Returns:
        (B, H, N, Dv).
    """
    directions = orthogonal_features(features, query.shape[-1], seed).to(query.device)
    of_query = positive_features(query.double() * scaling**0.5, directions)
    of_key = positive_features(key.double() * scaling**0.5, directions)
    if keys is not None:
        of_key = of_key * keys[:, None, :, None]
    ones = torch.ones_like(value[..., :1], dtype=torch.float64)
    told = torch.cat([value.double(), ones], -1)
    mixed = _causal(of_query, of_key, told) if causal else of_query @ (of_key.mT @ told)
    return (mixed[..., :-1] / mixed[..., -1:].clamp_min(1e-300)).to(value.dtype)


def _causal(of_query: Tensor, of_key: Tensor, told: Tensor, size: int = 64) -> Tensor:
    """Running sums over blocks; inside a block the plain triangle."""
    state, found = 0.0, []
    for start in range(0, of_query.shape[2], size):
        q, k, v = (x[:, :, start : start + size] for x in (of_query, of_key, told))
        found.append((q @ k.mT).tril() @ v + (q @ state if start else 0.0))
        state = state + k.mT @ v
    return torch.cat(found, 2)


def topk_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, visible: Tensor | None = None, count: int = 32
) -> Tensor:
    """Softmax over the `count` largest scores of each row, as a routed attention chooses; the rest gets nothing.

    The scores are computed in full: this is the quality that a perfect router could have, not its speed.

    Source: Gupta et al. 2021, "Memory-efficient Transformers via top-k attention".

    Args:
        visible: bool that broadcasts to (B, H, N, M).
    """
    scores = (query @ key.mT).float() * scaling
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    largest = scores.topk(min(count, scores.shape[-1]), -1).values[..., -1:]
    weights = torch.softmax(scores.masked_fill(scores < largest, -torch.inf), -1).nan_to_num()
    return weights.to(value.dtype) @ value


def _shared(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    repeat = query.shape[1] // key.shape[1]
    return key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)


def _linear(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """A mask says either causality or nothing, and padding; anything else has no linear form."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    n, m = query.shape[2], key.shape[2]
    causal, keys = False, None
    if mask is not None:
        if n != m:
            raise ValueError(
                f"peer_linear: expected as many queries as keys, got {n} and {m}: call with use_cache=False."
            )
        keys = mask[:, 0].any(1)
        causal = bool(
            (mask[:, 0] == (keys[:, None] & torch.ones(n, n, dtype=torch.bool, device=mask.device).tril())).all()
        )
        if not causal and not bool((mask[:, 0] == keys[:, None]).all()):
            raise ValueError("peer_linear: expected a causal mask or padding alone, got another pattern of pairs.")
    key, value = _shared(module, query, key, value)
    output = linear_attention(query, key, value, scaling=scaling, keys=keys, causal=causal)
    return output.transpose(1, 2).contiguous(), None


def _topk(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    key, value = _shared(module, query, key, value)
    output = topk_attention(query, key, value, scaling=scaling, visible=mask)
    return output.transpose(1, 2).contiguous(), None


def _always(**kwargs: Any) -> Tensor | None:
    """The mask as pairs, never left out: a peer must not guess whether it is causal."""
    return sdpa_mask(**kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


@dataclass(frozen=True)
class Peer:
    """A name, what it is, and its attention function."""

    name: str
    about: str
    function: Callable[..., tuple[Tensor, None]]


PEERS = (
    Peer("peer_linear", "FAVOR+, 256 orthogonal random features; N x 256 x D products", _linear),
    Peer("peer_topk", "softmax over the 32 largest scores of a row; all scores are computed", _topk),
)


def register() -> tuple[str, ...]:
    """Make the peers known to Transformers; returns their names."""
    for peer in PEERS:
        AttentionInterface.register(peer.name, peer.function)
        AttentionMaskInterface.register(peer.name, _always)
    return tuple(peer.name for peer in PEERS)


def distances(n: int = 512, width: int = 64) -> list[str]:
    """Relative error against softmax attention on random tensors, flat rows and sharper ones, as lines of a table."""
    torch.manual_seed(0)
    rows, key, value = (torch.randn(1, 4, n, width) for _ in range(3))
    scaling = width**-0.5
    lines = [f"relative error against softmax attention, {n} random tokens, width {width}, by deviation of the scores"]
    runs = [("linear", "features", linear_attention, features) for features in (32, 128, 512, 2048)]
    runs += [("top-k", "keys", topk_attention, count) for count in (8, 32, 128, n)]
    lines.append(f"{'':<24}" + "".join(f"{deviation:>8}" for deviation in (0.25, 0.5, 1.0)))
    for name, unit, run, count in runs:
        option = {"features" if unit == "features" else "count": count}
        errors = []
        for deviation in (0.25, 0.5, 1.0):
            query, keys = rows * deviation**0.5, key * deviation**0.5
            truth = nn.functional.scaled_dot_product_attention(query, keys, value)
            found = run(query, keys, value, scaling=scaling, **option)
            errors.append(f"{float((found - truth).norm() / truth.norm()):8.3f}")
        lines.append(f"  {name:<8}{count:>5} {unit:<8}" + "".join(errors))
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="names, and what they are")
    parser.add_argument("--tokens", type=int, default=512, help="length of the comparison (512)")
    options = parser.parse_args(arguments)
    if options.tokens < 1:
        parser.error(f"--tokens: expected an integer of at least 1, got {options.tokens}")
    lines = [f"{peer.name:<14}{peer.about}" for peer in PEERS] if options.list else distances(options.tokens)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
