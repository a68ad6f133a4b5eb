"""hf-fullpay check: 0 when promises are kept, 1 with layer and head when one is broken, 2 when the input is wrong."""

import json

import pytest
import torch
import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers

from converted import learn
from families import FAMILIES, VOCABULARY, build
from hf_fullpay import AttentionPlan, Clamp, Mixture, convert
from hf_fullpay.hf.cli import main
from hf_fullpay.payment import mixture

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
LEARNED = AttentionPlan(payment=Mixture(floor=None, budget=0.2, learnable=True))
TEXT = "cat dog cat bird\n\ndog cat\n \nbird bird cat dog cat dog bird cat\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        build(family).save_pretrained(root / family)
    words = {"[PAD]": 0, "[UNK]": 1, "cat": 2, "dog": 3, "bird": 4}
    assert len(words) < VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    t.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(root / "bert")
    learn(convert(build("bert"), LEARNED)).save_pretrained(root / "converted")
    faded = convert(build("bert"), LEARNED)
    with torch.no_grad():
        faded.bert.encoder.layer[1].attention.self.fullpay.budget_bias[3] = -300.0
    faded.save_pretrained(root / "faded")
    broken = build("gpt2")
    with torch.no_grad():
        broken.transformer.h[1].attn.c_attn.weight[0, 64 + 8] = torch.nan  # values begin at 64, heads are 8 wide
    broken.save_pretrained(root / "nan")
    (root / "plan.json").write_text(json.dumps(AttentionPlan(payment=Clamp(budget=0.3)).to_dict()))
    (root / "broken.json").write_text("{")
    (root / "text.txt").write_text(TEXT)
    (root / "empty.txt").write_text("\n \n")
    (root / "binary").write_bytes(b"\xff\xfe\x00")
    return root


def run(*words):
    return main(["check", *(str(word) for word in words)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stock_checkpoint_has_nothing_of_its_own_to_keep(family, root, capsys):
    assert run(root / family) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Ordinary attention promises nothing of its own" in shown
    assert "floor" not in shown
    assert "BROKEN" not in shown


def test_a_converted_checkpoint_brings_its_promises(root, tmp_path, capsys):
    assert run(root / "converted", "--json", tmp_path / "found.json") == 0
    assert "Mixture(floor=None, budget=0.2, learnable=True)" in " ".join(capsys.readouterr().out.split())
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["kept"]
    assert {"floor", "budget"} <= {one["name"] for one in written["promises"]}


def test_a_stock_checkpoint_under_a_plan(root, capsys):
    for words in (["--plan", root / "plan.json"], ["--attention", "bounded_fullpay"]):
        assert run(root / "llama", *words) == 0
        assert "floor" in capsys.readouterr().out


def test_documents_of_a_file(root, capsys):
    """Shorter ones are padded."""
    assert run(root / "bert", "--text", root / "text.txt", "--attention", "fullpay", "--length", 6) == 0
    shown = capsys.readouterr().out
    assert "alone" in shown
    assert "padding" in shown


def test_broken_promises(root, tmp_path, capsys, monkeypatch):
    """Exit status 1, and a line that a log is searched for."""
    assert run(root / "faded", "--json", tmp_path / "found.json") == 1
    assert "BROKEN budget in layer 1, head 3:" in capsys.readouterr().out
    assert not json.loads((tmp_path / "found.json").read_text())["kept"]
    assert run(root / "nan") == 1
    assert "BROKEN finite in layer 1, head 1:" in capsys.readouterr().out
    share = mixture.share
    monkeypatch.setattr(mixture, "share", lambda *arguments: share(*arguments) / 2)
    assert run(root / "bert", "--attention", "fullpay") == 1
    assert "BROKEN floor in layer 0, head" in capsys.readouterr().out


BAD = {
    "no such folder": (["{r}/nothing"], "config.json"),
    "no plan": (["{r}/bert", "--plan", "{r}/none.json"], "--plan: expected a file of JSON"),
    "broken plan": (["{r}/bert", "--plan", "{r}/broken.json"], "--plan: expected a file of JSON"),
    "binary plan": (["{r}/bert", "--plan", "{r}/binary"], "--plan: expected a file of JSON"),
    "plan of a converted one": (["{r}/converted", "--plan", "{r}/plan.json"], "expected a stock checkpoint"),
    "name on a converted one": (["{r}/converted", "--attention", "fullpay"], "expected a stock checkpoint"),
    "no text": (["{r}/bert", "--text", "{r}/none.txt"], "--text: expected a file"),
    "empty text": (["{r}/bert", "--text", "{r}/empty.txt"], "at least one document"),
    "binary text": (["{r}/bert", "--text", "{r}/binary"], "--text: expected text in UTF-8"),
    "text for images": (["{r}/vit", "--text", "{r}/text.txt"], "a model of texts, got ViT"),
    "text without tokenizer": (["{r}/gpt2", "--text", "{r}/text.txt"], "expected at least one entry"),
    "no length": (["{r}/bert", "--length", "0"], "--length: expected at least 1"),
    "no place for numbers": (["{r}/bert", "--json", "{r}/nowhere/found.json"], "--json: expected a file in a folder"),
    "a plan that makes no sense": (["{r}/bert", "--attention", "shifted_window"], "patch"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_sentence(what, root, capsys):
    words, reason = BAD[what]
    assert run(*(word.format(r=root) for word in words)) == 2
    out, error = capsys.readouterr()
    said = [line for line in error.splitlines() if line.startswith("hf-fullpay check: ")]
    assert not out
    assert len(said) == 1
    assert reason in said[0]
    assert "Traceback" not in error
