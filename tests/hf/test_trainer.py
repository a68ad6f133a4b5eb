"""Trainer and PEFT: learned numbers train, survive saving, resuming, merging, and are never decayed."""

import pytest
import torch
import transformers as t
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from converted import LEARNABLE, equal, learn, learned
from families import FAMILIES, VOCABULARY, build, inputs
from hf_fullpay import AttentionPlan, Mixture, convert
from hf_fullpay.hf.strengths import no_decay_parameters
from small import on, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "bert": ["query", "value"], "vit": ["q_proj", "v_proj"]}


class Samples(torch.utils.data.Dataset):
    """Twelve samples of different length; the label is a matter of the first token."""

    def __init__(self, family):
        generator = torch.Generator().manual_seed(4)
        self.family = family
        self.rows = [torch.randint(3, VOCABULARY, (5 + i % 4,), generator=generator) for i in range(12)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def collate(self, rows):
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        given = {"input_ids": ids, "attention_mask": (ids > 0).long()}
        causal = self.family in ("llama", "gpt2")
        return {**given, "labels": ids.masked_fill(ids == 0, -100) if causal else ids[:, 0] % 2}


def trainer(model, folder, family="llama", **options):
    samples = Samples(family)
    options = {
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
    } | options
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True, seed=3, **options
    )
    return Trainer(model, arguments, train_dataset=samples, data_collator=samples.collate)


def losses(trained):
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_training_resumes_where_it_stopped(family, tmp_path):
    """Bit for bit: losses and every number."""
    first = trainer(convert(build(family), LEARNABLE["all"]), tmp_path, family)
    first.train()
    assert all(p.any() for p in learned(first.model).values())
    again = trainer(convert(build(family, seed=5), LEARNABLE["all"]), tmp_path, family)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(again) == losses(first)
    assert equal(dict(again.model.named_parameters()), dict(first.model.named_parameters()))
    loaded = type(first.model).from_pretrained(tmp_path / "checkpoint-6")
    assert equal(learned(loaded), learned(first.model))


def test_training_by_name_alone(tmp_path):
    """A stock class under a preset needs nothing else."""
    run = trainer(build("bert", "bounded_fullpay"), tmp_path, "bert", max_steps=12, save_strategy="no")
    run.train()
    assert losses(run)[-1] < losses(run)[0]


@pytest.mark.parametrize("what", LEARNABLE)
@pytest.mark.parametrize("family", FAMILIES)
def test_our_numbers_are_never_decayed(family, what, tmp_path):
    """O44, F5."""
    model = convert(build(family), LEARNABLE[what])
    decayed = trainer(model, tmp_path).get_decay_parameter_names(model)
    assert decayed
    assert not set(decayed) & set(learned(model))
    assert sorted(no_decay_parameters(model)) == sorted(learned(model))


def test_steps_without_a_gradient_change_nothing(tmp_path):
    """O44: 200 steps of decay; with a gradient of zero AdamW would still decay what is in that group."""
    model = learn(convert(build("bert"), LEARNABLE["all"]))
    before = {path: p.detach().clone() for path, p in learned(model).items()}
    run = trainer(model, tmp_path)
    run.create_optimizer()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(200):
        run.optimizer.step()
    assert equal(before, learned(model))
    assert (
        model.bert.encoder.layer[0].attention.self.query.weight
        - build("bert").bert.encoder.layer[0].attention.self.query.weight
    ).any()


def adapted(family, plan, **options):
    """A converted model with LoRA, every trainable number moved."""
    model = convert(build(family), plan)
    options = {"modules_to_save": ["fullpay"], "fan_in_fan_out": family == "gpt2"} | options
    config = LoraConfig(r=2, target_modules=TARGETS[family], **options)
    wrapped = get_peft_model(model, config).eval()
    with torch.no_grad():
        for path, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
                assert "lora" in path or "fullpay" in path
    return wrapped


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("what", ["budget", "gate", "all"])
def test_adapters_train_and_keep_our_numbers(family, what, tmp_path):
    """F13: the wrapped copy is what runs, is saved, is merged; without the adapter the base runs as before."""
    given = inputs(family)
    base = states(convert(build(family), LEARNABLE[what]), **given)
    model = adapted(family, LEARNABLE[what])
    output = states(model, **given)
    assert (output - base).abs().max() > 1e-3
    model(**given)[0].square().sum().backward()
    trained = {path: p for path, p in model.named_parameters() if p.requires_grad}
    assert any("fullpay" in path for path in trained)
    assert all(p.grad is not None and p.grad.any() for path, p in trained.items() if "fullpay" in path)
    with model.disable_adapter():
        torch.testing.assert_close(states(model, **given), base, rtol=0, atol=1e-6)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(convert(build(family), LEARNABLE[what]), tmp_path).eval()
    torch.testing.assert_close(states(again, **given), output, rtol=0, atol=1e-6)
    merged = again.merge_and_unload()
    torch.testing.assert_close(states(merged, **given), output, rtol=0, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    loaded = type(merged).from_pretrained(tmp_path / "merged")
    assert type(loaded).__name__.startswith("FullPay")
    torch.testing.assert_close(states(loaded, **given), states(merged, **given), rtol=0, atol=2e-6)


def test_an_adapter_finds_its_base(tmp_path):
    """From the adapter's folder alone."""
    base = convert(build("llama"), LEARNABLE["budget"])
    base.save_pretrained(tmp_path / "base")
    loaded = type(base).from_pretrained(tmp_path / "base")
    options = {"target_modules": TARGETS["llama"], "modules_to_save": ["fullpay"], "task_type": "CAUSAL_LM"}
    wrapped = get_peft_model(loaded, LoraConfig(r=2, **options)).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    wrapped.save_pretrained(tmp_path / "adapter")
    output, given = states(wrapped, **inputs("llama")), inputs("llama")
    for again in (
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"),
        t.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"),
    ):
        torch.testing.assert_close(states(again.eval(), **given), output, rtol=0, atol=1e-6)


def test_adapters_on_stock_classes_by_name(tmp_path):
    """No learned numbers, nothing to save; the name is the caller's."""
    for name in on("bert"):
        wrapped = get_peft_model(build("bert", name), LoraConfig(r=2, target_modules=TARGETS["bert"])).eval()
        torch.testing.assert_close(states(wrapped, **inputs("bert")), states(build("bert", name), **inputs("bert")))


def test_virtual_keys_are_visible_keys():
    """O29: prefix tuning of a decoder; they are counted in the floor."""
    plan = AttentionPlan(payment=Mixture(floor=None, budget=0.5))
    model = build("llama", "fullpay_custom", fullpay=plan.to_dict())
    wrapped = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    given = {"input_ids": inputs("llama")["input_ids"], "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    result = wrapped(**given, output_attentions=True)
    assert result.logits.shape == (2, 9, VOCABULARY)
    for layer in result.attentions:
        assert layer.shape == (2, 4, 9, 12)
        for row in range(9):
            assert layer[:, :, row, : row + 4].min() >= 0.5 / (row + 4) - 1e-6
            assert not layer[:, :, row, row + 4 :].any()


def test_converting_an_adapted_model_is_refused():
    wrapped = get_peft_model(build("bert"), LoraConfig(r=2, target_modules=TARGETS["bert"]))
    with pytest.raises(ValueError, match="without adapters"):
        convert(wrapped.get_base_model(), "fullpay")
