"""ListOps: nested lists of digits under an operator, whose value is one digit. Long ones have their parts far apart.

    python recipes/listops.py --count 3                                   a look
    python recipes/listops.py --count 10000 --out listops.jsonl           rows of text and label, for finetune_text.py

    [MAX 2 9 [MIN 4 7 ] 0 ]  is  9

Operators: MAX, MIN, MED (the lower median) and SM (the sum modulo 10), as in Nangia and Bowman 2018. What differs from
their generator: lengths are asked for (`--tokens LOW HIGH`), the number of arguments and the depth are fixed, so that the
longest way from an argument to the answer is known, and labels are equally frequent: a list of many uniform digits has 9
as its maximum nearly always, and a model would be right without reading it.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from settings import count

OPERATORS = {
    "[MAX": max,
    "[MIN": min,
    "[MED": lambda values: sorted(values)[(len(values) - 1) // 2],
    "[SM": lambda values: sum(values) % 10,
}
VOCABULARY = ("[PAD]", "[CLS]", *OPERATORS, "]", *map(str, range(10)))


def draw(rng: random.Random, depth: int, arguments: tuple[int, int], operators: tuple[str, ...]) -> tuple[Any, ...]:
    """A tree: an operator and its arguments, trees of one level less; at depth 1 digits."""
    below = rng.randint(*arguments)
    if depth == 1:
        return rng.choice(operators), *(rng.randrange(10) for _ in range(below))
    return rng.choice(operators), *(draw(rng, depth - 1, arguments, operators) for _ in range(below))


def value(tree: Any) -> int:
    """The digit that a tree stands for."""
    return tree if isinstance(tree, int) else OPERATORS[tree[0]]([value(part) for part in tree[1:]])


def tokens(tree: Any) -> list[str]:
    """A tree in words."""
    if isinstance(tree, int):
        return [str(tree)]
    return [tree[0], *(word for part in tree[1:] for word in tokens(part)), "]"]


def rows(
    number: int, seed: int, *, depth: int, arguments: tuple[int, int], length: tuple[int, int],
    operators: tuple[str, ...] = tuple(OPERATORS),
) -> list[tuple[list[str], int]]:  # fmt: skip
    """Words and value of `number` different trees, as many of each value as of any other (up to one).

    Args:
        number: of rows.
        seed: of the drawing.
        depth: of nesting.
        arguments: fewest and most of an operator.
        length: fewest and most words of a row.
        operators: to choose from.

    Raises:
        ValueError: if rows of such a length are hardly ever drawn.
    """
    rng, found, seen = random.Random(seed), [], set()
    room = [number // 10 + (digit < number % 10) for digit in range(10)]
    for _ in range(2000 * number):
        if not any(room):
            break
        tree = draw(rng, depth, arguments, operators)
        words, answer = tokens(tree), value(tree)
        if room[answer] and length[0] <= len(words) <= length[1] and tree not in seen:
            seen.add(tree)
            room[answer] -= 1
            found.append((words, answer))
    if any(room):
        raise ValueError(
            f"listops: expected trees of {length[0]} to {length[1]} words with every value, got none after many draws. "
            "Change depth, arguments or operators."
        )
    rng.shuffle(found)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=count, default=1000, help="rows (1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--depth", type=count, default=3, help="levels of nesting (3)")
    parser.add_argument("--arguments", type=count, nargs=2, default=(3, 6), metavar=("LOW", "HIGH"), help="(3 6)")
    parser.add_argument("--tokens", type=count, nargs=2, default=(64, 256), metavar=("LOW", "HIGH"), help="(64 256)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a .jsonl file; else they are printed")
    options = parser.parse_args(arguments)
    try:
        found = rows(
            options.count, options.seed, depth=options.depth, arguments=tuple(options.arguments),
            length=tuple(options.tokens),
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    lines = "".join(json.dumps({"text": " ".join(words), "label": str(answer)}) + "\n" for words, answer in found)
    if options.out is None:
        print(lines, end="")
    else:
        options.out.write_text(lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
