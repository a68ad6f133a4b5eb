"""hf-fullpay check: does a checkpoint keep what its attention promises? Exit status 1 when it does not, for a user's CI."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_fullpay.plan import CARRIER, PRESETS, AttentionPlan

DOCUMENTS, BATCH = 16, 4  # of a text: how many documents are looked at, and how many at once


def add_check(commands: Any) -> None:
    """The command and its options."""
    parser = commands.add_parser("check", help="whether a checkpoint keeps its promises; 1 when it does not, for CI")
    parser.add_argument("model", metavar="MODEL", help="Hub id or folder; a converted checkpoint brings its plan")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--plan", metavar="FILE", type=Path, help="check a stock checkpoint under this plan (JSON)")
    which.add_argument("--attention", metavar="NAME", choices=sorted(PRESETS), help="or under this preset")
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=Path,
        help="a document a line, or a folder of .txt files, instead of random inputs",
    )
    parser.add_argument("--length", metavar="N", type=int, help="tokens of the longest input")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the numbers there too")
    parser.set_defaults(run=run_check)


def run_check(options: argparse.Namespace) -> int:
    """Print the table; 0 when every promise is kept, 1 when one is broken."""
    from hf_fullpay.diagnosis.promises import check

    if options.length is not None and options.length < 1:
        raise ValueError(f"--length: expected at least 1, got {options.length}.")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise ValueError(f"--json: expected a file in a folder that exists, got {options.json}.")
    model = _load(options)
    inputs = None if options.text is None else _read(options, model)
    found = check(model, inputs, length=None if options.text else options.length)
    if options.json is not None:
        options.json.write_text(found.to_json() + "\n")
    print(found)
    for one in found.broken:
        limit = "at least" if one.at_least else "at most"
        print(f"BROKEN {one.name} in {one.where}: {one.value:.4g}, {limit} {one.allowed:.4g} promised ({one.about})")
    return 0 if found.kept else 1


def _load(options: argparse.Namespace) -> Any:
    from transformers import AutoConfig

    from hf_fullpay.hf.forward import PLAN
    from hf_fullpay.hf.sources import check_source, load_model, read_plan

    check_source(options.model)
    if options.plan is None and options.attention is None:
        return load_model(options.model)
    config = AutoConfig.from_pretrained(options.model)
    if getattr(config, PLAN, None) is not None:
        raise ValueError(
            "--plan, --attention: expected a stock checkpoint, got one that was converted and promises what its own plan "
            f"says: {AttentionPlan.from_dict(getattr(config, PLAN)).describe()}."
        )
    if options.attention:
        return load_model(options.model, options.attention)
    setattr(config, PLAN, read_plan(options.plan).to_dict())
    return load_model(options.model, CARRIER, config=config)


def _read(options: argparse.Namespace, model: Any) -> Any:
    """The first documents, in batches."""
    from hf_fullpay.hf.sources import text_batches, texts_of

    texts = texts_of(options.text)[:DOCUMENTS]
    if getattr(model, "main_input_name", None) != "input_ids":
        raise ValueError(f"--text: expected a model of texts, got {type(model).__name__}. Leave --text out.")
    return text_batches(options.model, model, texts, length=options.length, size=BATCH)
