"""Channel attention in a converted ViT: the identity at the start, in the checkpoint, and left behind by revert."""

import pytest
import torch
from transformers import AutoModelForImageClassification, ViTForImageClassification

from families import build, inputs
from hf_fullpay import FullPayWarning, convert, revert
from hf_fullpay.layers import SqueezeExcite
from small import states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")


def train(model):
    """Pretend that training moved every channel attention."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, SqueezeExcite):
                for parameter in module.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.5)
    return model


def channels(model):
    return [module for module in model.modules() if isinstance(module, SqueezeExcite)]


@pytest.mark.parametrize("head", [True, False])
def test_a_converted_vit_starts_as_it_was(head):
    stock, given = build("vit", head=head), inputs("vit")
    plain = convert(stock, "fullpay")
    with_channels = convert(stock, "fullpay", channel_attention=True)
    assert len(channels(with_channels)) == 2
    assert not channels(plain)
    assert torch.equal(states(with_channels, **given), states(plain, **given))
    train(with_channels)
    assert (states(with_channels, **given) - states(plain, **given)).abs().max() > 1e-3
    with_channels(**given)[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for m in channels(with_channels) for p in m.parameters())


@pytest.mark.parametrize("name", [None, "sdpa", "bounded"])
def test_the_checkpoint_holds_it_whatever_the_attention(tmp_path, name):
    model, given = train(convert(build("vit"), "fullpay", channel_attention=True)), inputs("vit")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(
        tmp_path, **({} if name is None else {"attn_implementation": name})
    )
    assert loaded.config.channel_attention is True
    ours, theirs = (dict(m.named_parameters()) for m in (model, loaded))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[path], theirs[path]) for path in ours)
    if name is None:
        assert torch.equal(states(loaded, **given), states(model, **given))


def test_a_stock_checkpoint_loads_into_it_as_the_identity(tmp_path):
    """What the checkpoint lacks is initialised, never left as memory was."""
    stock, given = build("vit"), inputs("vit")
    stock.save_pretrained(tmp_path)
    kind = type(convert(stock, "fullpay"))
    loaded = kind.from_pretrained(tmp_path, channel_attention=True)
    assert len(channels(loaded)) == 2
    assert all(p.isfinite().all() for p in loaded.parameters())
    assert all(m.squeeze.weight.abs().max() > 0 for m in channels(loaded))
    assert torch.equal(states(loaded, **given), states(convert(stock, "fullpay"), **given))


def test_bf16():
    model = convert(build("vit").bfloat16(), "fullpay", channel_attention=True)
    given = {"pixel_values": inputs("vit")["pixel_values"].bfloat16()}
    assert states(model, **given).isfinite().all()


def test_converting_again_and_back():
    stock, given = build("vit"), inputs("vit")
    model = train(convert(stock, "fullpay", channel_attention=True))
    again = convert(convert(model, "bounded", channel_attention=True), "fullpay", channel_attention=True)
    assert torch.equal(states(again, **given), states(model, **given))
    with pytest.warns(FullPayWarning, match="channel attention .* left behind.*channel_attention=True keeps it"):
        without = convert(model, "bounded")
    assert torch.equal(states(without, **given), states(convert(stock, "bounded"), **given))
    with pytest.warns(FullPayWarning, match="channel attention .* left behind"):
        back = revert(model)
    assert type(back) is ViTForImageClassification
    assert not hasattr(back.config, "channel_attention")
    assert torch.equal(states(back, **given), states(stock, **given))


def test_only_for_images():
    with pytest.raises(ValueError, match=r"expected a ViT.*got BertForSequenceClassification"):
        convert(build("bert"), "fullpay", channel_attention=True)
    with pytest.raises(ValueError, match="True or False"):
        convert(build("vit"), "fullpay", channel_attention=1)
