"""Where numbers come from."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hf_fullpay

ROOT = Path(__file__).parent.parent


def provenance(device: str, **details: Any) -> dict[str, Any]:
    """Command, commit, date, versions and machine."""
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    return {
        "command": shlex.join(["python", script, *sys.argv[1:]]), "commit": _git("rev-parse", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "src", "kernels", ":!kernels/benchmarks", "benchmarks/*.py")),
        "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{_processor()}, {os.cpu_count()} cores",
        "version": hf_fullpay.__version__, **details,
    }  # fmt: skip


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False).stdout.strip()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
