"""What only a GPU can show; the same bodies run on small shapes in the interpreter, where they make sense.

`pytest kernels/tests -m gpu` on a machine with a GPU. There the other files of this folder run on the GPU too.
"""

import functools

import pytest
import torch
from formula import DEVICE, compare, dense, error, leaf, mean_of, pairs, results
from fullpay_kernels import attention, decode_attention, lower_median, relay_attention, visible_mean
from test_kernel_attention import padding
from test_kernel_relays import formula as dense_relays

WHERE = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("interpreter", marks=pytest.mark.skipif(DEVICE != "cpu", reason="kernels run on the GPU")),
]
everywhere = pytest.mark.parametrize("where", WHERE)
on_a_gpu = pytest.mark.gpu
HEADS, GROUPS = 4, 2


def length(where):
    """Several tiles, and a part of one."""
    return 1027 if where == "cuda" else 33


def tensors(n, *, width=64, dtype=torch.float32, batch=2, m=None):
    return {
        "query": leaf(batch, HEADS, n, width, dtype=dtype), "key": leaf(batch, GROUPS, m or n, width, dtype=dtype),
        "value": leaf(batch, GROUPS, m or n, width, dtype=dtype), "scaling": width**-0.5,
    }  # fmt: skip


def rows(n, **ranges):
    return {name: leaf(2, HEADS, n, 1, low=low, high=high) for name, (low, high) in ranges.items()}


def mixture(n, width, dtype=torch.float32):
    return rows(n, share=(0.0, 0.5)) | {"mean": leaf(2, GROUPS, n, width, dtype=dtype)}


def bounded(n):
    return rows(n, centre=(-1, 1), width=(0.5, 2), amplitude=(0.5, 3))


