"""Shifted windows under Transformers: the grid is found for any image, in every model whose patches keep their places."""

import copy
import pickle
import threading

import pytest
import torch
import transformers as t
from torch import nn

import zoo
from families import build, inputs, randomise
from hf_fullpay import AttentionPlan, Mixture, Windows, convert, revert
from hf_fullpay.hf.forward import CARRIER
from hf_fullpay.reach.windows import Axis
from small import load, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
SIZES = zoo.SIZES | zoo.STILL | {"image_size": 32, "patch_size": 4, "num_hidden_layers": 3}
# Class, options, tokens before the patches, how to ask for another size of image (None: it needs no asking).
MODELS = {
    "vit": ("ViTModel", {}, 1, True),
    "vit head": ("ViTForImageClassification", {}, 1, True),
    "deit": ("DeiTModel", {}, 2, True),
    "deit head": ("DeiTForImageClassificationWithTeacher", {}, 2, True),
    "dinov2": ("Dinov2Model", {}, 1, None),
    "dinov2 head": ("Dinov2ForImageClassification", {}, 1, None),
    "dinov2 with registers": ("Dinov2WithRegistersModel", {"num_register_tokens": 4}, 5, None),
    "clip vision": ("CLIPVisionModel", {}, 1, True),
    "beit": ("BeitModel", {"use_relative_position_bias": True, "drop_path_rate": 0.0}, 1, True),
    "vit msn": ("ViTMSNModel", {}, 1, True),
    "dinov3": ("DINOv3ViTModel", {"num_register_tokens": 4}, 5, None),
    "ijepa": ("IJepaModel", {}, 0, True),
}


def make(name, attention="shifted_window", **changes):
    kind, options, *_ = MODELS[name]
    torch.manual_seed(0)
    kind = getattr(t, kind)
    return randomise(kind(kind.config_class(**SIZES | options | changes, attn_implementation=attention))).eval()


def pixels(high=32, wide=32, batch=2):
    return torch.randn(batch, 3, high, wide, generator=torch.Generator().manual_seed(1))


def given_to(name, high=32, wide=32):
    ask = MODELS[name][3]
    given = {"pixel_values": pixels(high, wide)}
    return given | ({"interpolate_pos_encoding": True} if ask and (high, wide) != (32, 32) else {})


def windows(rows, columns, others, shift, size=7):
    """Who sees whom, (N, N)."""
    lines = [Axis.of(length, size, shift).windows(torch.device("cpu")) for length in (rows, columns)]
    place = (lines[0][:, None] * 100 + lines[1]).flatten()
    pairs = torch.ones(others + len(place), others + len(place), dtype=torch.bool)
    pairs[others:, others:] = place[:, None] == place
    return pairs


@pytest.mark.parametrize(
    ("name", "high", "wide"),
    # BEiT's own bias is made for one size; DINOv2 wants whole patches.
    [(name, 32, 32) for name in MODELS]
    + [(name, *size) for name in MODELS if name != "beit" for size in ((48, 40), (20, 64))]
    + [(name, 42, 33) for name in MODELS if name != "beit" and "dinov2" not in name],
)
def test_every_layer_sees_its_windows(name, high, wide):
    """O55: any resolution, also one that is no multiple of a patch; alternate layers shifted."""
    model, others = make(name), MODELS[name][2]
    result = model(**given_to(name, high, wide), output_attentions=True)
    assert len(result.attentions) == 3
    for layer, weights in enumerate(result.attentions):
        wanted = windows(high // 4, wide // 4, others, layer % 2 * 3)
        assert not wanted.all()
        assert torch.equal(weights[0, 0] != 0, wanted), layer
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    fast = model(**given_to(name, high, wide))
    torch.testing.assert_close(fast[0], result[0], rtol=0, atol=2e-4)


def test_positional_pixels_and_a_grid_of_ones_own():
    model = make("vit")
    wanted = states(model, pixel_values=pixels())
    with torch.no_grad():
        assert torch.equal(model(pixels())[0], wanted)
        assert torch.equal(model(pixels(), patch_grid=(8, 8))[0], wanted)
        other = model(pixels(), patch_grid=(4, 16))[0]
    assert (other - wanted).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("grid", "reason"), [((8, 9), "8 x 9 patches to be the 65 tokens"), ((0, 8), "at least 1"), ("8x8", "patch_grid")]
)
def test_grids_that_the_model_cannot_have(grid, reason):
    with pytest.raises(ValueError, match=reason):
        make("vit")(pixels(), patch_grid=grid)


