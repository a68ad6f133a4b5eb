"""The model card of a converted checkpoint: rendered, never typed, and silent about nothing that was not measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from hf_fullpay.hf.checkpoints import auto_class_of
from hf_fullpay.plan import LENGTHS, AttentionPlan

TEMPLATE = Path(__file__).with_name("card_template.md")
# What a card always speaks of, measured or not.
FIGURES = (
    "accuracy",
    "accuracy with ordinary attention",
    "coverage",
    "entropy / log n",
    "cost against ordinary attention",
)


def render_card(
    model: PreTrainedModel,
    *,
    base_model: str,
    measured: Mapping[str, str] | None = None,
    training: str = "Not trained after conversion.",
    licence: str | None = None,
    datasets: list[str] | None = None,
) -> ModelCard:
    """The card of a FullPay model.

    Args:
        model: a converted model.
        base_model: Hub id or folder of the checkpoint that it came from; a folder is named by its last part, since a
            path means nothing to a reader.
        measured: figure by name, already formatted with its unit; what is missing reads "not measured".
        training: what was done after conversion, in a sentence.
        licence: licence identifier of the base model; left out when unknown.
        datasets: names of the data used.
    """
    is_folder = Path(base_model).exists()
    base_model = Path(base_model).resolve().name if is_folder else base_model
    config: Any = model.config
    plan = AttentionPlan.from_dict(config.fullpay)
    measured = dict.fromkeys(FIGURES, "not measured") | dict(measured or {})
    payment: Any = plan.payment
    shortfalls = [payment.shortfall(n) for n in LENGTHS] if hasattr(payment, "shortfall") else []
    data = ModelCardData(
        base_model=None if is_folder else base_model, library_name="transformers", license=licence, datasets=datasets,
        tags=["hf-fullpay", config._attn_implementation],
    )  # fmt: skip
    return ModelCard.from_template(
        data,
        template_str=TEMPLATE.read_text(),
        title=f"{Path(base_model).name} with {config._attn_implementation}",
        base=base_model if is_folder else f"[{base_model}](https://huggingface.co/{base_model})",
        name=config._attn_implementation,
        plan=plan.describe(),
        repo="path/or/hub-id",
        auto_class=auto_class_of(type(model)),
        promises=[(n, promise) for n in LENGTHS for promise in plan.promises(n)] or [("any", "none")],
        shortfall=next(filter(None, reversed(shortfalls)), None),
        measured=list(measured.items()),
        training=training,
    )
