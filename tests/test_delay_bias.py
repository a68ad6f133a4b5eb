"""DelayBias as a user meets it: what times and delays mean, where they come from, and what is refused."""

import math
import pickle

import pytest
import torch

from hf_fullpay import PRESETS, AttentionPlan, Band, Clamp, DelayBias, Mixture, attention

PLAN = AttentionPlan(scores=DelayBias(beta=0.7, learnable=False))


def tensors(n=9, m=None, batch=2):
    m = n if m is None else m
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    return draw(batch, 4, n, 8), draw(batch, 2, m, 8), draw(batch, 2, m, 8)


def both(*args, **kwargs):
    """The fast path, checked against the reference."""
    fast, (reference, weights) = attention(*args, **kwargs), attention(*args, **kwargs, return_weights=True)
    torch.testing.assert_close(fast, reference, rtol=0, atol=1e-11)
    return fast, weights


def test_a_key_in_step_gains_what_the_formula_says():
    """Equal keys: weights follow exp(-beta |lag|) alone."""
    query, key, value = tensors(5, batch=1)
    key = key[:, :, :1].expand(-1, -1, 5, -1)
    times, delays = torch.tensor([[0.0, 1.0, 4.0, 4.5, 9.0]]), torch.rand(5, 5) * 3
    _, weights = both(query, key, value, plan=PLAN, given={"times": times, "delays": delays})
    lag = times[0, :, None] - times[0] - delays
    wanted = torch.softmax(-0.7 * lag.abs().double(), -1)
    torch.testing.assert_close(weights, wanted.expand_as(weights), rtol=0, atol=1e-7)


def test_slots_serve_as_times_and_nothing_as_delays():
    given = {"times": torch.arange(9).expand(2, -1), "delays": torch.zeros(9, 9)}
    query, key, value = tensors()
    explicit, _ = both(query, key, value, plan=PLAN, given=given)
    default, _ = both(query, key, value, plan=PLAN)
    torch.testing.assert_close(explicit, default)


def test_only_differences_of_times_count_however_large():
    """Seconds since 1970, whole or FP64, at a spacing of milliseconds."""
    times = torch.rand(2, 9, dtype=torch.float64).cumsum(-1)
    query, key, value = tensors()
    near, _ = both(query, key, value, plan=PLAN, given={"times": times})
    far, _ = both(query, key, value, plan=PLAN, given={"times": times + 1.7e9})
    torch.testing.assert_close(near, far, rtol=0, atol=1e-6)
    whole, _ = both(
        query, key, value, plan=PLAN, given={"times": torch.arange(2).view(2, 1) + 1_700_000_000 + torch.arange(9)}
    )
    torch.testing.assert_close(whole, both(query, key, value, plan=PLAN)[0])


def test_times_and_delays_from_the_plan_and_the_call_wins():
    times, delays = torch.rand(9), torch.rand(9, 9)
    planned = AttentionPlan(scores=DelayBias(beta=0.7, learnable=False, times=times, delays=delays))
    query, key, value = tensors()
    one, _ = both(query, key, value, plan=planned)
    other, _ = both(query, key, value, plan=PLAN, given={"times": times.expand(2, -1), "delays": delays})
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    nearly, _ = both(query, key, value, plan=planned, given={"times": torch.zeros(1, 9), "delays": torch.zeros(9, 9)})
    torch.testing.assert_close(nearly, attention(query, key, value, plan=AttentionPlan()), rtol=0, atol=1e-11)
    assert AttentionPlan.from_dict(planned.to_dict()) == planned
    assert pickle.loads(pickle.dumps(planned)) == planned
    assert "delays=9 x 9" in planned.describe()


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("reach", [None, Band(5)])
def test_a_cache_changes_nothing(per_batch, reach):
    """Fewer queries than keys: times and delays of all keys, queries at the last slots."""
    plan = AttentionPlan(reach=reach or PLAN.reach, scores=PLAN.scores, payment=Mixture(floor=None, budget=0.3))
    query, key, value = tensors()
    given = {"times": torch.rand(2, 9), "delays": torch.rand(2, 9, 9) if per_batch else torch.rand(9, 9)}
    whole, _ = both(query, key, value, plan=plan, given=given, is_causal=True)
    for start in (4, 8):
        part, _ = both(query[:, :, start:], key, value, plan=plan, given=given, is_causal="lower_right")
        torch.testing.assert_close(part, whole[:, :, start:], rtol=0, atol=1e-11)


