"""The command line: hf-fullpay list | convert | inspect | diagnose | check | calibrate | demo."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hf_fullpay.hf.check_command import add_check
from hf_fullpay.plan import PRESETS, AttentionPlan, with_options


def main(arguments: list[str] | None = None) -> int:
    """Run a command; 0 when it worked, 1 when `check` finds a broken promise, 2 with one sentence on the error output when
    the input was wrong, 141 (as a shell has it) when nobody reads the output any more."""
    options = _parser().parse_args(arguments)
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # What is still buffered would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"hf-fullpay {options.command}: interrupted", file=sys.stderr)
        return 130
    except SafetensorError as error:
        print(f"hf-fullpay {options.command}: expected readable weights, got a damaged file: {error}", file=sys.stderr)
        return 2
    except (ValueError, OSError, ImportError) as error:
        print(f"hf-fullpay {options.command}: {str(error).removeprefix(f'{options.command}: ')}", file=sys.stderr)
        return 2
    except Exception as error:  # a broken checkpoint can fail anywhere in Transformers; a user wants a sentence
        print(f"hf-fullpay {options.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-fullpay", description="Attention by name for Hugging Face Transformers.")
    parser.add_argument("--version", action="version", version=f"hf-fullpay {version('hf-fullpay')}")
    commands = parser.add_subparsers(dest="command", required=True)

    listing = commands.add_parser("list", help="the preset table")
    listing.add_argument("--json", action="store_true", help="as JSON, with every option")
    listing.set_defaults(run=_list)

    convert = commands.add_parser("convert", help="write a converted checkpoint")
    convert.add_argument("source", metavar="SRC", help="Hub id or folder of a BERT, ViT, GPT-2 or Llama checkpoint")
    convert.add_argument("target", metavar="DST", help="folder to write; must not hold anything yet")
    which = convert.add_mutually_exclusive_group()
    which.add_argument(
        "--attention", metavar="NAME", choices=sorted(PRESETS), default="fullpay", help="preset (fullpay)"
    )
    which.add_argument(
        "--plan", metavar="FILE", type=Path, help="a plan as JSON, in the form of `hf-fullpay list --json`, instead"
    )
    convert.add_argument("--task", metavar="TASK", help="head to load, such as sequence-classification or causal-lm")
    _add_options(convert)
    convert.set_defaults(run=_convert)

    inspect = commands.add_parser("inspect", help="which layers run what, promises, learned numbers")
    inspect.add_argument("model", metavar="MODEL", help="Hub id or folder")
    inspect.add_argument("--attention", metavar="NAME", choices=sorted(PRESETS), help="look at it under this preset")
    inspect.set_defaults(run=_inspect)

    diagnose = commands.add_parser("diagnose", help="what the attention of a model does, on your texts or images")
    diagnose.add_argument("model", metavar="MODEL", help="Hub id or folder")
    _add_inputs(diagnose)
    diagnose.add_argument("--out", metavar="DIR", type=Path, help="write a page, report.json and report.md there")
    diagnose.add_argument("--attention", metavar="NAME", help="run the model under this attention instead of its own")
    diagnose.add_argument(
        "--against", metavar="NAME", help="put the same model under another attention beside it, as what comes after"
    )
    diagnose.add_argument("--checks", metavar="NAME", nargs="+", help="which checks (all)")
    diagnose.add_argument("--layers", metavar="N", nargs="+", type=int, help="which attention layers, from 0 (all)")
    diagnose.add_argument(
        "--limit",
        metavar="MEASURE=NUMBER",
        nargs="+",
        default=[],
        help="the line a measure should keep, such as entropy=2.5",
    )
    diagnose.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 when a measure (after, with --against) does not keep its line",
    )
    diagnose.set_defaults(run=_diagnose)

    calibrate = commands.add_parser("calibrate", help="bounds per layer and head from your texts or images, as a plan")
    calibrate.add_argument("model", metavar="MODEL", help="Hub id or folder")
    _add_inputs(calibrate)
    calibrate.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="where the plan goes, for convert --plan"
    )
    base = calibrate.add_mutually_exclusive_group()
    base.add_argument(
        "--attention", metavar="NAME", choices=sorted(PRESETS), default="bounded", help="preset (bounded)"
    )
    base.add_argument("--plan", metavar="FILE", type=Path, help="a plan as JSON instead")
    calibrate.add_argument("--reduction", type=float, default=4.0, help="how many times smaller logits get (4)")
    calibrate.add_argument("--quantile", type=float, default=0.999, help="of the rows that count (0.999)")
    calibrate.add_argument(
        "--budget", type=float, help="only in the layers from the top down that change the model by at most this much"
    )
    calibrate.set_defaults(run=_calibrate)
    add_check(commands)

    demo = commands.add_parser("demo", help="fine-tune a real encoder on long reviews, with its promises measured")
    demo.add_argument("--out", metavar="DIR", type=Path, default=Path("runs/demo"), help="where results go (runs/demo)")
    demo.add_argument("--model", metavar="PATH", help="Hub id or folder of another BERT encoder")
    demo.add_argument("--steps", type=int, help="training steps (for a quick look)")
    demo.set_defaults(run=_demo)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    """One flag per option of any preset, so that a new preset brings its flags along."""
    names: dict[str, list[str]] = {}
    for preset, plan in PRESETS.items():
        for part in (plan.reach, plan.scores, plan.payment):
            for field in dataclasses.fields(part):
                names.setdefault(field.name, []).append(preset)
    group = parser.add_argument_group("options of the presets")
    absent = argparse.SUPPRESS  # null is a value too
    for name, presets in names.items():
        flag, hint = f"--{name.replace('_', '-')}", ", ".join(presets)
        group.add_argument(flag, dest=f"option_{name}", metavar="VALUE", type=_value, default=absent, help=hint)
    group.add_argument(
        "--gate", dest="option_gate", action=argparse.BooleanOptionalAction, default=absent, help="learned output gate"
    )
    group.add_argument(
        "--layers", dest="option_layers", metavar="LAYERS", type=_value, default=absent,
        help='"all", "all_but_last", "from:6", "[6, 7]"',
    )  # fmt: skip


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    """What a model is to be run on."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--text", metavar="FILE", type=Path, help="a document a line, or a folder of .txt files")
    which.add_argument("--dataset", metavar="NAME", help="Hub id or folder of a data set (needs the package datasets)")
    which.add_argument("--images", metavar="DIR", type=Path, help="folder of images")
    parser.add_argument("--split", default="test", help="of the data set (test)")
    parser.add_argument("--column", default="text", help="of the data set (text)")
    parser.add_argument("--count", type=_positive, default=32, help="how many texts or images (32)")
    parser.add_argument("--length", type=_positive, help="tokens at which a text is cut (512, or what the model takes)")
    parser.add_argument("--batch", type=_positive, default=4, help="texts or images run together (4)")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return number


