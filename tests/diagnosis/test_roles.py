"""Head roles: heads made by hand get the roles they were made for, random ones get none, and the model stays as it was."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import AttentionInterface

import hand_made
from families import build
from hand_made import FOLLOWING, GOLD, PREVIOUS, SEPARATOR, UNIFORM
from hf_fullpay.diagnosis import RoleSettings, head_roles
from hf_fullpay.diagnosis.measures import MEASURES
from hf_fullpay.diagnosis.role_counts import Places
from hf_fullpay.diagnosis.roles import COLUMNS, binomial_tail
from hf_fullpay.diagnosis.spans import Between, cut
from hf_fullpay.diagnosis.treebank import read_treebank
from hf_fullpay.hf.watch import watch


@pytest.fixture
def gold(tmp_path):
    return {
        "treebank": hand_made.treebank(tmp_path / "trees"),
        "coreference": hand_made.pronouns(tmp_path / "pronouns"),
    }


def roles(findings):
    return {(row[1], row[2]) for row in findings.tables["roles"].rows}


def test_heads_made_by_hand(gold):
    findings = head_roles(hand_made.model(), hand_made.tokenizer(), **gold)
    table = findings.tables["roles"]
    assert table.columns == COLUMNS
    assert roles(findings) == {
        (PREVIOUS, "positional"), (FOLLOWING, "syntactic"), (FOLLOWING, "coreference"), (SEPARATOR, "global"),
    }  # fmt: skip
    found = {row[2]: row for row in table.rows}
    assert found["positional"][3:5] == ["offset -1", 1.0]
    assert found["syntactic"][3].startswith("nsubj, dependent to governor (120 instances; baseline: offset ")
    assert found["syntactic"][4] == 1.0
    assert found["syntactic"][5] < 0.4
    assert found["coreference"][4] == 1.0
    assert 0.4 < found["coreference"][5] < 0.7
    assert found["global"][4] > 0.9
    assert found["global"][5] < 0.4
    assert findings.values == {f"{role}_heads": [0.25] for role in ("positional", "syntactic", "coreference", "global")}
    assert findings.values.keys() <= MEASURES.keys()


def test_uniform_weights_are_chance(gold):
    """The best head of a relation is told with its baseline; a head that attends to all alike finds nothing."""
    findings = head_roles(hand_made.model(), hand_made.tokenizer(), **gold)
    relations = {(row[0], row[1]): row for row in findings.tables["relations"].rows}
    assert relations["nsubj", "dependent to governor"][2:5] == [0, FOLLOWING, 1.0]
    assert findings.tables["candidates"].rows[0][:3] == [0, FOLLOWING, 1.0]
    assert not any(head == UNIFORM for head, _ in roles(findings))


@pytest.mark.parametrize("attention", ["eager", "fullpay", "bounded"])
@pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
def test_under_other_attentions(gold, attention):
    model = hand_made.model()
    model.set_attn_implementation(attention)
    findings = head_roles(model, hand_made.tokenizer(), **gold)
    assert {(PREVIOUS, "positional"), (FOLLOWING, "syntactic"), (FOLLOWING, "coreference")} <= roles(findings)


def test_reduced_precision(gold):
    assert roles(head_roles(hand_made.model().bfloat16(), hand_made.tokenizer(), **gold)) == roles(
        head_roles(hand_made.model(), hand_made.tokenizer(), **gold)
    )


def test_weights_between_words():
    """Mean over the pieces of the word that asks, sum over those of the word that is asked, whatever the tiles."""
    tokenizer = hand_made.tokenizer(["s", "##he", "run", "##s", "##ning", "now"])
    pieces = cut(tokenizer, "she runs now", [(0, 3), (4, 8), (9, 12)])
    model, ids, owners = build("bert", head=False), torch.tensor([pieces.ids]), torch.tensor(pieces.owners)
    found = []

    def see(seen):
        found.append(Between([pieces], ids.device))
        for start, stop in ((0, 2), (2, 3), (3, len(pieces.ids))):
            found[-1].add(seen.rows(start, stop), start, stop)

    with watch(model, see):
        model(ids)
    model.set_attn_implementation("eager")
    weights = model(ids, output_attentions=True).attentions
    for between, layer in zip(found, weights, strict=True):
        for asks, asked in itertools.product(range(3), repeat=2):
            expected = layer[0][:, owners == asks][:, :, owners == asked].sum(-1).mean(-1)
            torch.testing.assert_close(between.weights[0, :, asks, asked], expected)
        assert between.visible.all()


def test_causal_models_are_asked_about_the_past(gold):
    tokenizer = hand_made.tokenizer(marked=False)
    findings = head_roles(build("gpt2", head=False), tokenizer, **gold, settings=RoleSettings(instances=20))
    behind = 0
    for sentence in read_treebank(gold["treebank"])[1::2]:
        word = sentence.relations.index("nsubj")
        behind += sentence.governors[word] < word
    row = {(row[0], row[1]): row for row in findings.tables["relations"].rows}["nsubj", "dependent to governor"]
    assert row[7] == behind
    assert row[6].startswith("-")
    assert any("those whose answer it may see" in note for note in findings.notes)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("peaky", [False, True], ids=["as initialised", "peaky"])
def test_random_weights_have_no_roles(family, peaky, tmp_path):
    """On real trees and pronouns; words beyond the commonest are one unknown word."""
    path = tmp_path / "trees"
    trees = (GOLD / "en_ewt-ud-test.conllu").read_text(encoding="utf-8").split("\n\n")[:500]
    path.write_text("\n\n".join(trees) + "\n\n", encoding="utf-8")
    pronouns = tmp_path / "pronouns"
    pronouns.write_text(
        "".join((GOLD / "gap-development.tsv").open(encoding="utf-8").readlines()[:200]), encoding="utf-8"
    )
    common = Counter(word for s in read_treebank(path) for word in s.text.split() if word.isalpha())
    tokenizer = hand_made.tokenizer([word for word, _ in common.most_common(94)], marked=family == "bert")
    model = build(family, head=False)
    if not peaky:
        torch.manual_seed(0)
        model = type(model)(model.config).eval()
    findings = head_roles(model, tokenizer, treebank=path, coreference=pronouns)
    assert not {role for _, role in roles(findings)} & {"syntactic", "coreference"}
    assert len(findings.tables["relations"].rows) > 5


def stop(*_):
    raise KeyboardInterrupt


def test_leaves_the_model_as_it_was(gold, monkeypatch):
    model, stock = hand_made.model(), AttentionInterface.get_interface
    model.train()
    model.encoder.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    head_roles(model, hand_made.tokenizer(), **gold)
    monkeypatch.setattr(Places, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        head_roles(model, hand_made.tokenizer(), **gold)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert AttentionInterface.get_interface is stock
    assert not model._forward_pre_hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_texts_that_are_too_long_are_counted(gold):
    documents = ["she runs now", "she " * 40, ""]
    findings = head_roles(hand_made.model(), hand_made.tokenizer(), documents=documents)
    assert "documents: 1 of 3 are empty or longer than 32 tokens, and were left out." in findings.notes
    assert set(findings.values) == {"positional_heads", "global_heads"}
    with pytest.raises(ValueError, match="documents: expected texts that the model takes, 1 of 1 are"):
        head_roles(hand_made.model(), hand_made.tokenizer(), documents=["she " * 40])


def test_refusals(gold):
    model, tokenizer = hand_made.model(), hand_made.tokenizer()
    with pytest.raises(ValueError, match="expected treebank, coreference or documents, got none"):
        head_roles(model, tokenizer)
    with pytest.raises(ValueError, match="model: expected one that takes text, got 'ViTModel'"):
        head_roles(build("vit", head=False), tokenizer, **gold)
    with pytest.raises(OSError, match="missing"):
        head_roles(model, tokenizer, treebank="missing")
    for name, value in (("margin", 0), ("positional", 1.5), ("farthest", 0), ("instances", 2.5), ("marked", "x")):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            replace(RoleSettings(), **{name: value})


def test_findings_are_plain(gold):
    """They go into JSON as they are."""
    findings = head_roles(hand_made.model(), hand_made.tokenizer(), **gold)
    for table in findings.tables.values():
        assert all(len(row) == len(table.columns) for row in table.rows)
        json.dumps(table.rows, allow_nan=False)


def test_binomial_tail():
    assert binomial_tail(0, 10, 0.5) == pytest.approx(1.0)
    assert binomial_tail(10, 10, 0.5) == pytest.approx(2**-10)
    assert binomial_tail(6, 10, 0.5) == pytest.approx(sum(math.comb(10, k) for k in range(6, 11)) / 1024)
    assert binomial_tail(700, 1000, 0.5) < 1e-30
    assert binomial_tail(5, 5, 1.0) == 1.0
