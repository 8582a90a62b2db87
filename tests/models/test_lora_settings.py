"""Every field of LoraConfig acts, on dense models and on mixtures of experts, or is refused."""

import dataclasses
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from short_training import short_trainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

import rloo_kit as rk
from rloo_kit.config.lora import REFUSED, lora_fields
from rloo_kit.config.run_file import make_run_config
from rloo_kit.errors import ConfigError
from rloo_kit.export.exporter import export_model
from rloo_kit.machine.hardware import find_card
from rloo_kit.models.adapters import lora_settings
from rloo_kit.models.shape import TINY_THINKER, read_shape, shape_of_config, weight_bytes
from rloo_kit.planning.facts import make_job, read_facts
from rloo_kit.planning.memory import adapter_sizes

ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EVERY_LAYER = {"0", "1", "2", "3"}
KINDS = {
    "rslora, some layers, gaussian": (
        {
            "use_rslora": True, "layers_to_transform": [0, 2], "init_lora_weights": "gaussian",
        },
        {"0", "2"},
    ),
    "dora on a pattern": (
        {"use_dora": True, "target_modules": r".*layers\.[01]\..*_proj"}, {"0", "1"},
    ),
    "ranks and alphas of their own": (
        {
            "target_modules": "all-linear", "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"v_proj": 2},
        },
        EVERY_LAYER,
    ),
    "a head that trains as a whole": ({"modules_to_save": ["lm_head"]}, EVERY_LAYER),
    "a random start but for one layer": (
        {"init_lora_weights": False, "exclude_modules": r".*layers\.0\..*"}, {"1", "2", "3"},
    ),
    "tokens of a head that is tied": ({"trainable_token_indices": [1, 44]}, EVERY_LAYER),
    "orthogonal": ({"init_lora_weights": "orthogonal", "layers_to_transform": 1}, {"1"}),
}  # fmt: skip


def trained(folder, source, settings):
    """Attach an adapter, train two steps, save it; return the model and the names that moved."""
    model, tokenizer = rk.load_model(
        source, max_seq_length=128, load_in_4bit=False, precision="fp32"
    )
    model = rk.attach_lora(model, r=4, **settings)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    in_float32 = {"bf16": False, "generation": "transformers"}
    short_trainer(model, tokenizer, folder / "run", **in_float32).train()
    rk.save_adapter(model, tokenizer, folder / "adapter")
    return model, [name for name, p in model.named_parameters() if not p.equal(before.get(name, p))]


def logits(model):
    ids = torch.tensor([[257, 5, 9, 30, 44, 7, 71, 12]])
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits.float()


def same_in_plain_peft(model, source, folder):
    """Check that plain PEFT reads the adapter, computes and merges the same; return its model."""
    mine = logits(model)
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, folder / "adapter")
    names = dict(plain.named_parameters())
    for one in (plain, plain.merge_and_unload()):
        torch.testing.assert_close(logits(one), mine, atol=2e-4, rtol=1e-3)
    return names


@pytest.mark.long
@pytest.mark.parametrize(("given", "layers"), KINDS.values(), ids=KINDS)
def test_a_field_of_lora_config_acts_and_plain_peft_reads_it(given, layers, tmp_path):
    settings = {"target_modules": ATTENTION} | given
    model, moved = trained(tmp_path, "tiny-thinker", settings)
    assert moved
    config = model.peft_config["default"]
    for name in given.keys() - {"target_modules", "layers_to_transform"}:  # by PEFT, by Unsloth
        assert getattr(config, name) == given[name], name
    if settings["target_modules"] != "all-linear":  # written out by PEFT
        lora_settings(tmp_path / "adapter", {"r": 4, **settings})  # it is continued with these
    names = same_in_plain_peft(model, TINY_THINKER, tmp_path)
    adapted = [name for name in names if ".layers." in name and "lora_" in name]
    assert {name.split(".layers.")[1][0] for name in adapted} == layers


def test_every_field_of_the_installed_lora_config_is_known():
    own = {one.name for one in dataclasses.fields(LoraConfig)}
    of_peft = {one.name for one in dataclasses.fields(LoraConfig.__mro__[1])}
    assert lora_fields() == own - of_peft | {"r"} & own
    assert set(REFUSED) <= lora_fields()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"random_state": 3}, "unknown LoRA setting 'random_state'"),
        ({"init_lora_weights": "pissa"}, "changes the base"),
        ({"bias": "lora_only"}, "bias is for training biases of the base model, but"),
        ({"layers_pattern": "layers"}, "PEFT refuses the LoRA settings"),
        ({"rank_pattern": {"q_proj": "x"}}, r"PEFT refuses the LoRA settings \(TypeError: "),
        ({"layers_to_transform": 99}, r"PEFT refuses .*: Target modules .* correct the setting"),
        ({"target_modules": r".*\.nothing"}, "matches no layer of this model"),
    ],
)
def test_what_cannot_be_followed_is_refused(settings, message):
    model, _ = rk.load_model("tiny-thinker", max_seq_length=64, load_in_4bit=False)
    with pytest.raises(ConfigError, match=message):
        rk.attach_lora(model, **settings)


