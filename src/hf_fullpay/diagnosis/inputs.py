"""What a model is diagnosed on: batches of keyword arguments, and single documents cut out of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_fullpay.core.errors import wrong

Batch = dict[str, Tensor]
_KINDS = "a dict of tensors, a tensor, or an iterable of them (a DataLoader)"
# Arguments with an entry for every token, which go where a token goes.
_BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids", "global_attention_mask", "labels", "times")


def batches_of(inputs: Any, model: nn.Module) -> Iterator[Batch]:
    """Keyword arguments of the model, on its device.

    Args:
        inputs: a dict of tensors (what a tokenizer returns), the model's main input as a tensor, or an iterable of such.
        model: the model.

    Raises:
        ValueError: for another kind, an iterable that holds nothing, or an empty batch.
    """
    main = getattr(model, "main_input_name", "input_ids")
    several: Iterable[Any]
    if isinstance(inputs, Mapping | Tensor):
        several = [inputs]
    elif isinstance(inputs, Iterable) and not isinstance(inputs, str | bytes):
        several = inputs
    else:
        raise wrong("inputs", _KINDS, type(inputs).__name__)
    device, found = next(model.parameters()).device, False
    for batch in several:
        batch = {main: batch} if isinstance(batch, Tensor) else batch
        if not isinstance(batch, Mapping):
            hint = "Tokenize texts first: tokenizer(texts, padding=True, truncation=True, return_tensors='pt')."
            raise wrong("inputs", _KINDS, f"an iterable of {type(batch).__name__}", hint)
        found = True
        given = {name: _on(value, name, device) for name, value in batch.items() if value is not None}
        if (
            hasattr(model, "main_input_name")
            and main not in given
            and not any(name.endswith("embeds") for name in given)
        ):
            raise wrong("inputs", f"{main!r} among the arguments of {type(model).__name__}", sorted(given))
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        if ids is not None and ids.ndim == 1:
            raise wrong("inputs['input_ids']", "shape (batch, tokens)", tuple(ids.shape))
        if ids is not None and ids.ndim == 2 and mask is not None and mask.ndim == 2 and mask.shape != ids.shape:
            raise wrong("inputs['attention_mask']", f"the shape of input_ids, {tuple(ids.shape)}", tuple(mask.shape))
        yield given
    if not found:
        raise ValueError("inputs: expected at least one batch, got an empty iterable.")


def real_tokens(batch: Batch) -> Tensor | None:
    """Which tokens are no padding, (B, N) bool; None where nothing says so."""
    mask = batch.get("attention_mask")
    return mask.bool() if mask is not None and mask.ndim == 2 else None


def documents_of(batch: Batch) -> Iterator[Batch]:
    """Each document of a batch alone, without its padding; one that is nothing but padding is left out."""
    real = real_tokens(batch)
    size = max(tensor.shape[0] for tensor in batch.values() if tensor.ndim)
    for number in range(size):
        if real is not None and not real[number].any():
            continue  # nothing but padding
        document = {}
        for name, tensor in batch.items():
            if tensor.ndim == 0 or tensor.shape[0] != size:
                document[name] = tensor
            elif real is None:
                document[name] = tensor[number : number + 1]
            elif name in _BY_TOKEN and tensor.ndim > 1 and tensor.shape[1] == real.shape[1]:
                document[name] = tensor[number : number + 1, real[number]]
            elif name != "attention_mask":
                document[name] = tensor[number : number + 1]
        yield document


def without_labels(batch: Batch, model: nn.Module) -> Batch:
    """What the body of a model reads of a batch: not the labels, unless its decoder reads them, shifted; where nothing is
    said of the decoder it reads the encoder's text, as BART does by itself."""
    given = {name: tensor for name, tensor in batch.items() if name != "labels"}
    config: Any = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False) or any(name.startswith("decoder_input") for name in given):
        return given
    shift, read = getattr(model, "_shift_right", None), batch.get("labels", batch.get("input_ids"))
    if shift is not None and read is not None:
        given["decoder_input_ids"] = shift(read)
    return given


def cut(document: Batch, length: int) -> Batch:
    """The first tokens of a document."""
    return {
        name: tensor[:, :length] if name in _BY_TOKEN and tensor.ndim > 1 else tensor
        for name, tensor in document.items()
    }


def size_of(batch: Batch) -> tuple[int, int]:
    """Documents and tokens of a batch; of images and embeddings the tokens are not known: 0."""
    first = next(tensor for tensor in batch.values() if tensor.ndim)
    real, ids = real_tokens(batch), batch.get("input_ids")
    return first.shape[0], int(real.sum()) if real is not None else 0 if ids is None else ids.numel()


def _on(value: Any, name: str, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        raise wrong(f"inputs[{name!r}]", "a tensor", type(value).__name__, "Ask the tokenizer for return_tensors='pt'.")
    if value.ndim and 0 in value.shape:
        raise wrong(f"inputs[{name!r}]", "at least one entry", f"shape {tuple(value.shape)}")
    return value.to(device)
