"""Peak memory of forward and backward above the inputs, each in a process of its own.

A server that has torch and the package loaded forks one process for each measurement, so none sees memory that another
left behind. On a CPU freed memory goes back to the system at once there: otherwise the peak holds what malloc keeps for
later, which differs from run to run.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
import statistics
import warnings
from pathlib import Path

import torch

from cases import Candidate, inputs, presets, sdpa
from hf_fullpay import FullPayWarning
from peers import peers

TIMES = 3  # huge pages make single measurements jump
MMAP_THRESHOLD = -3  # mallopt's name for the size from which memory is mapped alone
SMALLEST = 128 * 1024  # bytes: its default


def find(name: str, is_causal: bool, device: str) -> Candidate:
    """A candidate by the name of its rows."""
    known = [Candidate("sdpa", is_causal, sdpa(is_causal)), *presets(), *peers(None, device)]
    return next(c for c in known if (c.name, c.is_causal) == (name, is_causal))


class Peaks:
    """Measures, and remembers what it measured."""

    def __init__(self, device: str, threads: int) -> None:
        self.device, self.threads, self.known = device, threads, {}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "hf_fullpay", "torch.nn.attention.flex_attention", "torch._dynamo"])
        self.pool = context.Pool(1, maxtasksperchild=1)

    def __call__(self, name: str, is_causal: bool, dtype: str, n: int, batch: int, heads: int) -> float:
        """MiB; forward alone for what has no gradients."""
        asked = name, is_causal, dtype, n, batch, heads
        if asked not in self.known:
            found = [self.pool.apply(peak_of, (*asked, self.device, self.threads)) for _ in range(TIMES)]
            self.known[asked] = statistics.median(found)
        return self.known[asked]

    def close(self) -> None:
        self.pool.terminate()
        self.pool.join()


def peak_of(name: str, is_causal: bool, dtype: str, n: int, batch: int, heads: int, device: str, threads: int) -> float:
    """MiB above the inputs."""
    if device == "cpu":
        return_freed_memory()
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore", FullPayWarning)
    candidate = find(name, is_causal, device)

    def step(leaves: list[torch.Tensor], probe: torch.Tensor) -> None:
        if candidate.has_backward:
            torch.autograd.grad(candidate.run(*leaves), leaves, probe)
        else:
            with torch.no_grad():
                candidate.run(*(leaf.detach() for leaf in leaves))

    # Threads, autograd and code pages come up first, on a small input; what is compiled for a shape, on one of that shape.
    small = inputs(160, dtype, device, 1, 1)
    leaves = inputs(n, dtype, device, batch, heads)
    probe = torch.randn_like(leaves[0])
    if candidate.backend == "inductor":
        step(leaves, probe)
    else:
        step(small, torch.ones_like(small[0]))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(leaves, probe)
        return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
    # The high-water mark of the drawing of inputs must not hide what the call needs.
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water()
    step(leaves, probe)
    return round((high_water() - before) / 1024, 1)


def return_freed_memory() -> None:
    """Have malloc give large freed buffers back: a peak is then what is in use, not what is kept for later."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, SMALLEST)  # setting it keeps malloc from raising it to the largest size freed


def high_water() -> int:
    """Peak resident memory in KiB since the mark was last cleared."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
