"""The command line on tiny checkpoints: what it writes, and one sentence with exit code 2 when the input is wrong."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers

import zoo
from converted import learn, learned
from families import FAMILIES, build, inputs, tiny
from hf_fullpay import PRESETS, AttentionPlan, Mixture, convert
from hf_fullpay.hf.cli import main
from small import EVERYWHERE, home, plans, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A checkpoint of every family, and damaged ones."""
    root = tmp_path_factory.mktemp("sources")
    for family in FAMILIES:
        build(family).save_pretrained(root / family)
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "cat": 2}, unk_token="[UNK]"))
    t.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]").save_pretrained(root / "bert")
    t.ViTImageProcessor().save_pretrained(root / "vit")
    build("llama").save_pretrained(root / "half")
    weights = root / "half" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    (root / "no config").mkdir()
    build("llama").save_pretrained(root / "bad config")
    (root / "bad config" / "config.json").write_text("{")
    zoo.make("roberta").save_pretrained(root / "roberta")
    for name, text in {"broken": "{", "list": "[]", "unknown": '{"reech": 1}', "new": '{"version": 9}'}.items():
        (root / f"{name}.json").write_text(text)
    (root / "binary.json").write_bytes(b"\xff\xfe\x00")
    (root / "plan.json").write_text(json.dumps(AttentionPlan(payment=Mixture(budget=0.3), layers=[1]).to_dict()))
    return root


def run(*words):
    return main([str(word) for word in words])


@pytest.mark.parametrize(("family", "preset"), EVERYWHERE)
def test_convert_writes_what_loads(family, preset, sources, tmp_path, capsys):
    target = tmp_path / "new" / "folder"
    assert run("convert", sources / family, target, "--attention", preset) == 0
    model = tiny(family).auto.from_pretrained(target)
    assert type(model).__name__.startswith("FullPay")
    assert plans(model) == [PRESETS[preset]] * 2
    wanted = convert(build(family), preset)
    torch.testing.assert_close(states(model, **inputs(family)), states(wanted, **inputs(family)), rtol=0, atol=2e-6)
    assert PRESETS[preset].describe() in capsys.readouterr().out
    assert preset in (target / "README.md").read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["new"]
    assert [file.name for file in target.parent.iterdir()] == ["folder"]


def test_convert_with_options(sources, tmp_path):
    words = ("--layers", "from:1", "--floor", "null", "--budget", "0.1,0.2,0.3,0.4", "--learnable", "true", "--gate")
    assert run("convert", *words, sources / "gpt2", tmp_path) == 0  # an empty folder is as good as none
    model = t.AutoModelForCausalLM.from_pretrained(tmp_path)
    payment = Mixture(floor=None, budget=[0.1, 0.2, 0.3, 0.4], learnable=True)
    assert plans(model) == [AttentionPlan(), AttentionPlan(payment=payment, gate=True, layers="from:1")]
    assert len(learned(model)) == 3


def test_convert_with_a_plan_and_a_task(sources, tmp_path):
    words = ("--plan", sources / "plan.json", "--task", "token-classification", "--budget", "0.4")
    assert run("convert", sources / "bert", tmp_path / "out", *words) == 0
    model = t.AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
    assert plans(model)[1] == AttentionPlan(payment=Mixture(budget=0.4), layers=[1])


@pytest.fixture
def reader(sources, tmp_path):
    """A checkpoint whose tokenizer knows several words, and documents."""
    (tmp_path / "texts.txt").write_text("cat cat dog cat\n\ncat dog\ndog cat cat\n")
    shutil.copytree(sources / "bert", tmp_path / "reader")
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "cat": 2, "dog": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    t.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]").save_pretrained(tmp_path / "reader")
    return tmp_path / "reader", "--text", tmp_path / "texts.txt"


