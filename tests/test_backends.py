"""Every backend computes the same thing or says why it cannot."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import hf_fullpay
from hf_fullpay import PRESETS, AttentionPlan, Band, Bounded, Clamp, FullPayWarning, Mixture, attention, backend
from hf_fullpay.backends import BACKENDS, LACKS, choose, features_of, lacks
from hf_fullpay.fast import flex, kernels
from hf_fullpay.reach import Full

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")


def tensors(n=40, m=None, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 4, n, 16), (2, 2, m or n, 16), (2, 2, m or n, 16))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def causal_for(plan):
    return plan.reach == Band(128)


ON_TEXT = [name for name, plan in PRESETS.items() if not plan.reach.misfit(cross=False, causal=False, image=False)]


@pytest.mark.parametrize("name", ON_TEXT)
@pytest.mark.parametrize("chosen", ["auto", "torch", "sdpa", "reference"])
def test_backends_agree_or_refuse(name, chosen):
    query, key, value = tensors()
    options = {"plan": name, "is_causal": causal_for(PRESETS[name])}
    exact = attention(query.double(), key.double(), value.double(), **options, return_weights=True)[0]
    reason = lacks(chosen, PRESETS[name], (query, key, value)) if chosen != "auto" else None
    with backend(chosen):
        if reason:
            with pytest.raises(
                ValueError, match=r"backend: expected one that serves .*got 'sdpa'.*backend\(\"torch\"\)"
            ):
                attention(query, key, value, **options)
            return
        torch.testing.assert_close(attention(query, key, value, **options).double(), exact, atol=2e-6, rtol=1e-5)


@pytest.mark.skipif(not flex.has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("case", ["causal", "padded", "band", "bounded", "unequal"])
def test_flex_equals_the_reference(case):
    options = {
        "causal": {"plan": "fullpay", "is_causal": True},
        "padded": {"plan": "fullpay", "visible": torch.arange(150).expand(2, -1) >= torch.tensor([[0], [37]])},
        "band": {"plan": AttentionPlan(reach=Band(20), payment=Mixture(pay="visible")), "is_causal": True},
        "bounded": {"plan": AttentionPlan(scores=Bounded(bound=(0.3, 1.0, 2.0, float("inf")))), "is_causal": True},
        "unequal": {"plan": "bounded", "is_causal": "lower_right"},
    }[case]
    query, key, value = tensors(140 if case == "unequal" else 150, 150)
    if "visible" in options:
        key, value = (x.masked_fill(~options["visible"][:, None, :, None], 1e4) for x in (key, value))
    with backend("flex"):
        out = attention(query, key, value, **options)
    with backend("reference"):
        exact = attention(query.double(), key.double(), value.double(), **options)
    torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=1e-5)


def test_flex_says_what_it_cannot_do():
    query, key, value = tensors()
    with backend("flex"):
        with pytest.raises(ValueError, match=r"got 'flex'\. FlexAttention has no backward pass on a CPU"):
            attention(query.requires_grad_(), key, value, plan="fullpay")
        with pytest.raises(ValueError, match="a median needs the row"):
            attention(query.detach(), key, value, plan=AttentionPlan(scores=Bounded(centre="median")))
        with pytest.raises(ValueError, match="no dropout"):
            attention(query.detach(), key, value, plan="fullpay", dropout=0.1)
        with pytest.raises(ValueError, match="no float64"):
            attention(query.detach().double(), key.double(), value.double(), plan="fullpay")


def test_flex_without_a_compiler(monkeypatch):
    monkeypatch.setattr(flex, "has_compiler", lambda: False)
    with backend("flex"), pytest.raises(ValueError, match=r"needs a C\+\+ compiler on a CPU, and none was found"):
        attention(*tensors(), plan="fullpay")


def test_has_compiler_sees_a_missing_one():
    code = "from hf_fullpay.fast.flex import has_compiler; assert not has_compiler()"
    environment = os.environ | {"CXX": "/nowhere/c++"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)


def test_triton_on_a_cpu_is_refused():
    with backend("triton"), pytest.raises(ValueError, match=r"[Tt]he kernels run on a GPU|Triton could not be loaded"):
        attention(*tensors(), plan="bounded")


@pytest.mark.parametrize("state", ["missing", "broken"])
def test_triton_missing_or_broken(state, tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("")
    (tmp_path / "triton" / "language.py").write_text("raise OSError('libcuda.so: wrong driver')")
    code = f"""
import sys, warnings
import torch, hf_fullpay
x = torch.randn(1, 2, 8, 16)
hf_fullpay.attention(x, x, x, plan="bounded")
for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
    del sys.modules[name]
