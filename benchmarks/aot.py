"""Compile every kernel for a GPU that is not there, and read what the compiler says.

    python benchmarks/aot.py --arch sm_90 --json kernels/benchmarks/aot-sm_90.json
    python benchmarks/aot.py --arch gfx942 --quick

A row is {name, arch, dtype, head_dim, registers, spill_bytes, shared_bytes, wgmma, mma, warnings}: registers of a
thread, bytes spilled (stores and loads), shared memory of a program, instructions that multiply (warpgroup, and other
matrix instructions), and warnings of ptxas. The launches are those of the package, recorded on tensors without memory,
so the tiles are those of fullpay_kernels/config.py.

The exit status is 1 when a bar of aot_bars.py is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before Triton is imported: real compilation, none from the cache, fused multiply-adds as by default until 3.9.
os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_ALWAYS_COMPILE"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "kernels" / "torch-ext"))

from fullpay_kernels import api, clamp, decode, launch, mean, median

from aot_bars import missed
from provenance import provenance

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BATCH, HEADS, LENGTH = 4, 32, 4096
PLAIN, BOUNDED, MIXTURE = {}, {"tanh": True}, {"share": True}
CAUSAL, BAND, PADDING = {"offset": 0}, {"offset": 0, "window": 256}, {"keys": True}
CASES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "plain causal": CAUSAL,
    "mixture causal": MIXTURE | CAUSAL,
    "bounded causal": BOUNDED | CAUSAL,
    "bounded mixture padding": BOUNDED | MIXTURE | PADDING,
    "plain padding": PADDING,
    "plain band": BAND,
    "mixture padding band": MIXTURE | PADDING | BAND,
    "plain packed causal": CAUSAL | {"packed": True},
    "plain bias": {"bias": True},
    "plain mask": {"mask": True},
    "plain causal grouped": CAUSAL | {"groups": 8},
    "bounded": BOUNDED,
    "bounded fast causal": BOUNDED | CAUSAL | {"fast": True},
    "clamp causal": {"clamp": True} | CAUSAL,
    "clamp bounded padding": {"clamp": True} | BOUNDED | PADDING,
}
QUICK = ("plain causal", "mixture causal", "bounded causal", "mixture padding band")


class Recorder:
    """Stands in for a kernel and keeps the arguments of its launch."""

    def __init__(self, kernel: Any, into: list[tuple[Any, dict[str, Any]]]) -> None:
        self.kernel, self.into, self.arg_names = kernel, into, kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch_it(*args: Any, **kwargs: Any) -> None:
            names = [name for name in self.kernel.arg_names if name not in kwargs]
            self.into.append((self.kernel, dict(zip(names, args, strict=False)) | kwargs))

        return launch_it


@contextlib.contextmanager
def recording(arch: str) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Launches of the package while it believes to be on `arch`."""
    launches: list[tuple[Any, dict[str, Any]]] = []
    with contextlib.ExitStack() as stack:
        for module in (launch, mean, decode, clamp, median):
            for name, kernel in list(vars(module).items()):
                replacement: Any = None
                if isinstance(kernel, triton.runtime.JITFunction) and name.endswith("_kernel"):
                    replacement = Recorder(kernel, launches)
                elif name == "architecture":
                    replacement = lambda device: arch  # noqa: E731
                if replacement is not None:
                    setattr(module, name, replacement)
                    stack.callback(setattr, module, name, kernel)
        yield launches


