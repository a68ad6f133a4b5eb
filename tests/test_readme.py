"""The README: tables are rendered from data, and its Python runs as written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import hf_fullpay
from families import build

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_tables_are_not_stale():
    command = [sys.executable, str(ROOT / "benchmarks" / "report.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run: python benchmarks/report.py"


@pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
def test_python_runs_as_written(tmp_path, monkeypatch):
    """All blocks in order, with a tiny checkpoint in the place of the Hub's."""
    monkeypatch.chdir(tmp_path)
    build("bert").save_pretrained("bert-base-uncased")
    build("gpt2", vocab_size=50257).save_pretrained("gpt2")
    scope = {}
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        exec(block, scope)
    assert scope["output"].shape == scope["query"].shape
    assert torch.equal(scope["weights"].sum(-1) > 0.99, torch.ones(1, 8, 512, dtype=torch.bool))
    assert isinstance(scope["model"], hf_fullpay.FullPayBertForSequenceClassification)
    assert type(scope["stock"]) is transformers.BertForSequenceClassification
