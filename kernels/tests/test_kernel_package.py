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


JITTED = [
    pytest.param(node, id=f"{path.stem}.{node.name}")
    for path in sorted(PACKAGE.glob("*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(x) for x in node.decorator_list)
]


@pytest.mark.parametrize("function", JITTED)
def test_lengths_are_run_time_arguments(function):
    """Or there would be a compilation for lengths of 1, and another for multiples of 16."""
    if not function.name.endswith("_kernel"):
        return
    (decorator,) = function.decorator_list
    free = {name for option in getattr(decorator, "keywords", ()) for name in ast.literal_eval(option.value)}
    lengths = {"n_queries", "n_keys", "n_in", "n_out", "offset", "window", "low", "high", "length"}
    assert lengths & {argument.arg for argument in function.args.args} <= free


@pytest.mark.parametrize("function", JITTED)
def test_offsets_have_64_bits(function):
    """Whatever is multiplied by a stride was cast, or comes from what was. (A row of key padding is contiguous.)"""
    wide = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            names = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
            if "int64" in ast.unparse(node.value) or names & wide:
                wide |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    for node in ast.walk(function):
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
            continue
        right = ast.unparse(node.right)
        if "stride" not in right or right == "keys_strides[1]":
            continue
        left = ast.unparse(node.left)
        names = {name.id for name in ast.walk(node.left) if isinstance(name, ast.Name)}
        assert "int64" in left or names & wide, f"line {node.lineno}: {left} * {right}"


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
