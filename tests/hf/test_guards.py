"""What a hostile or careless user found: each must be refused with a reason, told, or simply right."""

import copy
import pickle
import threading
from dataclasses import replace

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AlbertConfig, AlbertModel, AutoModelForSequenceClassification

import hf_fullpay
from families import build, inputs
from hf_fullpay import PRESETS, AttentionPlan, Band, FullPayBertForSequenceClassification, FullPayWarning, Mixture
from hf_fullpay.hf.forward import REFUSED, make_forward
from hf_fullpay.hf.strengths import Strengths

pytestmark = pytest.mark.filterwarnings("ignore:.*floor:hf_fullpay.FullPayWarning")

LEARNED = AttentionPlan(payment=Mixture(learnable=True))
GATED = replace(LEARNED, gate=True)


def learn(model):
    """Move every learned number away from its start."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "fullpay" in name:
                parameter += torch.linspace(0.5, 1.5, parameter.numel()).view(parameter.shape)
    return model


def replaced_head(model):
    model.classifier = torch.nn.Sequential(torch.nn.Dropout(0), torch.nn.Linear(32, 2))


def another_layer(model):
    model.bert.encoder.layer.append(copy.deepcopy(model.bert.encoder.layer[0]))


def fewer_layers(model):
    model.bert.encoder.layer = model.bert.encoder.layer[:1]


def adapters_inside(model):
    model.bert = get_peft_model(model.bert, LoraConfig(target_modules=["query"]))


def parametrised(model):
    torch.nn.utils.parametrizations.weight_norm(model.classifier)


@pytest.mark.parametrize("change", [replaced_head, another_layer, fewer_layers, adapters_inside, parametrised])
def test_a_model_that_its_config_does_not_build_is_not_converted(change):
    model = build("bert")
    change(model)
    with pytest.raises(ValueError, match=r"expected .* as the config of BertFor.* builds it .*got .*Convert before"):
        hf_fullpay.convert(model, "fullpay")


def test_what_cannot_be_converted_is_named():
    adapted = get_peft_model(build("bert"), LoraConfig(target_modules=["query"]))
    with pytest.raises(ValueError, match="without adapters"):
        hf_fullpay.convert(adapted, "fullpay")
    with pytest.raises(ValueError, match="got Linear"):
        hf_fullpay.convert(torch.nn.Linear(2, 2), "fullpay")
    offloaded = build("bert")
    accelerate.cpu_offload(offloaded, torch.device("cpu"))
    with pytest.raises(ValueError, match="offloads"):
        hf_fullpay.convert(offloaded, "fullpay")


def test_mode_and_generation_settings_are_kept_apart():
    model = build("bert").train()
    model.bert.encoder.layer[0].eval()
    converted = hf_fullpay.convert(model, "fullpay")
    assert {path for path, module in converted.named_modules() if not module.training} == {
        path for path, module in model.named_modules() if not module.training
    }
    model = build("llama")
    converted = hf_fullpay.convert(model, "fullpay")
    assert converted.generation_config is not model.generation_config


def test_learned_numbers_left_on_disk_are_missed(tmp_path):
    learn(hf_fullpay.convert(build("bert"), LEARNED)).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="expected learned numbers"):
        model.set_attn_implementation("fullpay_custom")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("option", REFUSED)
def test_what_we_do_not_compute_is_refused(option):
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=option):
        make_forward("fullpay")(torch.nn.Module(), query, query, query, None, **{option: torch.ones(1)})


def test_a_gate_needs_a_place_for_its_weights(own_name):
    name = own_name(GATED)
    with pytest.raises(ValueError, match="convert"):
        build("bert", name)


def test_gates_serve_many_threads():
    model = learn(hf_fullpay.convert(build("bert"), GATED))
    every = [inputs("bert", seed=seed) for seed in range(4)]
    with torch.no_grad():
        alone = [model(**x).logits for x in every]
    wrong = []

    def work(index):
        with torch.no_grad():
            for _ in range(20):
                if not torch.equal(model(**every[index]).logits, alone[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (alone[0] - alone[1]).abs().max() > 1e-3


def test_a_policy_that_chooses_no_layer_is_told():
    plan = AttentionPlan(payment=Mixture(floor=None, budget=0.9), layers="all_but_last")
    config = AlbertConfig(
        vocab_size=97, hidden_size=32, embedding_size=32, num_attention_heads=4, intermediate_size=64, fullpay=plan.to_dict()
    )  # fmt: skip
    config._attn_implementation = "fullpay_custom"
    with pytest.warns(FullPayWarning, match="chooses none of its 1 layers"):
        AlbertModel(config)


def test_a_plan_registered_by_a_user_travels_in_the_checkpoint(tmp_path, own_name):
    plan = AttentionPlan(payment=Mixture(budget=0.2))
    own_name(plan)
    model = hf_fullpay.convert(build("bert"), plan)
    assert model.config._attn_implementation == "fullpay_custom"
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    x = inputs("bert")
    assert torch.equal(again(**x).logits, model(**x).logits)


class Own(FullPayBertForSequenceClassification):
    """A user's subclass."""


def test_a_subclass_is_saved_as_what_others_can_load(tmp_path):
    model = Own(hf_fullpay.convert(build("bert"), "fullpay").config).eval()
    model.save_pretrained(tmp_path)
    assert "FullPayBertForSequenceClassification" in (tmp_path / "modeling_fullpay.py").read_text()
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    x = inputs("bert")
    assert torch.equal(again(**x).logits, model(**x).logits)


def test_models_with_a_layer_table_copy_and_pickle():
    plan = replace(LEARNED, layers={"0": "vanilla", "1-": "all"})
    model = learn(hf_fullpay.convert(build("bert"), plan))
    x = inputs("bert")
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(**x).logits, model(**x).logits)
    assert sum(isinstance(module, Strengths) for module in model.modules()) == 1


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_one_mask_for_the_whole_batch(family, own_name):
    model = build(family, own_name(AttentionPlan(reach=Band(4), payment=PRESETS["fullpay"].payment)))
    x = inputs(family, length=40)
    mask = torch.tensor([[0] * 3 + [1] * 37])
    torch.testing.assert_close(model(**x, attention_mask=mask)[0], model(**x, attention_mask=mask.expand(2, -1))[0])