VARIANTS = {
    "plain": lambda n, width: {},
    "causal": lambda n, width: {"offset": 0},
    "band": lambda n, width: {"offset": 0, "window": n // 5},
    "mixture": lambda n, width: {"offset": 0} | mixture(n, width),
    "bounded": lambda n, width: bounded(n) | {"keys": padding(n, left=True)},
    "clamp": lambda n, width: {"offset": 0, "clamp_floor": leaf(1, HEADS, 1, 1, low=0.0, high=0.9 / n)},
    "bias": lambda n, width: {"bias": leaf(1, HEADS, n, n), "mask": torch.rand(2, 1, n, n, device=DEVICE) > 0.3},
}


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention(where, variant, dtype):
    n = length(where)
    # FP32 sums of 1,027 terms, and gradients of row numbers, round more than those of 33.
    precise, widths = (2e-5, (64, 128, 256)) if where == "cuda" else (2e-6, (16,))
    for width in widths:
        compare(attention, dense, tensors(n, width=width, dtype=dtype) | VARIANTS[variant](n, width), precise=precise)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_kernels(where, dtype):
    n = length(where)
    inputs = tensors(n, dtype=dtype, width=16)
    for options in ({}, {"offset": 0}, {"offset": 0, "window": n // 3}):
        value = {"value": inputs["value"], "n_queries": n} | options

        def mean(value, n_queries, options=options):
            return mean_of(value, pairs(n, n, **options)) if options else value.mean(2, keepdim=True)

        compare(functools.partial(visible_mean, **options), mean, {k: value[k] for k in ("value", "n_queries")})
    compare(relay_attention, dense_relays, inputs | {"size": n // 4, "causal": True}, precise=2e-5)
    still = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    compare(decode_attention, dense, still | {"query": still["query"][:, :, :1], "offset": n - 1})
    centre = lower_median(still["query"], still["key"], scaling=0.25, offset=0)
    key = still["key"].repeat_interleave(HEADS // GROUPS, 1)
    scores = (still["query"].double() @ key.double().mT * 0.25).masked_fill(~pairs(n, n, offset=0), torch.inf)
    exact = scores.sort(-1).values.gather(-1, (torch.arange(n, device=DEVICE) // 2).expand(2, HEADS, n)[..., None])
    assert error(centre, exact) <= 1e-5 * exact.abs().max()


@everywhere
@pytest.mark.parametrize("setting", ["highest", "high"])
def test_tf32(where, setting):
    """Off, FP32 is exact; on, it errs at most twice what torch's own products err so."""
    n = length(where)
    inputs = tensors(n) | {"offset": 0}
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        if setting == "highest" or where == "interpreter":
            compare(attention, dense, inputs, precise=2e-5)
            return
        got, eager, exact = results(attention, inputs), results(dense, inputs), results(dense, inputs, torch.float64)
    finally:
        torch.set_float32_matmul_precision(before)
    for name, want in exact.items():  # and a unit of TF32's rounding
        assert error(got[name], want) <= 2 * error(eager[name], want) + 2**-10 * want.abs().max(), name


@everywhere
@pytest.mark.parametrize("variant", ["plain", "mixture", "bounded", "clamp"])
def test_rows_that_see_nothing(where, variant):
    n = length(where)
    inputs = tensors(n, width=16) | VARIANTS[variant](n, 16) | {"keys": padding(n, left=True), "offset": 0}
    if "mean" in inputs:  # what the caller gives: the mean of nothing is zero
        inputs["mean"] = leaf(2, GROUPS, n, 16).detach() * (inputs["keys"].cumsum(1) > 0)[:, None, :, None]
    got = results(attention, inputs)
    assert all(x.isfinite().all() for x in got.values())
    assert (got["out"][1] == 0).all()
    assert (got["query"][1] == 0).all()


def far(shape, axis, stride, dtype=torch.bfloat16):
    """A tensor whose last entry lies beyond 2**31 elements; only the pages that it touches take memory on a CPU."""
    strides = list(torch.empty(shape, device="meta").stride())
    strides[axis] = stride
    size = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    assert size > 2**31
    storage = torch.UntypedStorage(size * dtype.itemsize, device=DEVICE)
    return torch.tensor([], dtype=dtype, device=DEVICE).set_(storage, 0, shape, strides)


@everywhere
@pytest.mark.parametrize("axis", range(4), ids=["batch", "heads", "rows", "columns"])
def test_strides_beyond_32_bits(where, axis):
    shape = (2, 2, 17, 16)
    stride = 2**31 // (shape[axis] - 1) + 64
    if where == "cuda" and torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("too little memory for four tensors of 4 GiB")
    share = torch.full((1, 1, 1, 1), 0.25, device=DEVICE)
    near = {name: leaf(*shape, dtype=torch.bfloat16) for name in ("query", "key", "value", "mean")}
    wide = {name: far(shape, axis, stride).copy_(x.detach()).requires_grad_() for name, x in near.items()}
    keys = padding(17, left=True)
    row = min(axis, 1)
    far_keys = far((2, 17), row, 2**31 // (keys.shape[row] - 1) + 64, torch.bool).copy_(keys)

    def run(keys, query, key, value, mean):
        out = attention(query, key, value, scaling=0.25, offset=0, share=share, mean=mean, keys=keys)
        out = out + visible_mean(value, n_queries=17, offset=0, keys=keys)
        last = {"share": share, "mean": mean[:, :, :1], "keys": keys}
        one = decode_attention(query[:, :, :1], key, value, scaling=0.25, **last)
        return [out, one, *torch.autograd.grad(out.float().square().sum(), (query, key, value, mean))]

    assert all(torch.equal(got, want) for got, want in zip(run(far_keys, **wide), run(keys, **near), strict=True))


@everywhere
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_runs_are_equal_bit_for_bit(where, variant):
    n = length(where)
    inputs = tensors(n, dtype=torch.bfloat16, width=16) | VARIANTS[variant](n, 16)
    first, second = results(attention, inputs), results(attention, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@everywhere
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=on_a_gpu)])
@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
def test_compiled(where, backend):
    """torch.compile compiles what stands around a call; the call itself breaks the graph, once, and stays as it is."""
    n = length(where)

    def layer(query, key, value, scaling):
        value = value + 1
        mean = visible_mean(value, n_queries=n, offset=0)
        share = torch.full((1, 1, 1, 1), 0.1, device=query.device)
        out = attention(query * 2, key, value, scaling=scaling, offset=0, share=share, mean=mean)
        return out.sin()

    inputs = tensors(n, width=16)
    torch._dynamo.reset()
    got, want = results(torch.compile(layer, backend=backend), inputs), results(layer, inputs)
    slack = 1e-5 if backend == "inductor" else 0.0  # it may fuse, and so round otherwise, what stands around a call
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=slack, atol=slack)
    report = torch._dynamo.explain(layer)(**inputs)
    assert report.graph_break_count == 2
    assert all("fullpay_kernels run outside" in str(reason.reason) for reason in report.break_reasons)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="leave out fullgraph=True"):
        torch.compile(layer, backend=backend, fullgraph=True)(**inputs)


@on_a_gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuda_graphs(variant):
    """Captured, forward and backward, and replayed on new numbers."""
    inputs = tensors(1027, dtype=torch.bfloat16) | VARIANTS[variant](1027, 64)
    wanted = [x for x in inputs.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    grad = torch.randn_like(inputs["query"])

    def step():
        out = attention(**inputs)
        return [out, *torch.autograd.grad(out, wanted, grad)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and fills the allocator
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        inputs["value"].copy_(torch.randn_like(inputs["value"]))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(have, want) for have, want in zip(captured, step(), strict=True))


@on_a_gpu
def test_a_second_device():
    """Launches go to the device of the tensors, not to the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    inputs = tensors(129, dtype=torch.bfloat16) | VARIANTS["mixture"](129, 64)
    there = {
        name: x.detach().to("cuda:1").requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for name, x in inputs.items()
    }
    with torch.cuda.device(0):
        got, want = results(attention, there), results(attention, inputs)
        mean = visible_mean(there["value"], n_queries=129, offset=0)
        one = decode_attention(there["query"][:, :, :1], there["key"], there["value"], scaling=0.125)
    assert all(x.device.index == 1 for x in (*got.values(), mean, one))
    assert all(torch.equal(got[name].cpu(), want[name].cpu()) for name in want)