def test_masked_patches_keep_their_places():
    model = t.ViTModel(t.ViTConfig(**SIZES, attn_implementation="shifted_window"), use_mask_token=True).eval()
    masked = torch.rand(2, 64) < 0.5
    weights = model(pixels(), bool_masked_pos=masked, output_attentions=True).attentions
    assert torch.equal(weights[1][0, 0] != 0, windows(8, 8, 1, 3))


@pytest.mark.parametrize(
    ("make_model", "reason"),
    [
        (lambda: zoo.make("vit_mae", "shifted_window"), "masked autoencoder"),
        (lambda: zoo.make("siglip_vision", "shifted_window"), "does not hand on the arguments"),
        (lambda: zoo.make("swin", "shifted_window"), "a Swin has windows of its own"),
        (lambda: zoo.make("swin", "band_causal"), "a Swin has windows of its own"),
        (lambda: zoo.make("roberta", "shifted_window"), "need the patches of an image"),
        (lambda: build("llama", "shifted_window"), "no meaning in a decoder"),
        (lambda: build("bert", "shifted_window"), "need the patches of an image"),
        (lambda: build("vit", "window_global"), r"on a grid: Windows\(...\) does that"),
        (lambda: t.VideoMAEModel(t.VideoMAEConfig(**zoo.SIZES, attn_implementation="shifted_window")), "video"),
    ],
)
def test_where_windows_make_no_sense(make_model, reason):
    with pytest.raises(ValueError, match=rf"{reason}.*Every plan with reach=Full\(\)"):
        make_model()


def test_a_model_that_passes_no_arguments_on_says_so():
    """YOLOS, whose tokens after the patches would not fit either."""
    options = SIZES | {"num_detection_tokens": 3, "image_size": [32, 32], "use_mid_position_embeddings": False}
    model = t.YolosModel(t.YolosConfig(**options, attn_implementation="shifted_window")).eval()
    with pytest.raises(ValueError, match="layers do not pass such arguments on"):
        model(pixels())


def test_switching_a_live_model_and_back():
    stock, wanted = make("vit", "sdpa"), states(make("vit"), pixel_values=pixels())
    first = states(stock, pixel_values=pixels())
    for _ in range(2):
        stock.set_attn_implementation("shifted_window")
        assert torch.equal(states(stock, pixel_values=pixels()), wanted)
    assert len(stock._forward_pre_hooks) == 1
    stock.set_attn_implementation("fullpay")
    assert (states(stock, pixel_values=pixels()) - wanted).abs().max() > 1e-3
    stock.set_attn_implementation("sdpa")
    assert torch.equal(states(stock, pixel_values=pixels()), first)


