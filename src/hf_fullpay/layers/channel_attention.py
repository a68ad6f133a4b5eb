"""Channel attention: what all tokens hold together decides how much of each channel goes on.

    gate_c = 2 sigmoid(W2 relu(W1 mean_n x_n))_c          out_nc = gate_c * x_nc

Dimensions: B batch, N tokens, C channels, R = C / reduction.

Promise: W2 and its bias start at zero, so the gate starts at exactly 1 and a converted checkpoint keeps its outputs bit
for bit; the gate stays within (0, 2). Cost: N x C products and 2 C x R per image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_fullpay.core.errors import check_count
from hf_fullpay.core.shapes import check_tokens


class SqueezeExcite(nn.Module):
    """Channel attention as squeeze-and-excitation, over the tokens of an image.

    Args:
        width: C.
        reduction: C over the width of the bottleneck, which has at least one channel.

    Source: Hu et al. 2018, "Squeeze-and-excitation networks". Different: tokens (class tokens included) take the place
    of pixels, and the gate is twice the sigmoid, which can start as the identity.
    """

    def __init__(self, width: int, reduction: int = 16) -> None:
        super().__init__()
        check_count("SqueezeExcite(width=...)", width)
        check_count("SqueezeExcite(reduction=...)", reduction)
        self.squeeze = nn.Linear(width, max(width // reduction, 1))
        self.excite = nn.Linear(self.squeeze.out_features, width)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Fill every parameter that no checkpoint filled. W1 must not be zero too, or nothing would ever learn."""
        for name, parameter in self.named_parameters():
            if getattr(parameter, "_is_hf_initialized", False):
                continue
            if name == "squeeze.weight":
                nn.init.kaiming_uniform_(parameter, nonlinearity="relu")
            else:
                parameter.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, C) to (B, N, C), in the type of tokens.

        Raises:
            ValueError: for another shape.
        """
        check_tokens("SqueezeExcite", tokens, self.squeeze.in_features)
        mean = tokens.mean(1, keepdim=True, dtype=torch.promote_types(tokens.dtype, torch.float32))
        hidden = torch.relu(self.squeeze(mean.to(self.squeeze.weight.dtype)))
        return tokens * (2 * torch.sigmoid(self.excite(hidden))).to(tokens.dtype)
