"""What the compiler said of the kernels, as committed: whence, and whether it meets the bars."""

import json
from pathlib import Path

import pytest

import aot_bars

ROOT = Path(__file__).parent.parent.parent
ROW = {"name": "plain: forward", "arch": "sm_90", "dtype": "bf16", "spill_bytes": 0, "shared_bytes": 0, "wgmma": 1}
FILES = sorted((ROOT / "kernels" / "benchmarks").glob("aot-*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_rows_say_whence_and_meet_the_bars(path):
    found = json.loads(path.read_text())
    where = found["provenance"]
    assert where["command"].startswith("python benchmarks/aot.py --arch ")
    assert where["command"].endswith(f"--json kernels/benchmarks/{path.name}")
    assert len(where["commit"]) == 40
    assert not where["changed"]
    assert {"triton", "date"} <= set(where)
    assert "ptxas" in where or found["rows"][0]["arch"].startswith("gfx")
    assert [row["name"] for row in found["rows"] if aot_bars.missed(row)] == []


@pytest.mark.parametrize(
    ("change", "bar"),
    [
        ({}, []),
        ({"spill_bytes": 4}, ["spills"]),
        ({"spill_bytes": 4, "arch": "sm_80"}, []),
        ({"name": "plain: keys", "spill_bytes": 64}, []),
        ({"name": "plain: keys d_value", "spill_bytes": 68}, ["spills above 64 bytes"]),
        ({"wgmma": 0}, ["no warpgroup products"]),
        ({"name": "decode: decode", "wgmma": 0}, []),
        ({"warnings": ["C7515"]}, ["products serialised"]),
        ({"arch": "gfx942", "shared_bytes": 65 * 1024}, ["too much shared memory"]),
    ],
)
def test_bars(change, bar):
    assert aot_bars.missed({"warnings": []} | ROW | change) == bar
