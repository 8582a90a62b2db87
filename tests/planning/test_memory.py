"""Bytes of each part against what torch and bitsandbytes hold; cards; shapes of models."""

import json
from dataclasses import replace

import bitsandbytes as bnb
import pytest
import torch
from jobs import USUAL
from transformers import (
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GPT2Config,
    Qwen3_5Config,
    Qwen3Config,
)
from trl.trainer.utils import add_fused_lm_head

from rloo_kit.config.run_file import PROJECTIONS
from rloo_kit.errors import ModelError
from rloo_kit.machine.hardware import GIB
from rloo_kit.models.engine_memory import MIB
from rloo_kit.models.loading import attach_lora, load_model
from rloo_kit.models.shape import (
    PUBLISHED,
    TINY_THINKER,
    auto_class,
    nf4_bytes,
    read_shape,
    shape_of_config,
    weight_bytes,
)
from rloo_kit.planning.memory import (
    LEARN,
    LOAD,
    SAMPLE,
    SCORE,
    Job,
    adapter_sizes,
    layer_bytes,
    optimizer_bytes,
    plan_memory,
)


@pytest.fixture(scope="module")
def tiny():
    return read_shape("tiny-thinker")


@pytest.fixture(scope="module")
def four_billion():
    return read_shape("Qwen/Qwen3-4B-Thinking-2507")


def job_of(shape, **settings):
    card = {"on_gpu": True, "room": 12 * GIB, "card": 12 * GIB, "targets": PROJECTIONS}
    return Job(shape=shape, adapted_layers=shape.num_layers, **USUAL | card | settings)


# --- the shape -----------------------------------------------------------------------------------


SMALL_GEMMA = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}


def test_layers_of_gemma4_may_have_heads_of_other_sizes():
    config = Gemma4TextConfig(**SMALL_GEMMA, intermediate_size=128, head_dim=16, global_head_dim=32)
    assert shape_of_config(config, "gemma-4").kv_size == 2 * 32


def test_layers_of_gemma3n_may_have_mlps_of_other_sizes():
    others = {"head_dim": 32, "laurel_rank": 4, "num_kv_shared_layers": 0}
    config = Gemma3nTextConfig(**SMALL_GEMMA, **others, intermediate_size=[64, 128])
    shape = shape_of_config(config, "gemma-3n")
    assert shape.intermediate_size == 128
    plan_memory(job_of(shape))


def test_text_and_images_have_the_same_layers():
    config = Qwen3_5Config()
    assert auto_class(config) is auto_class(config, images=True)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-4B-Thinking-2507", 4_022_468_096),
        ("unsloth/Qwen3-14B-unsloth-bnb-4bit", 14_768_307_200),
    ],
)
def test_published_configs_count_the_parameters_of_their_models(name, parameters):
    shape = read_shape(name)
    assert shape.num_parameters == parameters
    assert shape.source == "rloo-kit's table"
    assert shape.packed == ("bnb-4bit" in name)


