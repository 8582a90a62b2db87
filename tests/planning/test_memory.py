"""Bytes of each part against what torch and bitsandbytes hold; cards; shapes of models."""

from dataclasses import replace

import bitsandbytes as bnb
import pytest
import torch

from rloo_kit.config.run_file import PROJECTIONS
from rloo_kit.errors import ConfigError, ModelError
from rloo_kit.machine.cards import find_card
from rloo_kit.machine.hardware import GIB
from rloo_kit.models.engine_memory import MIB
from rloo_kit.models.loading import attach_lora, load_model
from rloo_kit.models.shape import TINY_THINKER, nf4_bytes, read_shape, weight_bytes
from rloo_kit.planning.memory import (
    LEARN,
    LOAD,
    SAMPLE,
    SCORE,
    Job,
    Judge,
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
    usual = {"on_gpu": True, "room": 12 * GIB, "targets": PROJECTIONS, "checkpointing": "unsloth"}
    return Job(shape=shape, **{**usual, **settings})


# --- cards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gib"),
    [("12GB", 12), ("11.5 GiB", 11.5), ("rtx4070", 12), ("NVIDIA GeForce RTX 4090", 24),
     ("4060 Ti 16GB", 16), ("rtx-3060", 12), ("T4", 16)],
)  # fmt: skip
def test_card_is_found_in_any_spelling(text, gib):
    assert find_card(text).memory == gib * GIB


def test_unknown_card_is_refused_with_the_nearest_names():
    with pytest.raises(ConfigError, match=r"'rtx4075'.* 12GB, .*RTX 4070"):
        find_card("rtx4075")
    with pytest.raises(ConfigError, match="1024GB"):
        find_card("9999GB")


# --- the shape -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "embeddings"),
    [
        ("Qwen/Qwen3-0.6B", 596_049_920, 1),
        ("Qwen/Qwen3-1.7B", 1_720_574_976, 1),
        ("Qwen/Qwen3-4B-Thinking-2507", 4_022_468_096, 1),
        ("Qwen/Qwen3-8B", 8_190_735_360, 2),
        ("unsloth/Qwen3-14B-unsloth-bnb-4bit", 14_768_307_200, 2),
    ],
)
def test_published_configs_count_the_parameters_of_their_models(name, parameters, embeddings):
    shape = read_shape(name)
    assert shape.num_parameters == parameters
    assert shape.source == "rloo-kit's table"
    norms = shape.others - embeddings * shape.vocab_size * shape.hidden_size
    assert 0 < norms < 1_000_000
    assert shape.packed == ("bnb-4bit" in name)


def test_folder_needs_no_weights(tmp_path, tiny):
    (tmp_path / "config.json").write_text((TINY_THINKER / "config.json").read_text())
    shape = read_shape(str(tmp_path))
    assert shape.linears == tiny.linears
    assert shape.others == tiny.others


