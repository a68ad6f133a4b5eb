"""Importance of heads and gradient flow: heads that are known to be dead."""

import pytest
import torch

from families import FAMILIES, build, inputs
from hf_fullpay.diagnosis.importance import check_heads
from hf_fullpay.diagnosis.settings import Settings
from hf_fullpay.hf.watch import watch
from probes import flat, left_as_it_was, run

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
PROJECTIONS = {
    "bert": lambda model: model.encoder.layer[1].attention.output.dense,
    "vit": lambda model: model.layers[1].attention.o_proj,
    "gpt2": lambda model: model.h[1].attn.c_proj,
    "llama": lambda model: model.layers[1].self_attn.o_proj,
}


def silence(family, model, head):
    """Zero what a head's output is multiplied with, in layer 1."""
    weight = PROJECTIONS[family](model).weight
    with torch.no_grad():
        (weight if family == "gpt2" else weight.T)[8 * head : 8 * head + 8] = 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["sdpa", "fullpay"])
def test_a_head_that_nothing_reads_is_dead_and_no_other(family, name):
    model = build(family, name, head=False)
    silence(family, model, 2)
    found = run(check_heads, model, inputs(family))
    assert found.values["dead_heads"] == 1 / 8
    assert found.tables["dead_heads"].rows == [[1, 2, 0.0]]
    assert min(flat(found.values["importance"][0])) > 0.01
    assert [number < 0.01 for number in found.values["importance"][1]] == [False, False, True, False]


@pytest.mark.parametrize("name", ["sdpa", "fullpay", "bounded"])
def test_a_head_without_values_is_dead(name):
    model = build("bert", name, head=False)
    value = model.encoder.layer[0].attention.self.value
    with torch.no_grad():
        value.weight[:8], value.bias[:8] = 0, 0
    found = run(check_heads, model, inputs("bert"))
    assert found.tables["dead_heads"].rows == [[0, 0, 0.0]]


def test_a_layer_that_nothing_reads_is_dead():
    model = build("bert", head=False)
    for head in range(4):
        silence("bert", model, head)
    found = run(check_heads, model, inputs("bert"))
    assert found.values["importance"][1] == [0.0] * 4
    assert found.values["dead_heads"] == 0.5


def test_importance_is_the_change_of_the_loss():
    """With one token of output the importance of a head is |d loss / d gate| of a gate on that head, at gate one."""
    model = build("bert").double()
    given = inputs("bert", batch=1, length=1) | {"labels": torch.tensor([1])}
    found = run(check_heads, model, given)
    assert found.notes == ["Importance of heads and gradient flow are those of the model's own loss."]
    gates = [torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    modules = [layer.attention.output for layer in model.bert.encoder.layer]
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, gate=gate: ((args[0].unflatten(-1, (4, 8)) * gate[:, None]).flatten(-2), *args[1:])
        )
        for module, gate in zip(modules, gates, strict=True)
    ]
    slopes = [gradient.abs() for gradient in torch.autograd.grad(model(**given).loss, gates)]
    for handle in handles:
        handle.remove()
    for row, slope in zip(found.values["importance"], slopes, strict=True):
        torch.testing.assert_close(torch.tensor(row, dtype=torch.float64), slope / slope.mean(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit"])
def test_labels_and_their_loss(family):
    model, given = build(family), inputs(family, right=0 if family == "vit" else 3)
    labels = given["input_ids"] if family in ("llama", "gpt2") else torch.tensor([0, 1])
    with left_as_it_was(model):
        found = run(check_heads, model, given | {"labels": labels})
    assert "own loss" in found.notes[0]
    assert found.values["dead_heads"] == 0
    assert len(found.values["gradient_norm"]) == 2


def test_batches_up_to_the_number_of_documents():
    model, given = build("bert"), inputs("bert") | {"labels": torch.tensor([0, 1])}
    rows = [{name: tensor[row : row + 1] for name, tensor in given.items()} for row in (0, 1)]
    alone = run(check_heads, model, rows[0])
    first = run(check_heads, model, given, settings=Settings(documents=1))
    assert first.values == alone.values
    both, calls = Settings(documents=2), []
    with watch(model, calls.append):
        apart = run(check_heads, model, *rows, *rows, settings=both)
    assert len(calls) == 4  # two rows, two layers
    assert apart.values["importance"][0] != alone.values["importance"][0]
    assert apart.values["importance"][0] == pytest.approx(run(check_heads, model, given).values["importance"][0], 1e-4)


def test_a_loss_that_is_not_finite():
    model = build("gpt2")
    given = inputs("gpt2") | {"labels": torch.full((2, 9), -100)}
    found = run(check_heads, model, given)
    assert not found.values
    assert found.notes == ["Heads were left out: the model's own loss is nan."]


def test_gradient_flow_is_the_gradient_of_the_loss():
    model, given = build("gpt2"), inputs("gpt2") | {"labels": inputs("gpt2")["input_ids"]}
    found = run(check_heads, model, given)
    states, handles = [], []
    for block in model.transformer.h:
        handles.append(block.register_forward_pre_hook(lambda _, args: states.append(args[0])))
    gradients = torch.autograd.grad(model(**given).loss, states)
    for handle in handles:
        handle.remove()
    flow = [float(gradient.norm(dim=-1).mean()) for gradient in gradients]
    assert found.values["gradient_norm"] == pytest.approx(flow, rel=1e-5)
    assert found.curves["gradient_flow"].series["gradient norm"] == found.values["gradient_norm"]
