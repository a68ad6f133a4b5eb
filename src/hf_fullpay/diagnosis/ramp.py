"""Colours of numbers: a scale, the viridis ramp on it, and rows of numbers as a small PNG file.

Viridis grows evenly in lightness, so that it is read without telling hues apart and in grey print. It is interpolated
between eleven of its colours (Nathaniel Smith and Stéfan van der Walt, CC0).
"""

from __future__ import annotations

import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass

_STEPS = ["440154", "482475", "414487", "355f8d", "2a788e", "21918c", "22a884", "44bf70", "7ad151", "bddf26", "fde725"]
_ANCHORS = [tuple(bytes.fromhex(step)) for step in _STEPS]
_DECADES = 5  # of a logarithmic scale, at most: what is smaller has the lowest colour


@dataclass(frozen=True)
class Scale:
    """Where a number lies between the least and the largest of a picture, or of two pictures side by side.

    Args:
        low, high: the two ends.
        log: whether it is logarithmic.
    """

    low: float
    high: float
    log: bool = False

    @classmethod
    def of(cls, numbers: Iterable[float], log: bool = False) -> Scale:
        """The scale that holds all finite numbers; a logarithmic one the positive ones, down to 1e-5 of the largest."""
        finite = [number for number in numbers if math.isfinite(number) and (number > 0 or not log)]
        if not finite:
            return cls(1.0, 1.0, log) if log else cls(0.0, 0.0)
        low, high = min(finite), max(finite)
        return cls(max(low, high * 10.0**-_DECADES), high, True) if log else cls(low, high)

    def share(self, number: float) -> float:
        """0 at the low end, 1 at the high end, a half where both are one."""
        low, high = self._on_axis(self.low), self._on_axis(self.high)
        if not high > low:
            return 0.5
        # Halves, because high - low of the largest floats would be infinite.
        return min(1.0, max(0.0, (self._on_axis(number) / 2 - low / 2) / (high / 2 - low / 2)))

    def _on_axis(self, number: float) -> float:
        if not self.log:
            return number
        return math.log10(number) if number > 0 else -math.inf


def colour(share: float) -> str:
    """The ramp at a share from 0 to 1, as #rrggbb."""
    return "#" + _rgb(share).hex()


def png(rows: list[list[float]], scale: Scale) -> str:
    """A picture with a pixel a number, as a data URI; what is not finite is transparent. Empty rows give no pixels."""
    width = max((len(row) for row in rows), default=0)
    if not width:
        return ""
    lines = b"".join(
        b"\0" + bytes(_index(row[i] if i < len(row) else math.nan, scale) for i in range(width)) for row in rows
    )
    palette = bytes(3) + b"".join(_rgb(step / 254) for step in range(255))
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, len(rows), 8, 3, 0, 0, 0)),
        (b"PLTE", palette),
        (b"tRNS", b"\0"),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
    return "data:image/png;base64," + b64encode(data).decode()


def _index(number: float, scale: Scale) -> int:
    return 1 + round(254 * scale.share(number)) if math.isfinite(number) else 0


def _rgb(share: float) -> bytes:
    place = share * (len(_ANCHORS) - 1)
    left = min(int(place), len(_ANCHORS) - 2)
    pairs = zip(_ANCHORS[left], _ANCHORS[left + 1], strict=True)
    return bytes(round(a + (place - left) * (b - a)) for a, b in pairs)
