"""Where a result comes from: written beside every number that a recipe commits."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def provenance(packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """Command, commit, versions, device and threads. A commit ends in "+" when files differ from it."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!*.json", ":!*.png")
    return {
        "command": "python " + " ".join(["recipes/" + Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else ""),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers", "hf-fullpay", *packages)},
        "device": f"cpu, {platform.machine()}",
        "threads": torch.get_num_threads(),
    }
