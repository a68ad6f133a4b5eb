"""Models and inputs named on a command line: a Hub id or a folder, files of text, folders of images, data sets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer, PreTrainedModel

from hf_fullpay.hf.models import architecture
from hf_fullpay.plan import AttentionPlan

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
LONGEST = 512  # tokens of a document, where neither the user nor the model says less


def check_source(source: str) -> None:
    """A mistyped path would be taken for a Hub id, and the message would be about the Hub.

    Raises:
        ValueError: for a path that holds no checkpoint.
    """
    if (Path(source).exists() or source.startswith((".", "/", "~"))) and not Path(source, "config.json").is_file():
        raise ValueError(f"expected a Hub id or a folder with config.json, got {source}.")


def read_plan(path: str | Path, option: str = "--plan") -> AttentionPlan:
    """A plan out of a file of JSON, as `hf-fullpay list --json` and `calibrate` write it.

    Raises:
        ValueError: naming the option, for a file that cannot be read or holds no plan.
    """
    try:
        written = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}: expected a file of JSON, got {path}: {error}.") from error
    return AttentionPlan.from_dict(written)


def load_model(source: str, attention: str | None = None, **options: Any) -> PreTrainedModel:
    """The model of a checkpoint, in the class that it names, in eval mode.

    Args:
        source: Hub id or folder.
        attention: run it under this name instead of its own.
        options: for `from_pretrained`.

    Raises:
        ValueError, OSError: from Transformers, for a checkpoint that cannot be loaded.
    """
    check_source(source)
    config = AutoConfig.from_pretrained(source)
    kind: Any = architecture(config) or AutoModel
    if attention is not None:
        options["attn_implementation"] = attention
    return kind.from_pretrained(source, **options).eval()


def texts_of(path: Path) -> list[str]:
    """Documents: every file of a folder of .txt files, or every line of one file; blank ones are left out.

    Raises:
        ValueError: if there is none, or the text is not UTF-8.
    """
    try:
        if path.is_dir():
            found = [file.read_text(encoding="utf-8") for file in sorted(path.glob("*.txt"))]
        elif path.is_file():
            found = path.read_text(encoding="utf-8").splitlines()
        else:
            raise ValueError(f"--text: expected a file with a document a line, or a folder of .txt files, got {path}.")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text: expected text in UTF-8, got something else in {path}: {error}.") from error
    found = [text.strip() for text in found if text.strip()]
    if not found:
        raise ValueError(f"--text: expected at least one document, got none in {path}.")
    return found


def dataset_texts(name: str, split: str, column: str, limit: int) -> list[str]:
    """The first documents of a data set on the Hub or in a folder.

    Raises:
        ImportError: without the package datasets.
        ValueError: for an unknown column, or an empty split.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("--dataset: expected the package datasets. Install it with: pip install datasets") from error
    rows = load_dataset(name, split=split)
    if column not in rows.column_names:
        raise ValueError(f"--column: expected one of {rows.column_names}, got {column!r}.")
    found = [str(text) for text in rows[: limit or len(rows)][column] if str(text).strip()]
    if not found:
        raise ValueError(f"--dataset: expected at least one document, got none in {name} ({split}).")
    return found


def text_batches(source: str, model: PreTrainedModel, texts: list[str], *, length: int | None, size: int) -> Any:
    """Texts as batches of the model's arguments, the longest together, so that little is padded.

    Args:
        source: where the tokenizer comes from.
        model: the model, for the longest text that it takes.
        texts: documents.
        length: tokens at which a text is cut; None for what the model takes, at most LONGEST.
        size: texts of a batch.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    config: Any = model.config
    most = min(getattr(config, "max_position_embeddings", None) or LONGEST, tokenizer.model_max_length)
    if length is not None and length > most:
        raise ValueError(f"--length: expected at most {most} tokens, which the model takes, got {length}.")
    if not len(tokenizer):  # made up, for want of files
        raise ValueError(f"--text: expected a tokenizer beside the model, got none in {source}.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    ordered = sorted(texts, key=len, reverse=True)
    options = {"truncation": True, "max_length": length or min(most, LONGEST), "return_tensors": "pt"}
    return [
        _known(tokenizer(ordered[start : start + size], padding=True, **options))
        for start in range(0, len(ordered), size)
    ]


def image_batches(source: str, folder: Path, *, limit: int, size: int) -> list[dict[str, Tensor]]:
    """Images of a folder (and of the folders in it) as batches of the model's arguments.

    Raises:
        ValueError: for a folder without images, or a file that is none.
    """
    from PIL import Image, UnidentifiedImageError

    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGES)[: limit or None]
    if not files:
        raise ValueError(f"--images: expected a folder with images ({', '.join(IMAGES)}), got none in {folder}.")
    processor: Any = AutoImageProcessor.from_pretrained(source)

    def opened() -> Iterator[Any]:
        for file in files:
            try:
                yield Image.open(file).convert("RGB")
            except UnidentifiedImageError as error:
                raise ValueError(f"--images: expected an image, got {file}.") from error

    pictures = list(opened())
    return [
        _known(processor(images=pictures[start : start + size], return_tensors="pt"))
        for start in range(0, len(pictures), size)
    ]


def _known(encoded: Any) -> dict[str, Tensor]:
    return {name: value for name, value in encoded.items() if isinstance(value, Tensor)}


def task_model(task: str) -> Any:
    """The Auto class of a task: AutoModelForSequenceClassification for "sequence-classification".

    Raises:
        ValueError: for an unknown task.
    """
    words = {"lm": "LM"}
    auto = "AutoModelFor" + "".join(words.get(word, word.capitalize()) for word in task.split("-"))
    if not hasattr(transformers, auto):
        raise ValueError(f"--task: expected a task such as sequence-classification or causal-lm, got {task!r}.")
    return getattr(transformers, auto)
