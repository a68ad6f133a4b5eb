"""Pattern matching: which of a few typical courses of the past a sensor just went through, told to its key.

For the window x_i of the last S readings of sensor i, and K centroids c_k, all learned:

    u_i = Wu x_i      m_k = Wm c_k      a_ik = softmax_k(u_i . m_k / sqrt(C))      key_i += Wc sum_k a_ik c_k

Dimensions: B batch, N sensors (tokens), S readings in a window, K centroids, C width of a key.

Promise: Wc starts at zero, so the keys start unchanged; another sensor's past never enters a sensor's key.
Cost: N x K x C products.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_fullpay.core.errors import check_count
from hf_fullpay.core.shapes import check_tokens


class PatternMatch(nn.Module):
    """Adds the matched pattern of each sensor's recent past to its key.

    Args:
        width: C, the width of the keys before they are cut into heads.
        window: S, the readings within the propagation delay.
        patterns: K.

    Source: Jiang et al. 2023, "PDFormer: propagation delay-aware dynamic long-range transformer", the delay-aware
    feature transformation. Different: the centroids are learned with the model, where the source clusters historical
    windows beforehand with k-Shape (start from windows of the training data with `seed_from`); the scores are divided
    by sqrt(C); Wc starts at zero. This is no bias of the scores: that is `DelayBias`.
    """

    def __init__(self, width: int, window: int, patterns: int) -> None:
        super().__init__()
        for option, value in (("width", width), ("window", window), ("patterns", patterns)):
            check_count(f"PatternMatch({option}=...)", value)
        self.window = window
        self.centroids = nn.Parameter(torch.randn(patterns, window))
        self.of_past = nn.Linear(window, width, bias=False)
        self.of_centroid = nn.Linear(window, width, bias=False)
        self.to_key = nn.Linear(window, width, bias=False)
        nn.init.zeros_(self.to_key.weight)

    @torch.no_grad()
    def seed_from(self, windows: Tensor) -> None:
        """Start the centroids from windows (any number of them, S) of the training data, drawn at random.

        Raises:
            ValueError: for windows of another length or with NaN, or fewer than there are centroids.
        """
        patterns = self.centroids.shape[0]
        if windows.ndim != 2 or windows.shape[1] != self.window or windows.shape[0] < patterns:
            raise ValueError(
                f"PatternMatch.seed_from: expected at least {patterns} windows of {self.window} readings, got shape "
                f"{tuple(windows.shape)}."
            )
        if not windows.isfinite().all():
            raise ValueError("PatternMatch.seed_from: expected finite readings, got NaN or infinity.")
        self.centroids.copy_(windows[torch.randperm(windows.shape[0])[:patterns]])

    def match(self, past: Tensor) -> Tensor:
        """Share of each centroid in the windows past (B, N, S): (B, N, K), rows sum to one.

        Raises:
            ValueError: for windows of another length, or with NaN.
        """
        if past.ndim != 3 or past.shape[-1] != self.window:
            raise ValueError(
                f"PatternMatch: expected the past as (batch, sensors, {self.window}), got {tuple(past.shape)}."
            )
        if not torch.compiler.is_compiling() and not past.isfinite().all():
            raise ValueError("PatternMatch: expected finite readings, got NaN or infinity. Fill gaps beforehand.")
        query, memory = self.of_past(past.to(self.of_past.weight.dtype)), self.of_centroid(self.centroids)
        return torch.softmax(query @ memory.T / query.shape[-1] ** 0.5, -1)

    def forward(self, key: Tensor, past: Tensor) -> Tensor:
        """Keys (B, N, C) with the matched pattern of the windows past (B, N, S) added.

        Raises:
            ValueError: as `match`, or for keys of another width or of other sensors.
        """
        check_tokens("PatternMatch", key, self.to_key.out_features)
        if past.shape[:2] != key.shape[:2]:
            raise ValueError(
                f"PatternMatch: expected a window for each key, {(*key.shape[:2], self.window)}, got {tuple(past.shape)}."
            )
        return key + self.to_key(self.match(past) @ self.centroids).to(key.dtype)
