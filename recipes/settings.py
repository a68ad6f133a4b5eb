"""The values of a recipe, read from its YAML, and its folder for results: both refused before anything is computed."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml


def settings(parser: argparse.ArgumentParser, path: Path, usual: Path) -> dict[str, Any]:
    """Values of `path`: the names of the recipe's own config `usual`, with numbers above 0 where it has numbers. Anything
    else ends the program through `parser.error`."""
    expected = yaml.safe_load(usual.read_text())
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        parser.error(f"--config: expected a YAML file that can be read, got {path}: {error}")
    if not isinstance(found, dict):
        parser.error(f"--config: expected names and values as in {usual}, got {type(found).__name__}.")
    if found.keys() != expected.keys():
        missing, unknown = (sorted(map(str, a.keys() - b.keys())) for a, b in ((expected, found), (found, expected)))
        parser.error(f"--config: expected the names in {usual}; missing {missing}, unknown {unknown}.")
    for name, value in found.items():
        kind = (int, float) if isinstance(expected[name], float) else type(expected[name])
        if isinstance(value, bool) or not isinstance(value, kind) or (kind is not str and not 0 < value < float("inf")):
            parser.error(f"--config: {name}: expected {_told(expected[name])} such as {expected[name]}, got {value!r}.")
    return found


def _told(value: Any) -> str:
    return {int: "an integer above 0", float: "a number above 0"}.get(type(value), "a word")


def count(text: str) -> int:
    """An argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def folder(parser: argparse.ArgumentParser, path: Path) -> Path:
    """A folder that exists and can be written to: hours of training must not end in a refusal."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        parser.error(f"--out: expected a folder that can be written to, got {path}: {error}")
    return path


@contextmanager
def refusing(parser: argparse.ArgumentParser) -> Iterator[None]:
    """While data and model are loaded: what is missing or does not fit ends the program in one sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        parser.error(str(error))