def _inputs(options: argparse.Namespace, model: Any) -> Any:
    from hf_fullpay.hf.sources import dataset_texts, image_batches, text_batches, texts_of

    if options.images is not None:
        return image_batches(options.model, options.images, limit=options.count, size=options.batch)
    if options.text is not None:
        texts = texts_of(options.text)[: options.count]
    else:
        texts = dataset_texts(options.dataset, options.split, options.column, options.count)
    return text_batches(options.model, model, texts, length=options.length, size=options.batch)


def _value(text: str) -> Any:
    """A number, a list, true, false or null as JSON; anything else is a word. "0.1,0.2" is a list too."""
    for candidate in (text, f"[{text}]" if "," in text else text):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            continue
    return text


def _list(options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps({name: plan.to_dict() for name, plan in PRESETS.items()}, indent=2))
        return 0
    width = max(map(len, PRESETS))
    print(f"{'name':<{width}}  what it does")
    for name, plan in PRESETS.items():
        print(f"{name:<{width}}  {plan.describe()}")
        for promise in plan.promises(512):
            print(f"{'':<{width}}    over 512 keys: {promise}")
    return 0


def _convert(options: argparse.Namespace) -> int:
    plan = _plan(options)
    target = Path(options.target).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"DST: expected a folder that holds nothing yet, got {target}.")
    if blocked := next((parent for parent in target.parents if parent.exists() and not parent.is_dir()), None):
        raise ValueError(f"DST: expected a place for a folder, got {target}, where {blocked} is a file.")
    from transformers import AutoConfig

    from hf_fullpay.hf.cards import render_card
    from hf_fullpay.hf.convert import convert
    from hf_fullpay.hf.sources import check_source, task_model

    check_source(options.source)
    source: Any = options.source
    if options.task:
        auto = task_model(options.task)
        try:
            source = auto.from_pretrained(options.source)
        except ValueError as error:
            if not str(error).startswith("Unrecognized configuration class"):
                raise
            # Transformers would list every model that there is.
            kind = AutoConfig.from_pretrained(options.source).model_type
            raise ValueError(f"--task: expected a task of {kind!r} models, got {options.task!r}.") from error
    model = convert(source, plan)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written beside the target and renamed: a failure in the middle leaves nothing half done.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        folder = Path(scratch) / "checkpoint"
        model.save_pretrained(folder)
        saved = _save_preprocessors(options.source, folder)
        render_card(model, base_model=options.source).save(folder / "README.md")
        os.replace(folder, target)
    print(f"{target}: {type(model).__name__}, {plan.describe()}; with {', '.join([*saved, 'a card'])}")
    return 0


