"""The house keeps its order: calls go one way, the fast path never meets the reference, and importing is cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "hf_fullpay"
# Who may import whom, inside the package.
MAY = {
    "core": {"core"},
    "reach": {"core", "reach"},
    "scores": {"core", "scores"},
    "payment": {"core", "payment"},
    "fast": {"core", "fast"},
    "layers": {"core", "layers"},
    "backends": {"core", "reach", "scores", "payment", "plan", "fast"},
    "plan": {"core", "reach", "scores", "payment"},
    "reference": {"core", "reach", "scores", "payment", "plan"},
    "paths": {"core", "reach", "scores", "payment", "plan", "fast"},
    "attend": {"core", "reach", "scores", "payment", "plan", "paths", "fast", "reference", "backends"},
    "hf": {
        "core",
        "backends",
        "reach",
        "scores",
        "payment",
        "plan",
        "reference",
        "attend",
        "layers",
        "hf",
        "demo",
        "diagnosis",
    },  # the command line calls the last two
    "diagnosis": {"core", "reach", "scores", "payment", "plan", "reference", "hf", "diagnosis"},
}
OUTSIDE = {"transformers", "peft", "huggingface_hub", "accelerate", "datasets", "matplotlib", "pandas"}
FILES = sorted(SOURCE.rglob("*.py"))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_calls_go_one_way(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__", "demo"):
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "hf_fullpay" and len(parts) > 1:
            assert parts[1] in MAY[room], f"{path}: {room} must not import {name}"
        if parts[0] in OUTSIDE:
            drawing = room == "diagnosis" and parts[0] in (
                "matplotlib",
                "pandas",
            )  # inside functions: importing is light
            assert room == "hf" or drawing, f"{path}: only hf may import {name}"


def test_names_of_test_files_are_unique():
    """pytest imports them by their name alone."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_kernels_folder_stays_a_folder():
    assert not (SOURCE.parent.parent / "kernels" / "__init__.py").exists()


def test_import_is_idempotent_offline_and_light():
    code = """
import socket, sys
def refuse(*a, **k): raise AssertionError("network on import")
socket.socket.connect = refuse
import torch
from transformers import BertModel, GPT2Model, LlamaModel, PreTrainedModel, ViTModel
theirs = set(sys.modules)
import hf_fullpay
first = PreTrainedModel.post_init
import importlib; importlib.reload(hf_fullpay)
assert PreTrainedModel.post_init is first
assert not torch.cuda.is_initialized()
heavy = {"triton", "peft", "datasets", "matplotlib", "pandas", "sklearn"} & (set(sys.modules) - theirs)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
