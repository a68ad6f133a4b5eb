"""Measures of a classification, with and without the package `evaluate`."""

import sys
import types

import pytest

import metrics

PREDICTED, WANTED = [0, 0, 1, 1, 2], [0, 1, 1, 1, 0]


def test_by_hand():
    pytest.importorskip("sklearn")
    found = metrics.classification(PREDICTED, WANTED)
    # F1 of label 0: 1/2; of 1: 4/5; of 2, which is never right: 0.
    assert found["accuracy"] == pytest.approx(3 / 5)
    assert found["macro_f1"] == pytest.approx((1 / 2 + 4 / 5 + 0) / 3)
    assert found["rows"] == 5


def test_no_rows():
    assert metrics.classification([], []) == {"rows": 0, "accuracy": None, "macro_f1": None}


def evaluator(monkeypatch, load):
    monkeypatch.setitem(sys.modules, "evaluate", types.SimpleNamespace(load=load))
    monkeypatch.setattr(metrics, "find_spec", lambda name: name)


def test_evaluate_where_it_is_at_hand(monkeypatch):
    def load(name):
        return types.SimpleNamespace(compute=lambda predictions, references, **options: {name: 0.25})

    evaluator(monkeypatch, load)
    found = metrics.classification(PREDICTED, WANTED)
    assert found == {"rows": 5, "accuracy": 0.25, "macro_f1": 0.25, "computed_by": "evaluate"}


def test_scikit_learn_where_its_metric_cannot_be_fetched(monkeypatch):
    def load(name):
        raise FileNotFoundError(f"Couldn't find a module script at {name}")

    evaluator(monkeypatch, load)
    assert metrics.classification(PREDICTED, WANTED)["computed_by"] == "scikit-learn"
