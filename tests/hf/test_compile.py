"""torch.compile and torch.export: the same numbers at lengths never traced, and few graphs. One layer, to be quick."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import StaticCache

from converted import LEARNABLE
from families import build, inputs
from hf_fullpay import convert
from small import EVERYWHERE, load, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
LENGTHS = (7, 9, 33)
# Tracing takes seconds: every preset in one decoder and one encoder, and two that use most of the code in the others.
TRACED = [
    (f, n)
    for f, n in EVERYWHERE
    if f in ("llama", "bert") or n in ("fullpay_band", "bounded_fullpay", "shifted_window")
]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def shallow(family, name):
    return load(family, name, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 1})


def sized(family, size):
    """Inputs of some length; images have but one, so their number varies."""
    return inputs(family, batch=size) if family == "vit" else inputs(family, length=size)


def compiled(model):
    counter = CompileCounterWithBackend("eager")
    return torch.compile(model, fullgraph=True, dynamic=True, backend=counter), counter


@pytest.mark.parametrize(("family", "name"), TRACED)
def test_compiled_equals_eager_with_few_graphs(family, name):
    """O57: short and long sequences may take one graph each."""
    model = shallow(family, name)
    fast, counter = compiled(model)
    for size in LENGTHS:
        given = sized(family, size)
        torch.testing.assert_close(states(fast, **given), states(model, **given), rtol=0, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["fullpay_band", "bounded_fullpay", "fullpay_block", "lia"])
def test_no_graph_for_every_length(name):
    """Round numbers and multiples of our tiles included."""
    model = shallow("llama", name)
    fast, counter = compiled(model)
    for size in (7, 12, 33, 48, 50, 64, 65, 127, 128, 129):
        given = inputs("llama", length=size, left=2)
        torch.testing.assert_close(states(fast, **given)[:, 2:], states(model, **given)[:, 2:], rtol=0, atol=2e-5)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_gradients_through_a_compiled_model(family):
    """With everything that can be learned, through autograd's own tracing."""
    model = convert(build(family, num_hidden_layers=1), LEARNABLE["all"])
    fast = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    gradients = []
    for run in (model, fast):
        model.zero_grad()
        run(**inputs(family))[0].square().sum().backward()
        gradients.append({path: p.grad.clone() for path, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for path, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][path], gradient, rtol=1e-4, atol=1e-4, msg=path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "fullpay"),
        ("llama", "fullpay_band"),
        ("llama", "bounded_fullpay"),
        ("llama", "fullpay_clamp"),
        ("gpt2", "fullpay_band"),
        ("llama", "fullpay_block"),
        ("llama", "lia"),
    ],
)
def test_decoding_compiled_with_a_static_cache(family, name):
    """One graph for the prompt, one for all steps."""
    model, ids = shallow(family, name), inputs(family, length=12)["input_ids"]
    whole = states(model, input_ids=ids, use_cache=False)
    fast, counter = compiled(model)
    cache = StaticCache(config=model.config, max_cache_len=16)
    found = [states(fast, input_ids=ids[:, :6], cache=cache)]
    found += [states(fast, input_ids=ids[:, i : i + 1], cache=cache) for i in range(6, 12)]
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=0, atol=2e-4)
    assert counter.frame_count <= 3


@pytest.mark.parametrize(("family", "name"), [pair for pair in EVERYWHERE if pair[0] in ("bert", "vit")])
def test_export(family, name):
    """O58: exact at sizes other than the one that was traced, padded or not."""
    size = torch.export.Dim("size", min=2, max=150)
    for pads in (0, 2) if family == "bert" else (0,):
        model, given = shallow(family, name), inputs(family, right=pads)
        shapes = {key: {0 if family == "vit" else 1: size} for key in given}
        exported = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=False).module()
        for other in (5, 33, 128):
            given = inputs(family, batch=other) if family == "vit" else inputs(family, length=other, right=pads)
            torch.testing.assert_close(exported(**given)[0], states(model, **given), rtol=0, atol=1e-5)
