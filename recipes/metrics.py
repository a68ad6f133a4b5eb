"""Answers of a model, and how good they are."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader


@torch.no_grad()
def predict(
    accelerator: Accelerator,
    model: nn.Module,
    dataset: Any,
    collate: Callable[[list[Any]], dict[str, Tensor]],
    batch: int,
) -> Tensor:
    """Logits of a prepared model for every row, in order and on every process: (rows, labels), FP32 on the CPU."""
    loader = accelerator.prepare_data_loader(DataLoader(dataset, batch, collate_fn=collate))
    was_training = model.training
    model.eval()
    logits = [accelerator.gather_for_metrics(model(**rows).logits.float()).cpu() for rows in loader]
    model.train(was_training)
    return torch.cat(logits)


def classification(predicted: list[int], wanted: list[int]) -> dict[str, Any]:
    """Accuracy and macro F1 (the mean over the labels that occur, in truth or answer), and who computed them: the package
    `evaluate` where its metrics are at hand, scikit-learn elsewhere. None for no rows."""
    if not wanted:
        return {"rows": 0, "accuracy": None, "macro_f1": None}
    found = _by_evaluate(predicted, wanted)
    if found is None:
        from sklearn.metrics import accuracy_score, f1_score

        found = {
            "accuracy": float(accuracy_score(wanted, predicted)),
            "macro_f1": float(f1_score(wanted, predicted, average="macro")),
            "computed_by": "scikit-learn",
        }
    return {"rows": len(wanted)} | found


def _by_evaluate(predicted: list[int], wanted: list[int]) -> dict[str, Any] | None:
    if find_spec("evaluate") is None:
        return None
    import evaluate

    try:
        accuracy, f1 = evaluate.load("accuracy"), evaluate.load("f1")
    except (OSError, ConnectionError):  # neither cached nor reachable
        return None
    told = {"predictions": predicted, "references": wanted}
    return {
        "accuracy": float(accuracy.compute(**told)["accuracy"]),
        "macro_f1": float(f1.compute(**told, average="macro")["f1"]),
        "computed_by": "evaluate",
    }
