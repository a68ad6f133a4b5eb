"""Leaks from the future: in a causal model nothing that comes later may reach an output, in values and in gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_fullpay.diagnosis.gradients import gradient_norms
from hf_fullpay.diagnosis.inputs import Batch
from hf_fullpay.diagnosis.report import Findings
from hf_fullpay.diagnosis.settings import Settings
from hf_fullpay.diagnosis.states import States, is_cross, record
from hf_fullpay.diagnosis.texts import longest, texts_of
from hf_fullpay.hf.unwrap import body_of
from hf_fullpay.hf.watch import watch


def check_leak(model: nn.Module, batches: list[Batch], settings: Settings) -> Findings:
    """`leak` and `leak_gradient`, each by layer, of models whose self-attention is causal everywhere.

    Everything behind a position is exchanged (its first token, its middle, its last but one): the outputs of every block
    up to it must not move. Tokens become other tokens, embeddings noise; where a model reads something else, noise goes
    into the first block. Padding and special tokens stay. And the gradient of the last block's output at that position
    with respect to later inputs of every block must be zero.

    Args:
        model: in eval mode; left as it was.
        batches: keyword arguments of the model; the `settings.documents` rows with most tokens are used.
        settings: documents, seed.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    model = body_of(model)
    found, leaks, gradients = Findings(), list[list[float]](), list[list[float]]()
    for inputs in longest(model, batches, settings.documents):
        causal: list[bool] = []
        with watch(model, lambda seen, causal=causal: causal.append(is_cross(seen) or seen.is_causal)):  # type: ignore[misc]
            states = record(model, inputs, graph=True)
        if not all(causal):
            found.notes.append(
                "Leaks were not looked for: the attention is not causal, every token may see later ones."
            )
            return found
        last = states.outputs[-1]
        real = torch.cat(texts_of(inputs, last.shape[1], last.device))
        for place in sorted({0, (len(real) - 1) // 2, len(real) - 2}) if len(real) > 1 else ():
            kept, later = real[: place + 1], real[place + 1 :]
            moved = _exchanged(model, inputs, later, generator)
            leaks.append([
                float((new[0, kept] - old[0, kept]).abs().max() / old[0, real].abs().max().clamp_min(1e-30))
                for new, old in zip(moved.outputs, states.outputs, strict=True)
            ])  # fmt: skip
            norms = gradient_norms(last, states.inputs, int(real[place]), generator, keep=True)
            most, allowed = norms[:, later].amax(1), norms[:, kept].amax(1)
            gradients.append((most / allowed.clamp_min(1e-30)).tolist())
    if not leaks:
        found.notes.append("Leaks were not looked for: a single token has nothing behind it.")
        return found
    for name, rows in (("leak", leaks), ("leak_gradient", gradients)):
        found.values[name] = states.by_layer(torch.tensor(rows).amax(0).tolist())
    return found


def _exchanged(model: nn.Module, inputs: Batch, later: Tensor, generator: torch.Generator) -> States:
    """The same pass with other things in the slots `later`. It keeps a graph too: without one other kernels may run,
    which round otherwise."""

    def noisy(hidden: Tensor) -> Tensor:
        noise = torch.randn(hidden.shape, generator=generator).to(hidden) * hidden.detach().float().std().to(hidden)
        return hidden.index_copy(1, later, noise[:, later])

    if "input_ids" in inputs:
        ids = inputs["input_ids"].clone()
        ids[0, later] = _other_tokens(model, ids[0, later], generator)
        return record(model, inputs | {"input_ids": ids}, graph=True)
    if "inputs_embeds" in inputs:
        return record(model, inputs | {"inputs_embeds": noisy(inputs["inputs_embeds"])}, graph=True)
    return record(model, inputs, graph=True, change=noisy)


def _other_tokens(model: nn.Module, ids: Tensor, generator: torch.Generator) -> Tensor:
    """Another ordinary token for every ordinary token. Special ones can mean more to a model than their embedding: where
    a text ends, or where an image goes."""
    config: Any = model.config
    text = config.get_text_config()
    told = config.to_dict() | text.to_dict()
    special = [n for name, value in told.items() if name.endswith("_token_id") for n in _numbers(value)]
    ordinary = torch.ones(text.vocab_size, dtype=torch.bool)
    ordinary[[n for n in special if 0 <= n < len(ordinary)]] = False
    choice = ordinary.nonzero().flatten()
    drawn = torch.randint(len(choice), ids.shape, generator=generator)
    drawn = torch.where(choice[drawn] == ids.cpu(), (drawn + 1) % len(choice), drawn)
    return torch.where(ordinary[ids.cpu()], choice[drawn], ids.cpu()).to(ids.device)


def _numbers(value: Any) -> list[int]:
    found = value if isinstance(value, list | tuple) else [value]
    return [n for n in found if isinstance(n, int) and not isinstance(n, bool)]