def test_layers_kept_in_16_bit_are_not_packed(tmp_path, tiny):
    import json

    config = json.loads((TINY_THINKER / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "llm_int8_skip_modules": ["lm_head", "layers.0.mlp"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(str(tmp_path))
    assert shape.packed
    assert tiny.num_quantised - shape.num_quantised == 3 * 192 * 320
    assert shape.num_parameters == tiny.num_parameters


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        read_shape(str(tmp_path))
    with pytest.raises(ModelError, match="away"):
        read_shape(str(tmp_path / "away"))
    with pytest.raises(ModelError, match="Qwen3-30B-A3B"):  # not taken for a published one
        read_shape("Qwen/Qwen3-30B-A3B")


def test_adapter_has_the_shape_of_its_base(tmp_path, tiny):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "tiny-thinker"}')
    assert read_shape(str(tmp_path)).num_parameters == tiny.num_parameters


def test_classifier_has_a_score_and_no_lm_head(tiny):
    found = read_shape("tiny-thinker", classifier=True)
    assert found.num_parameters == tiny.num_parameters + 192
    assert found.num_quantised == tiny.num_quantised


# --- weights, adapter, optimizer: what the libraries hold ----------------------------------------


@pytest.fixture(scope="module")
def loaded():
    model, _ = load_model("tiny-thinker", max_seq_length=128, load_in_4bit=True)
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
    assert optimizer_bytes(name, [size]) == (held, 0)


def test_paged_optimizer_keeps_large_states_in_main_memory():
    here, elsewhere = optimizer_bytes("paged_adamw_8bit", [1000, 200_000])
    assert here == 2 * 4 * 1000
    assert elsewhere == 2 * (200_000 + 4 * 782)
    assert optimizer_bytes("paged_adamw_8bit", [200_000], on_gpu=False) == (8 * 200_000, 0)


def test_layer_bytes_match_torchs_saved_tensors(loaded, tiny):
    from trl.trainer.utils import add_fused_lm_head

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
    assert set(plan.phases) == {LOAD, SAMPLE, SCORE, LEARN}
    assert plan.peak_bytes == max(plan.phases.values()) == plan.phases[plan.phase]
    for phase, size in plan.phases.items():
        assert sum(part for _, part in plan.at(phase)) == size
    assert plan.peak_bytes < sum(part.most for part in plan.parts)


@pytest.mark.parametrize(
    ("change", "phase"),
    [
        ({"in_4bit": False}, SAMPLE),
        ({"rows": 32}, SAMPLE),
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
    before, after = plan_memory(usual), plan_memory(replace(usual, **change))
    assert after.phases[phase] > before.phases[phase]


def test_unsloths_checkpointing_moves_layer_inputs_to_main_memory(four_billion):
    plain = plan_memory(job_of(four_billion, checkpointing="plain", budget=4096))
    unsloth = plan_memory(job_of(four_billion, budget=4096))
    moved = unsloth.main_memory
    assert moved == 4096 * 36 * 2560 * 2
    saved = plain.phases[LEARN] - unsloth.phases[LEARN]
    assert 0.8 * moved < saved < 1.1 * moved


def test_sleeping_engine_leaves_its_memory_to_learning(four_billion):
    awake = plan_memory(job_of(four_billion, engine="vllm", sleeps=False, budget=2048))
    asleep = plan_memory(job_of(four_billion, engine="vllm", sleeps=True, budget=2048))
    assert awake.phases[LEARN] - asleep.phases[LEARN] > 2 * GIB
    shared = plan_memory(job_of(four_billion, engine="shared", share=0.6, budget=2048))
    assert "vLLM weights" not in {part.name for part in shared.parts}
    of_the_card = sum(s for n, s in shared.at(SAMPLE) if n.startswith(("vLLM", "weights")))
    assert of_the_card == pytest.approx(0.6 * 12 * GIB, rel=0.01)


def test_reward_model_waits_in_main_memory(four_billion, tiny):
    judge = Judge(four_billion, in_4bit=True, on_gpu=True, offloads=True, tokens=8192)
    plan = plan_memory(job_of(four_billion, judges=(judge,)))
    assert plan.phases["reward"] > plan_memory(job_of(four_billion)).phases[LOAD]
    resident = replace(judge, offloads=False)
    more = plan_memory(job_of(four_billion, judges=(resident,), budget=2048))
    less = plan_memory(job_of(four_billion, judges=(judge,), budget=2048))
    weights = weight_bytes(four_billion, in_4bit=True)
    assert more.phases[LEARN] - less.phases[LEARN] == pytest.approx(weights, rel=0.07)
    assert less.main_memory - more.main_memory == weights


def test_longest_row_is_one_pass_whatever_the_budget(four_billion):
    small = plan_memory(job_of(four_billion, budget=1, completion=512, prompt=512))
    one_row = plan_memory(job_of(four_billion, budget=1024, completion=512, prompt=512))
    assert small.phases[LEARN] == one_row.phases[LEARN]


def test_cpu_plan_counts_the_process_and_its_libraries(tiny):
    small = {"rows": 8, "prompt": 20, "completion": 48}
    plan = plan_memory(job_of(tiny, on_gpu=False, checkpointing="none", room=8 * GIB, **small))
    assert 1000 * MIB < plan.peak_bytes < 1200 * MIB
    assert plan.main_memory == 0
    larger = job_of(tiny, on_gpu=False, checkpointing="none", room=8 * GIB, rows=256, step_rows=256)
    assert plan_memory(larger).peak_bytes > plan.peak_bytes + 300 * MIB


# --- the hub -------------------------------------------------------------------------------------

ASKING = """
import sys
from rloo_kit.models.shape import read_shape
shape = read_shape("somebody/something")
print(shape.source, shape.num_parameters)
"""


@pytest.mark.long
def test_hub_is_asked_for_the_config_only(tmp_path, tiny):
    import http.server
    import os
    import subprocess
    import sys
    import threading

    asked = []

    class Hub(http.server.SimpleHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, *, body):
            asked.append(self.path)
            content = (TINY_THINKER / "config.json").read_bytes()
            found = self.path.endswith("/resolve/main/config.json")
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(content) if found else 0))
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", '"1"')
            self.end_headers()
            if body and found:
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        environment = {
            **os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", ASKING], env=environment, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
    finally:
        server.shutdown()
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[0] == f"the hub {tiny.num_parameters}"
    # a model may come with a list of other configs; of weights nothing is asked
    assert asked
    assert not [path for path in asked if "safetensors" in path or path.endswith(".bin")]
    assert {path.rpartition("/")[2] for path in asked} == {"config.json"}