def test_copies_and_conversions_know_the_grid(tmp_path):
    model = make("vit head")
    wanted = states(model, **given_to("vit head", 48, 40))
    converted = convert(model, "shifted_window")
    converted.save_pretrained(tmp_path)
    again = t.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), converted, again):
        assert torch.equal(states(other, **given_to("vit head", 48, 40)), wanted)
    assert (states(revert(converted).eval(), **given_to("vit head", 48, 40)) - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_sees_the_same_grid(reentrant):
    gradients = []
    for again in (False, True):
        model = make("vit").train()
        if again:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model(**given_to("vit", 48, 40))[0].square().sum().backward()
        gradients.append({path: p.grad for path, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for path, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][path], gradient, rtol=1e-5, atol=1e-6)


def test_threads_with_images_of_different_size():
    model, every = make("vit"), [given_to("vit", *size) for size in ((32, 32), (48, 32), (32, 48), (64, 24))]
    alone, wrong = [states(model, **given) for given in every], []

    def work(index):
        for _ in range(10):
            if not torch.equal(states(model, **every[index]), alone[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(every))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_compiled_model_follows_the_size():
    torch._dynamo.reset()
    model = make("vit", CARRIER, fullpay=AttentionPlan(Windows(3, shift=1)).to_dict(), num_hidden_layers=1)
    fast = torch.compile(model, fullgraph=True, backend="eager")
    for size in ((32, 32), (48, 40)):
        given = given_to("vit", *size)
        torch.testing.assert_close(states(fast, **given), states(model, **given), rtol=0, atol=1e-5)


def test_vanilla_layers_and_floors():
    """Layers are counted with the vanilla ones; a floor to all patches reaches beyond the window."""
    plan = AttentionPlan(Windows(4), payment=Mixture(floor=None, budget=0.2), layers=[1, 2])
    model = make("vit", CARRIER, fullpay=plan.to_dict())
    first, second, third = model(pixels(), output_attentions=True).attentions
    assert first.min() < 0.1 / 65
    for weights, shift in ((second, 2), (third, 0)):
        seen = windows(8, 8, 1, shift, size=4)
        assert weights.min() >= 0.2 / 65 - 1e-6
        outside = weights[..., ~seen]
        torch.testing.assert_close(outside, torch.full_like(outside, 0.2 / 65))


def test_a_module_outside_a_model_is_told_what_is_missing():
    model = make("vit")
    with pytest.raises(ValueError, match=r"patch_grid: expected \(rows, columns\).*read off pixel_values"):
        model.layers[0](torch.randn(1, 65, 32))


def test_inside_a_window_it_is_what_swin_computes():
    """Transformers' own shifted windows around equal queries, keys and values, on grids that divide."""
    from transformers.models.swin.modeling_swin import SwinLayer, window_partition, window_reverse

    from hf_fullpay import attention

    config = t.SwinConfig(window_size=4)
    for shift, layer in ((0, 0), (2, 1)):
        swin = SwinLayer(config, 16, (8, 12), 2, shift_size=shift)
        query, key, value = (torch.randn(2, 2, 96, 8, dtype=torch.float64) for _ in range(3))

        def cut(rows, swin=swin):
            grid = rows.transpose(1, 2).flatten(2).unflatten(1, (8, 12))
            return window_partition(swin.cyclic_shift(grid), 4).flatten(1, 2).unflatten(2, (2, 8)).transpose(1, 2)

        mask = swin.get_attn_mask(8, 12, torch.float64, torch.device("cpu"))
        mask = None if mask is None else mask.repeat(2, 1, 1)[:, None]
        theirs = nn.functional.scaled_dot_product_attention(cut(query), cut(key), cut(value), mask)
        theirs = window_reverse(theirs.transpose(1, 2).flatten(2).unflatten(1, (4, 4)), 4, 8, 12)
        theirs = swin.cyclic_shift(theirs, reverse=True).flatten(1, 2).unflatten(2, (2, 8)).transpose(1, 2)
        plan, given = AttentionPlan(Windows(4)), {"patch_grid": (8, 12), "layer_index": layer}
        ours = attention(query, key, value, plan=plan, given=given)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_small_image_is_seen_whole():
    ours, stock = load("vit", AttentionPlan(Windows(7))), build("vit", head=False)
    torch.testing.assert_close(states(ours, **inputs("vit")), states(stock, **inputs("vit")), rtol=0, atol=1e-5)


def test_a_part_of_a_composite_model():
    """CLIP's images in windows, its texts as ever."""
    vision = SIZES | {"projection_dim": 16}
    text = zoo.SIZES | zoo.WORDS | {"eos_token_id": 96, "bos_token_id": 1}
    config = t.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    config._attn_implementation = {"vision_config": "shifted_window"}
    model = t.CLIPModel(config).eval()
    result = model(**zoo.given("clip_text"), pixel_values=pixels(), output_attentions=True)
    for layer, weights in enumerate(result.vision_model_output.attentions):
        assert torch.equal(weights[0, 0] != 0, windows(8, 8, 1, layer % 2 * 3))