def test_calibrate_writes_a_plan_that_convert_reads(reader, tmp_path, capsys):
    plan, words = tmp_path / "bounds.json", ("--batch", 2, "--reduction", 8)
    assert run("calibrate", *reader, *words, "--attention", "bounded_fullpay", "--out", plan) == 0
    written = AttentionPlan.from_dict(json.loads(plan.read_text()))
    assert (len(written.scores.bound), written.payment) == (2, PRESETS["bounded_fullpay"].payment)
    assert "8 times lower" in capsys.readouterr().out
    assert run("convert", reader[0], tmp_path / "out", "--plan", plan) == 0
    assert plans(t.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")) == written.for_layers(2)
    assert run("calibrate", *reader, *words, "--plan", plan, "--budget", "100", "--out", plan) == 0
    assert AttentionPlan.from_dict(json.loads(plan.read_text())).layers == "all_but_last"


def test_calibrate_refuses(reader, tmp_path, capsys):
    plan = tmp_path / "bounds.json"
    for words, reason in (
        (("--attention", "fullpay"), "a plan with Bounded scores"),
        (("--reduction", 0), "reduction=...): expected"),
        (("--out", tmp_path), "--out: expected a file"),
        (("--out", tmp_path / "none" / "plan.json"), "--out: expected a file"),
        (("--reduction", 100, "--budget", 0), "expected a layer that changes"),
    ):
        assert run("calibrate", *reader, "--out", plan, *words) == 2
        assert reason in capsys.readouterr().err
        assert not plan.exists()


def test_preprocessors_come_along_where_there_are_any(sources, tmp_path, capsys):
    for family, word in (("bert", "tokenizer"), ("vit", "image processor"), ("gpt2", "; with a card")):
        assert run("convert", sources / family, tmp_path / family) == 0
        assert word in capsys.readouterr().out
    assert t.AutoTokenizer.from_pretrained(tmp_path / "bert").get_vocab() == {"[PAD]": 0, "[UNK]": 1, "cat": 2}
    assert (tmp_path / "vit" / "preprocessor_config.json").exists()
    assert not list((tmp_path / "gpt2").glob("*token*"))


BAD = {
    "no such folder": (["{s}/nothing", "{t}"], "nothing"),
    "no such Hub id": (["nobody/nothing", "{t}"], "connect"),
    "no config": (["{s}/no config", "{t}"], "config.json"),
    "bad config": (["{s}/bad config", "{t}"], "not a valid JSON"),
    "half the weights": (["{s}/half", "{t}"], "damaged"),
    "no FullPay class": (["{s}/roberta", "{t}"], "got RobertaModel"),
    "target in use": (["{s}/bert", "{s}/gpt2"], "DST: expected a folder that holds nothing yet"),
    "target is a file": (["{s}/bert", "{s}/plan.json"], "DST: expected a folder that holds nothing yet"),
    "option of another preset": (["{s}/bert", "{t}", "--size", "3"], "got 'size'"),
    "value out of range": (["{s}/bert", "{t}", "--budget", "7"], "budget=...): expected a number in [0, 1]"),
    "values for other heads": (["{s}/bert", "{t}", "--budget", "0.1,0.2"], "one per head (4), got 2"),
    "no such layer": (["{s}/bert", "{t}", "--layers", "from:9"], "layers"),
    "no such task": (["{s}/bert", "{t}", "--task", "nonsense"], "--task: expected"),
    "task of other models": (["{s}/bert", "{t}", "--task", "image-classification"], "a task of 'bert' models"),
    "broken plan": (["{s}/bert", "{t}", "--plan", "{s}/broken.json"], "--plan: expected a file of JSON"),
    "binary plan": (["{s}/bert", "{t}", "--plan", "{s}/binary.json"], "--plan: expected a file of JSON"),
    "missing plan": (["{s}/bert", "{t}", "--plan", "{s}/none.json"], "--plan: expected a file of JSON"),
    "plan is a list": (["{s}/bert", "{t}", "--plan", "{s}/list.json"], "attention plan: expected a dict"),
    "plan with unknown words": (["{s}/bert", "{t}", "--plan", "{s}/unknown.json"], "reech"),
    "plan of a newer version": (["{s}/bert", "{t}", "--plan", "{s}/new.json"], "pip install --upgrade hf-fullpay"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_sentence(what, sources, tmp_path, capsys):
    """Exit code 2, nothing on the standard output, nothing on disk."""
    words, reason = BAD[what]
    before = sorted(file.name for file in sources.rglob("*"))
    assert run("convert", *(word.format(s=sources, t=tmp_path / "out") for word in words)) == 2
    out, error = capsys.readouterr()
    said = [line for line in error.splitlines() if line.startswith("hf-fullpay convert: ")]
    assert not out
    assert len(said) == 1
    assert reason in said[0]
    assert len(said[0]) < 700
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())
    assert sorted(file.name for file in sources.rglob("*")) == before


@pytest.mark.parametrize(
    "words", ["", "frobnicate", "convert", "convert a", "inspect", "convert a b --attention fulpay", "list --xml"]
)
def test_bad_usage(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2
    assert "usage: hf-fullpay" in capsys.readouterr().err


def test_list_shows_the_table(capsys):
    assert run("list") == 0
    shown = capsys.readouterr().out
    assert all(name in shown and plan.describe() in shown for name, plan in PRESETS.items())
    assert run("list", "--json") == 0
    read = json.loads(capsys.readouterr().out)
    assert {name: AttentionPlan.from_dict(plan) for name, plan in read.items()} == dict(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_inspect(preset, sources, tmp_path, capsys):
    """A converted checkpoint, and the same stock checkpoint under the preset."""
    family = home(preset)
    learn(convert(build(family), preset)).save_pretrained(tmp_path)
    for words in ([tmp_path], [sources / family, "--attention", preset]):
        assert run("inspect", *words) == 0
        shown = capsys.readouterr().out
        assert f"attn_implementation={preset!r}" in shown
        assert shown.count(PRESETS[preset].describe()) >= 2
        learns = PRESETS[preset].is_learnable and words == [tmp_path]
        assert ("learned numbers: none" not in shown) == learns
        assert all(promise in shown for promise in PRESETS[preset].promises(512))


def test_inspect_says_what_layers_differ_and_what_was_learned(tmp_path, capsys):
    plan = AttentionPlan(payment=Mixture(learnable=True), gate=True, layers=[1])
    model = convert(build("llama"), plan)
    with torch.no_grad():
        model.model.layers[1].self_attn.fullpay.budget_bias.copy_(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
    model.save_pretrained(tmp_path)
    assert run("inspect", tmp_path) == 0
    shown = capsys.readouterr().out
    numbers = model.model.layers[1].self_attn.fullpay(torch.zeros(1, 1, 32))["budget"]
    assert "ordinary attention" in shown
    assert f"budget {numbers.min():.4f} to {numbers.max():.4f}" in shown
    assert f"learned numbers: {4 + 4 + 4 * 32}, in 1 layers" in shown


def test_inspect_refuses(sources, capsys):
    assert run("inspect", sources / "bert") == 0
    assert "ordinary attention" in capsys.readouterr().out
    for words, reason in (
        (["inspect", sources / "nothing"], "nothing"),
        (["inspect", sources / "bad config"], "not a valid JSON"),
    ):
        assert run(*words) == 2
        assert reason in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error():
    """`hf-fullpay list | head`: quiet, with the code of a command that a closed pipe ended."""
    code = "import sys; from hf_fullpay.hf.cli import main; sys.exit(main(['list']))"
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command.stdout.close()
    assert command.stderr.read() == b""
    assert command.wait(timeout=120) == 141
