"""Several samples in one row: recognised by restarting positions, or told by cu_seq_lens; they never meet."""

import pytest
import torch

from families import CAUSAL, build, inputs
from small import EVERYWHERE, NEUTRAL, ON_CAUSAL, load, on, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
SIZES = (4, 1, 6, 2)
STARTS = torch.tensor([0, 4, 5, 11, 13], dtype=torch.int32)
PLACES = torch.cat([torch.arange(size) for size in SIZES])[None]


def separate(model, ids):
    return torch.cat([states(model, input_ids=part) for part in ids.split(SIZES, 1)], 1)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("family", "name"), ON_CAUSAL)
@pytest.mark.parametrize("training", [False, True])
def test_restarting_positions_separate(family, name, training):
    """O18: with no mask and no cache, as Trainer has it."""
    model = load(family, name).train(training)
    ids = inputs(family, batch=2, length=sum(SIZES))["input_ids"]
    packed = states(model, input_ids=ids, position_ids=PLACES.expand(2, -1), use_cache=False)
    close(packed, separate(model, ids))
    as_one = states(
        model, input_ids=ids, position_ids=PLACES.expand(2, -1), attention_mask=torch.ones_like(ids), use_cache=False
    )
    assert (as_one - packed)[:, SIZES[0] :].abs().max() > 1e-2


@pytest.mark.parametrize(("family", "name"), [pair for pair in EVERYWHERE if pair[0] in ("llama", "bert")])
@pytest.mark.parametrize("ones", [False, True])
def test_boundaries_that_are_told_win(family, name, ones):
    """O20: also where a mask of ones says otherwise, for an encoder, and for two rows laid end to end."""
    model = load(family, name)
    ids = inputs(family, batch=1, length=sum(SIZES))["input_ids"]
    extra = {"attention_mask": torch.ones_like(ids)} if ones else {}
    told = {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "max_length_q": 6, "max_length_k": 6}
    close(states(model, input_ids=ids, position_ids=PLACES, **told, **extra), separate(model, ids))


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_boundaries_run_through_the_rows_of_a_batch(family):
    """Flash attention lays the rows end to end, so the second row's boundaries follow the first's."""
    model, ids = load(family, "fullpay"), inputs(family, batch=2, length=6)["input_ids"]
    starts = torch.tensor([0, 2, 6, 9, 12], dtype=torch.int32)
    places = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2]])
    told = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "position_ids": places}
    packed = states(model, input_ids=ids, attention_mask=torch.ones_like(ids), **told)
    for row, cut in ((0, 2), (1, 3)):
        parts = (ids[row : row + 1, :cut], ids[row : row + 1, cut:])
        close(packed[row : row + 1], torch.cat([states(model, input_ids=part) for part in parts], 1))


@pytest.mark.parametrize("name", on("llama"))
def test_a_shifted_range_is_no_packing(name):
    """O19: rotary positions are relative, so a shift changes nothing."""
    model, ids = load("llama", name), inputs("llama")["input_ids"]
    plain = states(model, input_ids=ids, use_cache=False)
    shifted = torch.arange(5, 14)
    for places in (shifted[None], shifted.expand(2, -1)):
        close(states(model, input_ids=ids, position_ids=places, use_cache=False), plain)


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("shape", [(9,), (1, 9), (3, 1, 9)])
def test_odd_positions_do_what_they_do_under_sdpa(family, shape):
    ids = inputs(family)["input_ids"]
    given = {"input_ids": ids, "position_ids": torch.arange(5, 14).expand(shape), "use_cache": False}
    found = []
    for model in (build(family, head=False), load(family, NEUTRAL)):
        try:
            found.append(states(model, **given))
        except (ValueError, IndexError, RuntimeError) as error:
            found.append(type(error))
    assert found[0] == found[1] if isinstance(found[0], type) else torch.allclose(*found, atol=1e-5)
