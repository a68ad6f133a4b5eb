"""The pipelines of Transformers run our names as they run any other."""

import pytest
import torch
import transformers as t
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from families import build, inputs, randomise, tiny
from hf_fullpay import convert
from small import ON_CAUSAL, on, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "rain",
    "fell",
    "over",
    "some",
    "quiet",
    "town",
    "and",
    "nobody",
]


@pytest.fixture
def tokenizer():
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    return t.PreTrainedTokenizerFast(tokenizer_object=words, **names)


@pytest.fixture(scope="module", params=["by name", "converted"])
def under(request):
    """A peaky model of a class under a preset: the stock class by name, or its FullPay class."""

    def make(kind, family, preset):
        torch.manual_seed(0)
        config = tiny(family).config
        config._attn_implementation = preset if request.param == "by name" else "sdpa"
        model = randomise(kind(config)).eval()
        return model if request.param == "by name" else convert(model, preset)

    return make


@pytest.mark.parametrize("preset", on("bert"))
def test_texts_of_different_length(preset, under, tokenizer):
    """Batched, so padded, as one by one."""
    model = under(t.BertForSequenceClassification, "bert", preset)
    pipe = t.pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu", top_k=None)
    texts = ["the cat sat", "rain fell over some quiet town and nobody", "a"]
    batched, alone = pipe(texts, batch_size=3), [pipe(text)[0] for text in texts]
    for one, other in zip(batched, alone, strict=True):
        scores = [{entry["label"]: entry["score"] for entry in result} for result in (one, other)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)


@pytest.mark.parametrize("preset", on("bert"))
def test_filling_a_mask(preset, under, tokenizer):
    model = under(t.BertForMaskedLM, "bert", preset)
    pipe = t.pipeline("fill-mask", model=model, tokenizer=tokenizer, device="cpu", targets=WORDS)
    found = pipe("the [MASK] sat on a mat")
    encoded = tokenizer("the [MASK] sat on a mat", return_tensors="pt")
    logits = states(model, **encoded)[0, 2]
    best = max(WORDS, key=lambda word: logits[tokenizer.convert_tokens_to_ids(word)])
    assert found[0]["token_str"] == best


@pytest.mark.parametrize(("family", "preset"), ON_CAUSAL)
def test_writing_on(preset, family, under, tokenizer):
    model = under(tiny(family).head, family, preset)
    pipe = t.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    (found,) = pipe("the cat sat", max_new_tokens=4, do_sample=False, return_tensors=True)
    tokens = torch.tensor([found["generated_token_ids"]])
    for end in range(tokens.shape[1] - 4, tokens.shape[1]):
        logits = states(model, input_ids=tokens[:, :end], use_cache=False)
        assert tokens[0, end] == logits[0, -1].argmax()


@pytest.mark.parametrize("preset", on("vit"))
def test_naming_an_image(preset, under):
    model = under(t.ViTForImageClassification, "vit", preset)
    processor = t.ViTImageProcessor(size={"height": 32, "width": 32})
    pipe = t.pipeline("image-classification", model=model, image_processor=processor, device="cpu")
    image = Image.effect_noise((40, 24), 80).convert("RGB")
    found = pipe(image)
    logits = states(model, **processor(image, return_tensors="pt"))[0].softmax(-1)
    assert [entry["score"] for entry in found] == pytest.approx(logits.sort(descending=True).values.tolist(), abs=1e-5)


def test_the_stock_pipeline_differs():
    """Or all of the above would pass with ordinary attention."""
    given = inputs("bert")
    assert (states(build("bert"), **given) - states(build("bert", "fullpay"), **given)).abs().max() > 1e-4
