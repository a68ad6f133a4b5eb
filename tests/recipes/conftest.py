"""Recipes are scripts: their folder is on the path, as when they are run."""

import sys
import warnings
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))


@pytest.fixture(autouse=True)
def _patience():
    """Recipes choose their own warnings; the tests' ones come back afterwards."""

    with warnings.catch_warnings():
        yield


@pytest.fixture(autouse=True)
def _one_program_each():
    """A recipe is the only one in its process: what Accelerate and Transformers keep for a process is put back."""
    import transformers
    from accelerate.state import AcceleratorState, GradientState

    verbosity = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(verbosity)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
