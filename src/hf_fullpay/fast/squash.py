"""The squashing of bounded scores on a CPU: torch's tanh takes ten times as long there as its sigmoid."""

from __future__ import annotations

import torch
from torch import Tensor

# Largest amplitude at which a sigmoid is accurate enough in place of the tanh.
SIGMOID_AMPLITUDE = {torch.float64: 8.0, torch.float32: 8.0, torch.bfloat16: 1024.0, torch.float16: 1024.0}
# tanh(y) / y for |y| up to a limit in powers of y * y: Chebyshev fits in float64, off by 4e-9 at most.
SERIES = {
    0.11: (0.9999999970377246, -0.3333289224449812, 0.13235938357660257),
    0.25: (0.9999999975359695, -0.3333320672776341, 0.133231448943307, -0.05132901220336649),
    0.625: (0.9999999961636132, -0.33333261641809997, 0.13331150161448432, -0.05372267934510682, 0.020595679962702847,
            -0.005664775357766299),
}  # fmt: skip
_SERIES = [(limit**2, torch.tensor(terms[:-1]).unbind(), terms[-1]) for limit, terms in SERIES.items()]
STRAIGHT = 2.0**60  # a width in place of infinity: tanh(x / width) * width == x


def tanh(y: Tensor, out: Tensor | None = None) -> Tensor:
    """tanh in a third of the time that torch takes on a CPU, and within two roundings of it."""
    if y.device.type != "cpu":
        return torch.tanh(y, out=out)
    if y.dtype == torch.float32:
        square = y * y
        farthest = square.amax()
        for limit, terms, last in _SERIES:
            if farthest <= limit:
                series = torch.add(terms[-1], square, alpha=last)
                for term in terms[-2::-1]:
                    torch.addcmul(term, series, square, out=series)
                return torch.mul(series, y, out=out)
    # From 20 on the quotient rounds to 1, and later e would overflow.
    e = torch.mul(y, 2.0, out=out).clamp_(max=40.0).expm1_()
    return e.div_(e + 2.0)
