"""The benchmark: its cases, counts, gate and tables. Nothing here times anything that matters."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cases
import checks
import gpu
import gpu_cases
import gpu_table
import growth
import limits
import peers
import plot
import report
import timing
from hf_fullpay import PRESETS, AttentionPlan, Band, attention

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
ROOT = Path(__file__).parent.parent.parent
TINY = (gpu_cases.Shape("tiny", 1, 2, 40, 16), gpu_cases.Shape("one", 1, 2, 40, 16, decode=True))


def test_every_preset_and_its_peers_have_rows():
    ours = {(c.name, c.is_causal) for c in cases.presets()}
    assert {name for name, _ in ours} == set(PRESETS)
    assert not any((name, False) in ours for name, plan in PRESETS.items() if isinstance(plan.reach, Band))
    theirs = {(c.name, c.is_causal) for c in peers.peers(None, "cpu")}
    assert {("eager", False), ("eager", True), ("sdpa_mask", True), (f"{peers.NORMALIZERS}:softmax1", True)} <= theirs
    assert {(f"flex:{name}", is_causal) for name, is_causal in ours} <= theirs
    assert all(c.run or c.reason for c in peers.peers(None, "cpu"))


def test_a_peer_that_cannot_run_says_why(monkeypatch):
    assert peers.softmax1(True).reason in ("not installed", "") or peers.softmax1(True).reason.startswith("cannot be")
    monkeypatch.setattr(peers, "has_compiler", lambda: False)
    assert "needs a C++ compiler" in peers.flexed("bounded", True, "cpu").reason
    assert "cannot clamp" in peers.flexed("fullpay_clamp", False, "cuda").reason


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["eager", "sdpa_mask", "sdpa_mask:band_causal", "linear", "bounded:median"])
def test_peers_compute_what_they_are_compared_with(name, is_causal, dtype):
    found = [c for c in peers.peers(None, "cpu") if (c.name, c.is_causal) == (name, is_causal)]
    leaves = cases.inputs(70, dtype, "cpu", 2, 3)
    assert all(checks.wrong_output(candidate, leaves) == "" for candidate in found)


def test_the_gate_is_red_for_a_wrong_candidate():
    right = cases.preset("fullpay", True)
    assert checks.wrong_preset(right, "fp32", "cpu") == ""
    wrong = replace(right, run=lambda q, k, v: right.run(q, k, v) * 1.001)
    assert checks.wrong_preset(wrong, "fp32", "cpu").startswith("output errs")
    leaky = replace(right, run=lambda q, k, v: right.run(q, k, v.detach()) + 0 * v)
    assert checks.wrong_preset(leaky, "fp32", "cpu").startswith("d value errs")
    nan = replace(right, run=lambda q, k, v: right.run(q, k, v) * float("nan"))
    assert "nan" in checks.wrong_output(nan, cases.inputs(33, "fp32", "cpu", 1, 2))


@pytest.mark.parametrize("candidate", cases.presets(), ids=lambda c: f"{c.name}-{'causal' if c.is_causal else 'full'}")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_preset_is_red(candidate, dtype):
    assert checks.wrong_preset(candidate, dtype, "cpu") == ""


def test_nothing_is_timed_on_a_red_check(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "wrong_preset", lambda candidate, *_, **__: "output errs" * (candidate.name == "fullpay"))
    rows, red = gpu.run_gpu(["fullpay", "band_causal"], "cpu", 1, TINY)
    assert red > 0
    assert not any(row["name"] == "fullpay" and "ratio" in row for row in rows)
    assert any(row["name"] == "band_causal" and row["backend"] == "torch" and row["ratio"] for row in rows)
    assert "RED fullpay" in capsys.readouterr().out


def test_the_gpu_table_runs_on_what_there_is():
    """On the CPU: cuDNN is not there and says so; ours is compared with the best backend that is."""
    rows, red = gpu.run_gpu(["band_causal"], "cpu", 2, TINY[1:])
    assert red == 0
    found = {(row["name"], row["backend"]): row for row in rows}
    assert "reason" in found["plain", "sdpa:cudnn"]
    assert found["plain", "flex"]["reason"] == "one query: not compared"
    mine = found["band_causal", "torch"]
    assert mine["best_sdpa"] in ("sdpa:flash", "sdpa:math")
    assert mine["ratio"] > 0
    assert mine["tflops"] is not None
    assert mine["share"] is None  # no limit is known of this device
    assert min(row["ratio"] for row in rows if row["backend"].startswith("sdpa:") and "ratio" in row) <= 1


def test_no_cuda_device_is_said_and_is_an_error(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    command = [sys.executable, ROOT / "benchmarks" / "run.py", "--device", "cuda", "--json", tmp_path / "gpu.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (2, "no CUDA device: not measured")
    assert not (tmp_path / "gpu.json").exists()


def test_counts_of_operations_bytes_and_pairs():
    plain, band = AttentionPlan(), AttentionPlan(reach=Band(5))
    for queries, keys, is_causal in ((7, 7, False), (7, 7, True), (1, 9, True), (3, 9, True)):
        seen = attention(
            torch.zeros(1, 1, queries, 4), torch.zeros(1, 1, keys, 4), torch.zeros(1, 1, keys, 4), plan=plain,
            is_causal="lower_right" if is_causal else False, return_weights=True,
        )[1]  # fmt: skip
        assert limits.pairs(plain, queries, keys, is_causal) == int((seen > 0).sum())
    assert limits.pairs(band, 9, 9, True) == 1 + 2 + 3 + 4 + 5 * 5
    assert limits.pairs(band, 1, 9, True) == 5
    shape = (4, 32, 4096, 128)
    least = limits.flops(shape, 4096**2, backward=False) / limits.LIMITS["NVIDIA H200"].flops
    assert least == pytest.approx(1.39e-3, rel=0.01)
    assert limits.flops(shape, 4096**2, backward=True) == limits.flops(shape, 4096**2, backward=False) * 3.5
    assert limits.traffic((1, 1, 10, 4), 10, backward=False) == 4 * 10 * 4 * 2
    assert limits.share("NVIDIA H200", 79, 0, 1e-12) == pytest.approx(0.1)
    assert limits.share("some other device", 79, 0, 1e-12) is None


def test_growth_and_ratios():
    assert growth.slope((512, 1024, 4096), [1.0, 4.0, 64.0]) == pytest.approx(2.0)
    rows = growth.growth(cases.preset("fullpay", True), "fp32", (32, 64), "cpu", 2)
    assert [row["direction"] for row in rows] == list(cases.DIRECTIONS)
    assert all(row["exponent"] is not None and len(row["seconds"]) == 2 for row in rows)
    assert timing.ratios([2.0, 4.0, 6.0], [2.0, 2.0, 2.0]) == (2.0, [1.0, 3.0])


def test_gpu_table_lists_every_case_measured_or_not():
    text = gpu_table.gpu(None, report.table)
    assert "No CUDA device" in text
    for name in (*PRESETS, "plain"):
        assert f"| `{name}` |" in text
    assert text.count(gpu_table.NOTHING) > 100
    row = {
        "name": "fullpay", "backend": "triton", "is_causal": True, "shape": gpu_cases.SHAPES[0].label,
        "direction": "forward", "ratio": 1.04, "tflops": 512.0, "share": 0.65, "best_sdpa": "sdpa:cudnn",
    }  # fmt: skip
    where = {"device": "NVIDIA H200", "torch": "2", "date": "today", "command": "run"}
    text = gpu_table.gpu({"provenance": where, "rows": [row]}, report.table)
    assert "1.04, 512 TFLOP/s, 65%" in text
    assert "sdpa:cudnn" in text
    assert gpu_table.NOTHING in text


def test_peers_and_growth_are_rendered(monkeypatch):
    row = {"is_causal": True, "dtype": "fp32", "n": 512, "direction": "forward", "iqr": None}
    rows = [
        row | {"name": "eager", "ratio": 2.5},
        row | {"name": "flex:bounded", "ratio": None, "reason": "no C++ compiler"},
    ]
    slopes = row | {"name": "fullpay", "exponent": 1.91, "sdpa_exponent": 1.9, "lengths": [512, 16384]}
    where = {"device": "here", "threads": 1, "torch": "2", "date": "today"}
    results = {"cpu.json": {"rows": rows}, "growth.json": {"rows": [slopes], "provenance": where}}
    monkeypatch.setattr(report, "_load", results.get)
    assert "| `eager` | causal | 2.50 / - |" in report.peers()
    assert "`flex:bounded`, forward: no C++ compiler" in report.peers()
    assert "| `fullpay` | causal | 1.91 / 1.90 | - |" in report.growth()
    monkeypatch.setattr(report, "_load", lambda name: None)
    assert "Not measured yet" in report.peers()
    assert "Not measured yet" in report.growth()


def test_the_plot_knows_its_numbers(tmp_path):
    row = {"name": "fullpay", "is_causal": False, "dtype": "fp32", "direction": "forward"}
    data = plot.points([row | {"n": 512, "ratio": 1.0}, row | {"n": 2048, "ratio": 1.1}], ["fullpay"])
    path = tmp_path / "ratios.svg"
    assert plot.is_stale(path, data)
    plot.draw(path, data)
    assert not plot.is_stale(path, data)
    assert "fullpay, full" in path.read_text()
    other = plot.points([row | {"n": 512, "ratio": 1.2}], ["fullpay"])
    assert plot.is_stale(path, other)


def test_a_run_writes_rows_with_all_keys(tmp_path):
    out = tmp_path / "rows.json"
    command = [
        sys.executable, ROOT / "benchmarks" / "run.py", "--names", "band_causal", "--lengths", "192", "--dtypes", "fp32",
        "--rounds", "2", "--quick", "--no-peers", "--json", out,
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    rows = json.loads(out.read_text())["rows"]
    keys = {"name", "dtype", "is_causal", "n", "direction", "ratio", "iqr", "peak_mib", "backend"}
    assert len(rows) == 2
    assert all(keys <= set(row) for row in rows)


def test_steps_with_a_cache_are_timed(tmp_path):
    out = tmp_path / "decode.json"
    command = [
        sys.executable, ROOT / "benchmarks" / "decode.py", "--lengths", "64", "--dtypes", "fp32", "--rounds", "2",
        "--json", out,
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    found = json.loads(out.read_text())
    assert found["provenance"]["command"].startswith("python benchmarks/decode.py --lengths 64")
    assert len(found["rows"]) == 4
    assert all(row["n"] == 64 and row["ratio"] > 0 for row in found["rows"])