@pytest.mark.parametrize("tail", ["", "-bnb-4bit", "-unsloth-bnb-4bit"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_of_the_table_is_the_one_that_transformers_builds(name, tail):
    shape = read_shape(name + tail)
    hidden, inner, layers, heads, tied = PUBLISHED[name]
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, vocab_size=151_936,
        tie_word_embeddings=tied,
    )  # fmt: skip
    if tail:
        config.quantization_config = {"load_in_4bit": True}
    assert shape == shape_of_config(config, name + tail, "rloo-kit's table")


def test_layers_kept_in_16_bit_are_not_packed(tmp_path, tiny):
    config = json.loads((TINY_THINKER / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "llm_int8_skip_modules": ["lm_head", "layers.0.mlp"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(str(tmp_path))
    assert shape.packed
    kept = [one.size * one.count for one in shape.linears if not one.quantised]
    assert sum(kept) == 3 * 192 * 320
    assert shape.num_parameters == tiny.num_parameters


def test_transposed_layers_of_gpt2_are_linear_layers():
    config = GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=32)
    shape = shape_of_config(config, "gpt2")
    sizes = {(one.name, one.rows, one.columns, one.count) for one in shape.linears}
    assert sizes == {
        ("c_attn", 192, 64, 2), ("c_proj", 64, 64, 2), ("c_fc", 256, 64, 2), ("c_proj", 64, 256, 2)
    }  # fmt: skip
    job = job_of(shape, targets=("c_attn",), in_4bit=True)
    assert adapter_sizes(job) == 2 * [192 * job.rank, 64 * job.rank]
    assert plan_memory(job).peak_bytes > weight_bytes(shape, in_4bit=True)
    plan_memory(replace(job, shape=replace(shape, linears=())))  # layers of its own kind


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        read_shape(str(tmp_path))
    with pytest.raises(ModelError, match="away"):
        read_shape(str(tmp_path / "away"))
    with pytest.raises(ModelError, match="Qwen3-30B-A3B"):  # not taken for a published one
        read_shape("Qwen/Qwen3-30B-A3B")


# --- weights, adapter, optimizer: what the libraries hold ----------------------------------------


@pytest.fixture(scope="module")
def loaded():
    given = {"max_seq_length": 128, "load_in_4bit": True, "dtype": torch.bfloat16}  # as on a GPU
    model, _ = load_model("tiny-thinker", **given)
    return attach_lora(model, r=16, use_gradient_checkpointing=False)


def test_4_bit_weights_match_bitsandbytes(loaded, tiny):
    total = other = 0
    for name, parameter in loaded.named_parameters():
        if "lora_" in name:
            continue
        size = parameter.numel() * parameter.element_size()
        state = getattr(parameter, "quant_state", None)
        if state is None:
            other += size
            continue
        statistics = (state.absmax, state.code, state.offset, state.state2.absmax)
        total += size + sum(t.numel() * t.element_size() for t in statistics)
        total += state.state2.code.numel() * state.state2.code.element_size()
    packed = sum(nf4_bytes(one.rows, one.columns) * one.count for one in tiny.linears)
    assert packed == total
    assert weight_bytes(tiny, in_4bit=True) == packed + other
    assert weight_bytes(tiny, in_4bit=False) == 2 * tiny.num_parameters


def test_adapter_has_the_tensors_of_peft(loaded, tiny):
    made = [p.numel() for n, p in loaded.named_parameters() if "lora_" in n]
    assert sorted(adapter_sizes(job_of(tiny))) == sorted(made)


@pytest.mark.parametrize("size", [4095, 4096, 4097, 160 * 1000])
@pytest.mark.parametrize("name", ["adamw_torch", "adamw_8bit"])
def test_optimizer_states_match_what_is_allocated(name, size):
    weight = torch.nn.Parameter(torch.zeros(size))
    if name == "adamw_8bit":
        optimizer = bnb.optim.AdamW8bit([weight])
        optimizer.init_state(optimizer.param_groups[0], weight, 0, 0)
    else:
        optimizer = torch.optim.AdamW([weight])
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    kept = optimizer.state[weight]
    tables = ("qmap1", "qmap2", "step")  # one for all parameters, or a number
    held = sum(
        value.numel() * value.element_size()
        for key, value in kept.items()
        if isinstance(value, torch.Tensor) and key not in tables
    )
    assert optimizer_bytes(name, [size]) == held


def test_paged_optimizer_keeps_large_states_off_the_card_and_a_cpu_has_plain_adamw():
    sizes = [1000, 200_000]
    assert optimizer_bytes("paged_adamw_8bit", sizes) == 2 * 4 * 1000
    for name in ("paged_adamw_8bit", "lion_8bit"):
        assert optimizer_bytes(name, sizes, on_gpu=False) == 2 * 4 * sum(sizes)


def test_layer_bytes_match_torchs_saved_tensors(loaded, tiny):
    base = loaded.get_base_model()
    if "fused" not in getattr(base.forward, "__qualname__", ""):
        add_fused_lm_head(base, temperature=1.0, outputs=("log_probs", "entropy"))
    for parameter in loaded.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    loaded.train()
    ids = torch.randint(0, 250, (4, 64))
    known = {p.untyped_storage().data_ptr() for p in loaded.parameters()}
    known |= {b.untyped_storage().data_ptr() for b in loaded.buffers()}
    held = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        output = loaded(input_ids=ids, labels=ids, fused_lm_head=True)
    adapters = 2 * sum(adapter_sizes(job_of(tiny)))  # in 16 bit
    per_layer = (sum(held.values()) - adapters) / ids.numel() / tiny.num_layers
    assert output.log_probs.shape == (4, 63)
    # what is over the layers: hidden states at the head, positions
    assert per_layer == pytest.approx(layer_bytes(job_of(tiny)), rel=0.03)


# --- phases --------------------------------------------------------------------------------------


def test_peak_is_the_largest_phase_not_the_sum(four_billion):
    plan = plan_memory(job_of(four_billion))
    assert plan.peak_bytes == max(plan.phases.values()) == plan.phases[plan.phase]
    assert set(plan.phases) == {LOAD, SAMPLE, SCORE, LEARN}
    for phase, size in plan.phases.items():
        assert sum(part for _, part in plan.at(phase)) == size
    assert plan.peak_bytes < sum(max(held.values()) for held in plan.parts.values())


@pytest.mark.parametrize(
    ("change", "phase"),
    [
        ({"in_4bit": False}, SAMPLE),
        ({"rows": 32, "at_once": 32}, SAMPLE),
        ({"completion": 1024, "max_length": 2048}, SAMPLE),
        ({"optimizer": "adamw_torch"}, LEARN),
        ({"rank": 64}, LEARN),
        ({"budget": 8192, "step_rows": 16}, LEARN),
        ({"checkpointing": "plain"}, LEARN),
        ({"checkpointing": "none"}, LEARN),
    ],
)
def test_larger_settings_are_planned_larger(four_billion, change, phase):
    usual = job_of(four_billion, optimizer="adamw_8bit", budget=4096)
    before = plan_memory(usual)
    after = plan_memory(replace(usual, **change))
    assert after.phases[phase] > before.phases[phase]


def test_sleeping_engine_leaves_its_memory_to_learning(four_billion):
    awake, asleep = (
        plan_memory(job_of(four_billion, engine="vllm", sleeps=sleeps, budget=2048))
        for sleeps in (False, True)
    )
    assert awake.phases[LEARN] - asleep.phases[LEARN] > 2 * GIB
    shared = plan_memory(job_of(four_billion, engine="shared", share=0.6, budget=2048))
    of_the_card = sum(s for n, s in shared.at(SAMPLE) if n.startswith(("vLLM", "weights")))
    assert of_the_card == pytest.approx(0.6 * 12 * GIB, rel=0.01)


def test_longest_row_is_one_pass_whatever_the_budget(four_billion):
    small, one_row = (plan_memory(job_of(four_billion, budget=n)) for n in (1, 1024))
    assert small.phases[LEARN] == one_row.phases[LEARN]


def test_cpu_plan_counts_the_process_and_its_libraries(tiny):
    usual = job_of(tiny, on_gpu=False, checkpointing="none", room=8 * GIB)
    small = plan_memory(replace(usual, prompt=20, completion=48)).peak_bytes
    assert 1000 * MIB < small < 1200 * MIB
    assert (
        plan_memory(replace(usual, rows=256, at_once=256, step_rows=256)).peak_bytes
        > small + 300 * MIB
    )