def _plan(options: argparse.Namespace) -> AttentionPlan:
    given = vars(options).items()
    changes = {name.removeprefix("option_"): value for name, value in given if name.startswith("option_")}
    if options.plan is None:
        return with_options(PRESETS[options.attention], changes)
    from hf_fullpay.hf.sources import read_plan

    return with_options(read_plan(options.plan), changes)


def _save_preprocessors(source: str, folder: Path) -> list[str]:
    """Tokenizer and image processor, where the source has them."""
    from transformers import AutoImageProcessor, AutoTokenizer

    saved = []
    for word, loader, files in (
        ("tokenizer", AutoTokenizer, ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.txt")),
        ("image processor", AutoImageProcessor, ("preprocessor_config.json",)),
    ):
        # Without a file AutoTokenizer would make up a tokenizer that knows no word.
        if any(_has(source, file) for file in files):
            loader.from_pretrained(source).save_pretrained(folder)
            saved.append(word)
    return saved


def _has(source: str, file: str) -> bool:
    from transformers.utils import cached_file

    try:
        return cached_file(source, file) is not None
    except OSError:
        return False


def _inspect(options: argparse.Namespace) -> int:
    from hf_fullpay.hf.inspect import inspect_model
    from hf_fullpay.hf.sources import check_source

    check_source(options.model)
    print(inspect_model(options.model, options.attention))
    return 0


def _diagnose(options: argparse.Namespace) -> int:
    from rich.console import Console

    from hf_fullpay.diagnosis import compare, diagnose
    from hf_fullpay.diagnosis.page import writable
    from hf_fullpay.hf.sources import load_model

    limits: dict[str, float | None] = {}
    for text in options.limit:
        name, _, number = text.partition("=")
        try:
            limits[name] = float(number)
        except ValueError as error:
            raise ValueError(f"--limit: expected MEASURE=NUMBER, got {text!r}.") from error
    if options.out is not None:
        writable(options.out)  # not after all the work
    settings = {"checks": options.checks, "layers": options.layers, "thresholds": limits}
    reports, inputs = [], None
    for attention in [options.attention, options.against][: 1 if options.against is None else 2]:
        model = load_model(options.model, attention)
        inputs = _inputs(options, model) if inputs is None else inputs
        reports.append(diagnose(model, inputs, **settings))
    result = reports[0] if len(reports) == 1 else compare(*reports)
    if sys.stdout.isatty():
        Console().print(result)
    else:
        print(result)
    if options.out is not None:
        print(f"written: {result.save(options.out)}")
    if options.strict and all(line.passed is None for line in reports[-1].lines):
        raise ValueError(
            "--strict: expected a measure with a limit that can be judged, got none; see --checks and --limit."
        )
    return 1 if options.strict and not reports[-1].passed else 0


def _calibrate(options: argparse.Namespace) -> int:
    from rich.console import Console

    from hf_fullpay.diagnosis import calibrate, sensitivity
    from hf_fullpay.hf.sources import load_model

    base = _plan(options)
    if options.out.is_dir() or not options.out.resolve().parent.is_dir():
        raise ValueError(f"--out: expected a file in a folder that exists, got {options.out}.")
    model = load_model(options.model)
    inputs = _inputs(options, model)
    found = calibrate(model, inputs, plan=base, reduction=options.reduction, quantile=options.quantile)
    Console().print(found)
    plan = found.plan()
    if options.budget is not None:
        bears = sensitivity(model, inputs, plan, budget=options.budget)
        Console().print(bears)
        plan = bears.suggestion()
    options.out.write_text(json.dumps(plan.to_dict(), indent=1) + "\n")
    print(f"{options.out}: {plan.describe()}; next: hf-fullpay convert {options.model} DST --plan {options.out}")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from hf_fullpay.demo import run

    return run(out=options.out, model=options.model, steps=options.steps)
