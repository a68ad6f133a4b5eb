"""Gradient reach: how much of a position's output depends on near and on far inputs, end to end through a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def gradient_reach(
    run: Callable[[Tensor], Tensor],
    embeddings: Tensor,
    *,
    near: int = 5,
    far: int = 100,
    queries: int = 8,
    seed: int = 0,
) -> tuple[float, float]:
    """Mean gradient norm from outputs to near and to far inputs.

    For some query positions i the output is projected on a random direction, and the norm of the gradient with respect
    to every input embedding j is taken: an estimate of |d out_i / d embedding_j|.

    Args:
        run: maps embeddings (1, N, D) to outputs (1, N, D').
        embeddings: (1, N, D), without padding.
        near: how many nearest positions (other than i itself) count as near.
        far: distance from which a position counts as far.
        queries: number of query positions, evenly spread over the later half, so that causal models see far keys too.
        seed: of the random directions.

    Returns:
        (near, far): mean norms. Their ratio near / far is the figure to report.

    Raises:
        ValueError: for a sequence too short to have far positions.
    """
    length = embeddings.shape[1]
    if length < far + near + 2:
        raise ValueError(f"gradient_reach: expected at least {far + near + 2} tokens for far={far}, got {length}.")
    leaf = embeddings.detach().clone().requires_grad_()
    output = run(leaf)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(length, device=leaf.device)
    near_sum = far_sum = 0.0
    chosen = torch.linspace(max(length // 2, far + 1), length - 1, queries).long().tolist()
    for index, query in enumerate(chosen):
        direction = torch.randn(output.shape[-1], generator=generator).to(output)
        (gradient,) = torch.autograd.grad(output[0, query] @ direction, leaf, retain_graph=index < len(chosen) - 1)
        norms = gradient[0].norm(dim=-1)
        distance = query - positions
        near_sum += float(norms[(distance >= 1) & (distance <= near)].mean())
        far_sum += float(norms[distance >= far].mean())
    return near_sum / len(chosen), far_sum / len(chosen)
