"""hf-fullpay check: does a checkpoint keep what its attention promises? Exit status 1 when it does not, for a user's CI."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from hf_fullpay.plan import CARRIER, PRESETS, AttentionPlan

DOCUMENTS, BATCH, LENGTH = 16, 4, 512  # of a text file: how many are looked at, how many at once, tokens of the longest


def add_check(commands: Any) -> None:
    """The command and its options."""
    parser = commands.add_parser("check", help="whether a checkpoint keeps its promises; 1 when it does not, for CI")
    parser.add_argument("model", metavar="MODEL", help="Hub id or folder; a converted checkpoint brings its plan")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--plan", metavar="FILE", type=Path, help="check a stock checkpoint under this plan (JSON)")
    which.add_argument("--attention", metavar="NAME", choices=sorted(PRESETS), help="or under this preset")
    parser.add_argument(
        "--text", metavar="FILE", type=Path, help="documents with an empty line between them, instead of random inputs"
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
    from transformers import AutoConfig, AutoModel

    from hf_fullpay.hf.forward import PLAN
    from hf_fullpay.hf.models import architecture

    path = options.model
    if (Path(path).exists() or path.startswith((".", "/", "~"))) and not Path(path, "config.json").is_file():
        raise ValueError(f"expected a Hub id or a folder with config.json, got {path}.")
    config = AutoConfig.from_pretrained(path)
    if options.plan is not None or options.attention:
        if getattr(config, PLAN, None) is not None:
            raise ValueError(
                "--plan, --attention: expected a stock checkpoint, got one that was converted and promises what its own "
                f"plan says: {AttentionPlan.from_dict(getattr(config, PLAN)).describe()}."
            )
        if options.plan is not None:
            try:
                plan = AttentionPlan.from_dict(json.loads(options.plan.read_text()))
            except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
                raise ValueError(f"--plan: expected a file of JSON, got {options.plan}: {error}.") from error
            setattr(config, PLAN, plan.to_dict())
        config._attn_implementation = options.attention or CARRIER
    return (architecture(config) or AutoModel).from_pretrained(path, config=config).eval()


def _read(options: argparse.Namespace, model: Any) -> list[dict[str, Any]]:
    """The first documents of a text file, in batches padded on the right."""
    from transformers import AutoTokenizer

    try:
        written = options.text.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text: expected a text file, got {options.text}: {error}.") from error
    texts = [text for text in re.split(r"\n\s*\n", written) if text.strip()][:DOCUMENTS]
    if not texts:
        raise ValueError(f"--text: expected at least one word, got {options.text}, which holds none.")
    if getattr(model, "main_input_name", None) != "input_ids":
        raise ValueError(f"--text: expected a model of texts, got {type(model).__name__}. Leave --text out.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        raise ValueError(f"--text: expected a checkpoint with a tokenizer, got {options.model}: {error}") from error
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.pad_token or tokenizer.eos_token, "right"
    if not all(tokenizer(texts)["input_ids"]):  # without files Transformers makes up a tokenizer that knows no word
        raise ValueError(f"--text: expected a checkpoint with a tokenizer that knows these words, got {options.model}.")
    most = getattr(model.config, "max_position_embeddings", None) or LENGTH
    settings = {"padding": True, "truncation": True, "max_length": min(options.length or LENGTH, most)}
    return [
        dict(tokenizer(texts[place : place + BATCH], return_tensors="pt", **settings))
        for place in range(0, len(texts), BATCH)
    ]