def test_gradients_reach_times_and_delays():
    times = torch.rand(2, 9, dtype=torch.float64, requires_grad=True)
    delays = torch.rand(9, 9, dtype=torch.float64, requires_grad=True)
    query, key, value = tensors()
    found = []
    for weights in (False, True):
        output = attention(
            query, key, value, plan=PLAN, given={"times": times, "delays": delays}, return_weights=weights
        )
        output = output[0] if weights else output
        found.append(torch.autograd.grad(output.square().sum(), (times, delays)))
    for fast, reference in zip(*found, strict=True):
        assert fast.abs().max() > 0
        torch.testing.assert_close(fast, reference, rtol=0, atol=1e-10)


def test_a_beta_of_zero_is_the_host_bit_for_bit():
    query, key, value = tensors()
    plan = AttentionPlan(scores=DelayBias(beta=0.0, learnable=False))
    assert torch.equal(attention(query, key, value, plan=plan), attention(query, key, value, plan=AttentionPlan()))


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"times": torch.zeros(9)}, r"times: expected shape \(2, 9\)"),
        ({"times": torch.zeros(2, 8)}, r"times: expected shape \(2, 9\)"),
        ({"times": torch.zeros(3, 9)}, r"times: expected shape \(2, 9\)"),
        ({"times": torch.full((2, 9), math.nan)}, "times: expected finite"),
        ({"times": torch.full((2, 9), math.inf)}, "times: expected finite"),
        ({"times": torch.ones(2, 9, dtype=torch.bool)}, r"times: expected a tensor of numbers, got torch\.bool"),
        ({"times": [0.0] * 9}, "times: expected a tensor of numbers, got list"),
        ({"delays": torch.zeros(9, 8)}, r"delays: expected shape \(2, 9, 9\) or \(9, 9\)"),
        ({"delays": torch.zeros(3, 9, 9)}, "delays: expected shape"),
        ({"delays": torch.zeros(9)}, "delays: expected shape"),
        ({"delays": torch.full((9, 9), math.nan)}, "delays: expected finite"),
        ({"time": torch.zeros(2, 9)}, r"given: expected names out of \['delays', 'times'\]"),
    ],
)
@pytest.mark.parametrize("weights", [False, True])
def test_what_a_call_may_not_bring(given, word, weights):
    with pytest.raises(ValueError, match=word):
        attention(*tensors(), plan=PLAN, given=given, return_weights=weights)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: DelayBias(beta=-1.0), "beta"),
        (lambda: DelayBias(beta=math.nan), "beta"),
        (lambda: DelayBias(beta=0.0), "above 0 with learnable"),
        (lambda: DelayBias(beta=(0.1, 0.0)), "above 0 with learnable"),
        (lambda: DelayBias(times=(0.0, math.nan)), "times"),
        (lambda: DelayBias(times=3.0), "times"),
        (lambda: DelayBias(delays=((0.0, 1.0), (1.0,))), "delays"),
        (lambda: DelayBias(delays=(0.0, 1.0)), "delays"),
        (lambda: DelayBias(delays=()), "delays"),
        (lambda: DelayBias(times=(0.0,), delays=((0.0, 1.0), (1.0, 0.0))), "as many rows as times"),
        (lambda: AttentionPlan(scores=DelayBias(), payment=Clamp()), "Softmax or Mixture"),
    ],
)
def test_bad_options(make, word):
    with pytest.raises(ValueError, match=word):
        make()


def test_the_preset_starts_gently():
    """A key a hundred tokens off keeps exp(-1) of its weight."""
    assert PRESETS["delay_aware"].scores.beta == 0.01
    assert PRESETS["delay_aware"].inputs == ("times", "delays")
