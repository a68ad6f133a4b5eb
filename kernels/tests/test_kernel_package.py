"""What the Hub asks of a kernel: few imports, all of its own modules relative, and a name that may be any."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from formula import DEVICE

PACKAGE = Path(__file__).parent.parent / "torch-ext" / "fullpay_kernels"


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_imports(path):
    allowed = {"torch", "triton"} | sys.stdlib_module_names
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert all(alias.name.split(".")[0] in allowed for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module.split(".")[0] in allowed


def test_loads_under_another_name():
    spec = importlib.util.spec_from_file_location("elsewhere_1a2b", PACKAGE / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    x = torch.ones(1, 1, 3, 16, device=DEVICE)
    assert torch.equal(module.attention(x, x, x, scaling=1.0), x)
    assert set(module.__all__) <= set(vars(module))


def test_public_names_are_documented_on_the_card():
    import fullpay_kernels

    card = (PACKAGE.parent.parent / "CARD.md").read_text()
    assert all(f"`{name}`" in card for name in fullpay_kernels.__all__)