def call_for(case: dict[str, Any], width: int, dtype: torch.dtype) -> launch.Call:
    """An attention call of the case, on tensors without memory."""

    def meta(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    batch = 1 if case.get("packed") else BATCH
    groups = case.get("groups", HEADS)
    rows, pairs = (batch, HEADS, LENGTH, 1), (batch, HEADS, LENGTH, LENGTH)
    inputs: dict[str, Any] = dict.fromkeys(api._INPUTS)
    inputs["query"] = meta(batch, HEADS, LENGTH, width)
    inputs["key"], inputs["value"] = (meta(batch, groups, LENGTH, width) for _ in range(2))
    options = {
        "scaling": 0.125, "keys": None, "mask": None, "offset": case.get("offset"), "window": case.get("window"),
        "cu_seqlens": None, "precision": "tf32", "fast_tanh": case.get("fast", False),
    }  # fmt: skip
    if case.get("tanh"):
        inputs["centre"], inputs["width"], inputs["amplitude"] = (meta(*rows, of=torch.float32) for _ in range(3))
    if case.get("share"):
        inputs["share"] = meta(*rows, of=torch.float32)
        inputs["mean"] = meta(batch, groups, LENGTH if "offset" in case else 1, width)
    if case.get("clamp"):
        inputs["clamp_floor"] = meta(*rows, of=torch.float32)
    if case.get("bias"):
        inputs["bias"] = meta(1, *pairs[1:])
    if case.get("keys"):
        options["keys"] = meta(batch, LENGTH, of=torch.bool)
    if case.get("mask"):
        options["mask"] = meta(batch, 1, *pairs[2:], of=torch.bool)
    for name in ("query", "key", "value", "mean"):  # as `attention` does
        inputs[name] = None if inputs[name] is None else api.aligned(inputs[name])
    call = api._call(inputs, options)
    if case.get("packed"):
        object.__setattr__(call, "segments", launch.Segments(*(meta(LENGTH, of=torch.int32) for _ in range(4))))
    return call


def launches_of(case: dict[str, Any], width: int, dtype: torch.dtype, arch: str) -> list[tuple[Any, dict[str, Any]]]:
    """What one forward and one backward pass launch."""
    with recording(arch) as launches:
        call = call_for(case, width, dtype)
        wanted = {"query"}
        if case.get("tanh"):
            wanted |= {"centre", "rate", "amplitude"}
        if case.get("share"):
            wanted.add("share")
        if case.get("bias"):
            wanted.add("bias")
        if case.get("clamp"):
            out, lse = clamp.run_clamp(call)
            delta, _ = clamp.run_clamp_delta(call, out, lse)
        else:
            out, lse = launch.run_forward(call)
            delta, _ = launch.run_delta(call, out, out, call.mean.shape[2] if call.mean is not None else None)
        launch.run_keys(call, out, lse, delta)
        launch.run_queries(call, out, lse, delta, wanted)
    return launches


def others(width: int, dtype: torch.dtype, arch: str) -> Iterator[tuple[str, list[tuple[Any, dict[str, Any]]]]]:
    """Launches of the kernels beside attention."""

    def meta(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    value = meta(BATCH, HEADS, LENGTH, width)
    for name, options in (("prefix", {"high": 1}), ("window", {"low": -255, "high": 1})):
        for direction, exact in (("forward", True), ("backward", False)):
            with recording(arch) as launches:
                weight, scale = meta(BATCH, LENGTH, of=torch.float32), meta(BATCH, LENGTH, of=torch.float32)
                mean.range_sums(value, weight, scale, LENGTH, exact=exact, **options)
            yield f"mean {name} {direction}", launches
    with recording(arch) as launches:
        decode.run_decode(
            meta(BATCH, HEADS, 1, width), meta(BATCH, 8, LENGTH, width), meta(BATCH, 8, LENGTH, width),
            scaling=0.125, keys=meta(BATCH, LENGTH, of=torch.uint8), low=0, high=LENGTH, splits=8,
        )  # fmt: skip
    yield "decode grouped padding", launches
    with recording(arch) as launches:
        lse = meta(BATCH, HEADS, LENGTH, of=torch.float32)
        median.run_median(call_for(CAUSAL, width, dtype))
        median.run_median_backward(call_for(CAUSAL, width, dtype), meta(BATCH, HEADS, LENGTH, of=torch.int32), lse)
    yield "median causal", launches


def kind_of(value: Any) -> Any:
    """Type of an argument in a signature, as Triton's own launcher would specialise it."""
    if isinstance(value, torch.Tensor):
        return "*" + {
            torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
            torch.uint8: "u8", torch.int64: "i64",
        }[value.dtype]  # fmt: skip
    if isinstance(value, tuple):
        return tuple(kind_of(entry) for entry in value)
    if value is None or isinstance(value, bool) or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def leaves(value: Any, at: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    if isinstance(value, tuple):
        for index, entry in enumerate(value):
            yield from leaves(entry, (*at, index))
    else:
        yield at, value


def build(kernel: Any, arguments: dict[str, Any], arch: str) -> tuple[Any, str]:
    """The compiled kernel, and the log of ptxas."""
    options = {name: arguments.pop(name) for name in ("num_warps", "num_stages") if name in arguments}
    signature, constants, hints = {}, {}, {}
    fixed = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    loose = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name in loose:
            signature[name] = "i32"
            continue
        signature[name] = "constexpr" if name in fixed else kind_of(value)
        for at, leaf in leaves(value, (index,)):
            if name in fixed or kind_of(leaf) == "constexpr":
                constants[at] = leaf
            elif isinstance(leaf, torch.Tensor) or (isinstance(leaf, int) and leaf % 16 == 0):
                hints[at] = [["tt.divisibility", 16]]
    nvidia = arch.startswith("sm_")
    target = GPUTarget("cuda", int(arch[3:]), 32) if nvidia else GPUTarget("hip", arch, 64)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    triton.knobs.nvidia.dump_ptxas_log = True
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(source, target=target, options=options)
    return compiled, log.getvalue()


def describe(compiled: Any, log: str, arch: str) -> dict[str, Any]:
    """Registers, spills and instructions."""
    if arch.startswith("sm_"):
        registers = max(map(int, re.findall(r"Used (\d+) registers", log)), default=None)
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            cubin.write_bytes(compiled.asm["cubin"])
            code = subprocess.run(
                [TOOLS / "cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True
            ).stdout
        wgmma, mma = len(re.findall(r"\bHGMMA|\bUTC\w*MMA", code)), len(re.findall(r"\bHMMA", code))
        found = sorted(set(re.findall(r"C75\d\d", log)))
    else:
        code = compiled.asm["amdgcn"]
        registers = max(map(int, re.findall(r"\.vgpr_count:\s+(\d+)", code)), default=None)
        spills = 4 * sum(map(int, re.findall(r"\.vgpr_spill_count:\s+(\d+)", code)))
        wgmma, mma, found = 0, len(re.findall(r"v_mfma", code)), []
    return {
        "registers": registers, "spill_bytes": spills, "shared_bytes": compiled.metadata.shared, "wgmma": wgmma,
        "mma": mma, "warnings": found,
    }  # fmt: skip


def compiler(arch: str) -> dict[str, str]:
    """Versions of what compiled."""
    versions = {"triton": triton.__version__}
    if arch.startswith("sm_"):
        tool = TOOLS / ("ptxas-blackwell" if int(arch[3:]) >= 100 else "ptxas")
        said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
        versions["ptxas"] = re.findall(r"V([\d.]+)", said)[-1]
    return versions


def part_of(arguments: dict[str, Any]) -> str:
    """Which of several launches of a kernel this is: a step of a clamp, or the gradient of keys or values alone."""
    alone = [name for name, other in (("d_key", "d_value"), ("d_value", "d_key")) if arguments.get(other, 0) is None]
    return "".join(f" {word}" for word in [arguments.get("STEP"), *alone] if word)


def main() -> int:
    """Compile, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", default="sm_90", help="sm_80, sm_90, sm_100, gfx942, ...")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="width 64 and few cases")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bf16"])
    parser.add_argument("--widths", type=int, nargs="+")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=None)
    options = parser.parse_args()
    widths = options.widths or ([64] if options.quick else [64, 128])
    cases = options.cases or (QUICK if options.quick else CASES)
    rows, red, origin = [], 0, provenance("cpu", **compiler(options.arch))
    for dtype, width in itertools.product(options.dtype, widths):
        work = [(case, launches_of(CASES[case], width, DTYPES[dtype], options.arch)) for case in cases]
        if not options.cases:
            work += others(width, DTYPES[dtype], options.arch)
        seen = set()
        for case, launches in work:
            for kernel, arguments in launches:
                name = f"{case}: {kernel.__name__.removesuffix('_kernel')}{part_of(arguments)}"
                if (name, width) in seen or (kernel.__name__ == "delta_kernel" and case not in QUICK):
                    continue
                seen.add((name, width))
                row = {"name": name, "arch": options.arch, "dtype": dtype, "head_dim": width}
                row |= describe(*build(kernel, dict(arguments), options.arch), options.arch)
                bars = missed(row)
                red += bool(bars)
                rows.append(row)
                print(
                    f"{name:45s} {dtype} {width:4d} regs {row['registers']} spill {row['spill_bytes']} "
                    f"shared {row['shared_bytes']} wgmma {row['wgmma']} mma {row['mma']} {' '.join(row['warnings'])}"
                    + (f"   MISSED: {', '.join(bars)}" if bars else ""),
                    flush=True,
                )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n")
    print(f"{len(rows)} kernels for {options.arch} with Triton {triton.__version__}, {red} below a bar")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