# --- mixtures of experts -------------------------------------------------------------------------


def mixture(folder, family):
    """Write a mixture of experts with random weights and the embedded model's tokenizer."""
    torch.manual_seed(3)
    experts = {
        "qwen3-moe": {"num_experts": 4, "moe_intermediate_size": 16},
        "gpt-oss": {"num_local_experts": 4, "intermediate_size": 16},
    }
    config = AutoConfig.for_model(
        family.replace("-", "_"), vocab_size=261, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts_per_tok=2,
        max_position_embeddings=256, eos_token_id=258, pad_token_id=256, **experts[family],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_THINKER).save_pretrained(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_attention_and_experts_of_a_mixture_train(family, tmp_path):
    source = mixture(tmp_path / "base", family)
    settings = {"target_modules": ATTENTION, "target_parameters": EXPERTS}
    model, moved = trained(tmp_path, source, settings)
    assert set(model.peft_config["default"].target_parameters) == set(EXPERTS)
    assert any("experts" in name for name in moved)
    assert any("q_proj" in name for name in moved)
    same_in_plain_peft(model, source, tmp_path)
    merged = export_model(tmp_path / "adapter", "merged", num_prompts=2)  # which compares answers
    experts = [load_file(one / "model.safetensors") for one in (source, merged)]
    name = next(n for n in experts[0] if "down_proj" in n and "bias" not in n)
    assert not experts[0][name].equal(experts[1][name])


def test_unsloth_packs_the_experts_of_qwen3_30b_a3b():
    config = Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, tie_word_embeddings=False,
    )  # fmt: skip
    shape = shape_of_config(config, "Qwen/Qwen3-30B-A3B")
    assert round(shape.num_parameters / 1e9, 1) == 30.5
    assert round(weight_bytes(shape, in_4bit=True) / 1e9) == 60  # bitsandbytes packs no expert
    assert round(weight_bytes(shape.with_packed_experts, in_4bit=True) / 1e9) == 17


def test_the_plan_counts_experts_and_what_trains_of_them(tmp_path):
    source = mixture(tmp_path / "base", "qwen3-moe")
    shape = read_shape(str(source))
    model = AutoModelForCausalLM.from_pretrained(source)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    lora = {"r": 4, "target_modules": ATTENTION, "target_parameters": EXPERTS}
    peft_model = rk.attach_lora(rk.load_model(source, load_in_4bit=False)[0], **lora)
    for more, extra in (({}, 0), ({"modules_to_save": ["lm_head"]}, 261 * 32)):
        run = make_run_config({"model": {"name": str(source)}, "lora": {**lora, **more}})
        card = rk.machine.hardware.detect_hardware()
        job = make_job(run, read_facts(run, tmp_path, card, 1 << 34))
        counted = sum(p.numel() for p in peft_model.parameters() if p.requires_grad)
        assert sum(adapter_sizes(job)) == counted + extra


def test_a_misspelt_layer_is_refused_and_a_second_adapter():
    model, _ = rk.load_model("tiny-thinker", max_seq_length=128)
    with pytest.raises(ConfigError, match=r"none of target_modules \['up_porj'\] is a layer"):
        rk.attach_lora(model, r=4, target_modules=["q_proj", "up_porj"])
    with_adapter = rk.attach_lora(model, r=4)
    for again in (with_adapter, model):  # PEFT puts the adapter into the model itself
        with pytest.raises(ConfigError, match="the model has an adapter already"):
            rk.attach_lora(again, r=4)


def test_experts_that_get_no_adapter_are_not_planned(tmp_path):
    source = mixture(tmp_path / "base", "qwen3-moe")
    run = make_run_config({"model": {"name": str(source)}})
    facts = replace(read_facts(run, tmp_path, find_card("24GB"), 24 << 30), unsloth=True)
    model = rk.attach_lora(rk.load_model(source, load_in_4bit=False)[0])
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert sum(adapter_sizes(make_job(run, facts))) == trained
