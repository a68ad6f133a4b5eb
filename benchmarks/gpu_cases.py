"""What is to be measured on a GPU. The table is rendered from this list, measured or not, so nothing can be forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cases import DIRECTIONS, allows
from hf_fullpay import PRESETS, AttentionPlan, Softmax
from hf_fullpay.backends import LACKS, lacks

PLAIN = "plain"
SDPA = ("cudnn", "flash", "efficient", "math")


@dataclass(frozen=True)
class Shape:
    """Batch, heads, keys and width; as many queries as keys, or the last one alone."""

    label: str
    batch: int
    heads: int
    keys: int
    width: int
    decode: bool = False

    @property
    def queries(self) -> int:
        return 1 if self.decode else self.keys

    @property
    def whole(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.keys, self.width


SHAPES = (
    Shape("4 x 32 x 4,096 x 128", 4, 32, 4096, 128),
    Shape("1 x 32 x 16,384 x 128", 1, 32, 16384, 128),
    Shape("8 x 12 x 512 x 64", 8, 12, 512, 64),
    Shape("decode, 1 x 32 x 16,384 x 128", 1, 32, 16384, 128, decode=True),
)


@dataclass(frozen=True)
class Group:
    """What is timed together, in the same rounds: one shape, causality and direction."""

    shape: Shape
    is_causal: bool
    direction: str


@dataclass(frozen=True)
class Contender:
    """A backend of ordinary attention or of a preset.

    Args:
        name: "plain" or a preset.
        backend: "sdpa:cudnn" and its like, "torch" (ours on torch operators), "triton" (our kernels), "flex",
            "flash_window" (FlashAttention's sliding window inside torch) or "flash_attn" (the package).
        reason: why it cannot run, known from the plan alone.
    """

    name: str
    backend: str
    reason: str = ""


def plan_of(name: str) -> AttentionPlan:
    return AttentionPlan() if name == PLAIN else PRESETS[name]


def groups(shapes: Sequence[Shape] = SHAPES) -> Iterator[Group]:
    """All groups; one query sees all keys, causal or not, and needs no gradient."""
    for shape in shapes:
        for is_causal in (True,) if shape.decode else (False, True):
            for direction in DIRECTIONS[: 1 if shape.decode else 2]:
                yield Group(shape, is_causal, direction)


def contenders(names: Sequence[str] | None, is_causal: bool, decode: bool) -> Iterator[Contender]:
    """All contenders of a group."""
    yield from (Contender(PLAIN, f"sdpa:{backend}") for backend in SDPA)
    for name in (PLAIN, *(names or PRESETS)):
        plan = plan_of(name)
        if not allows(plan, is_causal):
            continue
        if name != PLAIN:
            yield Contender(name, "torch")
        cached = LACKS["triton"]["relays of a cache"] if decode and plan.reach.kind == "blocks" else ""
        yield Contender(name, "triton", lacks("triton", plan) or cached)
        yield Contender(name, "flex", "one query: not compared" if decode else lacks("flex", plan) or "")
        if plan.reach.kind == "band" and isinstance(plan.payment, Softmax) and not decode:
            yield Contender(name, "flash_window")
            yield Contender(name, "flash_attn")