if {state!r} == "missing":
    sys.modules["triton"] = None
else:
    sys.path.insert(0, {str(tmp_path)!r})
with warnings.catch_warnings(record=True) as told, hf_fullpay.backend("triton"):
    warnings.simplefilter("always")
    try:
        hf_fullpay.attention(x, x, x, plan="bounded")
    except ValueError as error:
        assert "Triton could not be loaded: pip install 'hf-fullpay[triton]'" in str(error), error
    else:
        raise AssertionError("not refused")
assert ({state!r} == "broken") == any("libcuda.so: wrong driver" in str(one.message) for one in told), told
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def on_a_gpu(dtype=torch.float16):
    """What `choose` asks of tensors, as on a GPU."""
    return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 4, 40, 16), requires_grad=False)


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr("hf_fullpay.backends._told", set())
    monkeypatch.setattr(kernels, "load", lambda: object())
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(kernels, "passes_check", lambda device, dtype: True)
    return monkeypatch


def test_auto_takes_the_kernels_on_a_gpu_for_changed_scores_and_weights_alone(fresh):
    query = on_a_gpu()
    for name, plan in PRESETS.items():
        changed = isinstance(plan.scores, Bounded) or isinstance(plan.payment, Clamp)
        wanted = "triton" if changed and isinstance(plan.reach, Full | Band) else "torch"
        assert choose(plan, query, query, query, bias=None, dropout=0.0) == wanted, name


@pytest.mark.filterwarnings("default::hf_fullpay.FullPayWarning")
def test_auto_warns_once_where_it_takes_the_slower_path(fresh):
    query, plan = on_a_gpu(), PRESETS["bounded"]
    with pytest.warns(FullPayWarning, match=r"the kernels have no dropout\. Tiles of PyTorch .* several times slower"):
        assert choose(plan, query, query, query, bias=None, dropout=0.1) == "torch"
    assert choose(plan, query, query, query, bias=None, dropout=0.1) == "torch"  # in silence: warnings are errors
    fresh.setattr(kernels, "load", lambda: None)
    with pytest.warns(FullPayWarning, match="Triton could not be loaded"):
        assert choose(plan, query, query, query, bias=None, dropout=0.0) == "torch"
    fresh.setattr(kernels, "load", lambda: object())
    fresh.setattr(kernels, "passes_check", lambda device, dtype: False)
    with pytest.warns(FullPayWarning, match="failed their check"):
        assert choose(plan, query, query, query, bias=None, dropout=0.0) == "torch"
    wide = on_a_gpu()
    wide.shape = (1, 4, 40, 320)
    fresh.setattr(kernels, "passes_check", lambda device, dtype: True)
    with pytest.warns(FullPayWarning, match="up to a width of 256"):
        assert choose(plan, wide, wide, wide, bias=None, dropout=0.0) == "torch"


def test_the_choice_ends_with_its_block_also_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), backend("reference"):
        raise RuntimeError("inside")
    query, key, value = tensors()
    with backend("sdpa"), backend("auto"):
        attention(query, key, value, plan="bounded")
    with pytest.raises(ValueError, match=r"backend\(name\): expected one of 'auto', .*got 'cuda'"), backend("cuda"):
        pass


@pytest.mark.parametrize(("value", "passes"), [("reference", True), ("sdpa", False), ("fast", False)])
def test_environment_variable(value, passes):
    code = "import torch, hf_fullpay; x = torch.ones(1, 2, 4, 8); hf_fullpay.attention(x, x, x, plan='bounded')"
    environment = os.environ | {"HF_FULLPAY_BACKEND": value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) == passes
    if value == "fast":
        assert "environment variable HF_FULLPAY_BACKEND: expected one of 'auto'" in done.stderr


def test_a_compiled_function_follows_the_backend():
    query, key, value = tensors()
    compiled = torch.compile(lambda: attention(query, key, value, plan="bounded"), backend="eager", fullgraph=True)
    before = compiled()
    with backend("reference"):
        other = compiled()
    assert not torch.equal(before, other)  # another order of sums
    torch.testing.assert_close(before, other, atol=2e-6, rtol=1e-5)
    with backend("sdpa"), pytest.raises(Exception, match="expected one that serves"):
        compiled()


def test_every_feature_of_a_plan_is_a_word_of_the_table():
    words = {word for row in LACKS.values() for word in row}
    plans = [*PRESETS.values(), AttentionPlan(scores=Bounded(centre="median", slope="rescale"), payment=Clamp())]
    for plan in plans:
        assert features_of(plan) <= words
    assert set(BACKENDS) == {"auto", *LACKS}
    assert hf_fullpay.BACKENDS is BACKENDS
