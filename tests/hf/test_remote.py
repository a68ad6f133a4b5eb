"""A checkpoint in a process that never imported the plugin: it loads by trust_remote_code, or fails and says why."""

import json
import os
import subprocess
import sys

import pytest
import torch

from converted import LEARNABLE, given_to, learn, stock
from hf_fullpay import MODELS, convert
from hf_fullpay.hf.checkpoints import SHIM, auto_class_of
from small import states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
NAMES = (
    "FullPayBertForSequenceClassification",
    "FullPayViTForImageClassification",
    "FullPayGPT2LMHeadModel",
    "FullPayLlamaForCausalLM",
)

WITHOUT = """
import json, sys, warnings

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_fullpay":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import transformers

said = {}
for name, auto in json.loads(sys.argv[2]).items():
    for trust in (None, False, True):
        try:
            getattr(transformers, auto).from_pretrained(f"{sys.argv[1]}/{name}", trust_remote_code=trust)
            said[f"{name} {trust}"] = "loaded"
        except Exception as error:
            said[f"{name} {trust}"] = f"{type(error).__name__}: {error}"
open(f"{sys.argv[1]}/said.json", "w").write(json.dumps(said))
"""

WITH = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, transformers
assert "hf_fullpay" not in sys.modules

for name, auto in json.loads(sys.argv[2]).items():
    folder = f"{sys.argv[1]}/{name}"
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("hf_fullpay."), type(model)
    given = torch.load(f"{folder}-given.pt")
    with torch.no_grad():
        torch.save(model(**given)[0], f"{folder}-found.pt")
    model.save_pretrained(f"{folder}-again")
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One converted checkpoint of each family, with what it computes."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name in NAMES:
        model, given = learn(convert(stock(name), LEARNABLE["all"])), given_to(name)
        model.save_pretrained(root / name)
        torch.save(given, root / f"{name}-given.pt")
        torch.save(states(model, **given), root / f"{name}-wanted.pt")
    return root


def run(code, root, tmp_path):
    """A fresh process with caches of its own and nobody to answer a question."""
    autos = json.dumps({name: auto_class_of(MODELS[name]) for name in NAMES})
    homes = {key: str(tmp_path) for key in ("HF_HOME", "HF_MODULES_CACHE")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(root), autos], env=os.environ | homes, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_without_the_plugin_nothing_loads_in_silence(checkpoints, tmp_path):
    """O49: it never falls back to ordinary attention."""
    run(WITHOUT, checkpoints, tmp_path)
    said = json.loads((checkpoints / "said.json").read_text())
    assert len(said) == 3 * len(NAMES)
    for who, what in said.items():
        wanted = "hf_fullpay" if who.endswith("True") else "trust_remote_code"
        assert what.startswith(("ValueError", "ImportError")), f"{who}: {what}"
        assert wanted in what, f"{who}: {what}"


def test_with_trust_the_shim_finds_the_plugin(checkpoints, tmp_path):
    """The same numbers; and a checkpoint saved by that process leads to the plugin again."""
    run(WITH, checkpoints, tmp_path)
    for name in NAMES:
        found, wanted = (torch.load(checkpoints / f"{name}-{which}.pt") for which in ("found", "wanted"))
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
        first, again = checkpoints / name, checkpoints / f"{name}-again"
        assert sorted(file.name for file in again.iterdir()) == sorted(file.name for file in first.iterdir())
        for file in ("config.json", f"{SHIM}.py"):
            assert (again / file).read_text() == (first / file).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_shim_is_one_import(checkpoints, name):
    """No relative import, no copy of our source: an auto_map to two classes that the plugin exports."""
    folder = checkpoints / name
    config = json.loads((folder / "config.json").read_text())
    kinds = (MODELS[name].config_class.__name__, name)
    assert config["auto_map"] == {"AutoConfig": f"{SHIM}.{kinds[0]}", auto_class_of(MODELS[name]): f"{SHIM}.{kinds[1]}"}
    code = (folder / f"{SHIM}.py").read_text()
    imports = [line for line in code.splitlines() if "import" in line]
    assert imports == [f"from hf_fullpay import {kinds[0]}, {kinds[1]}  # noqa: F401"]
    assert "pip install hf-fullpay" in code
    found = {}
    exec(compile(code, SHIM, "exec"), found)
    assert found[name] is MODELS[name]
