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
