"""vLLM's share of the card: one computation for the plan, the load and the engine."""

import os
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError
from tiny_vision import save_model
from transformers import GPTNeoXConfig, Qwen3MoeConfig

import rloo_kit as rk
from rloo_kit.errors import ConfigError, GenerationError
from rloo_kit.job import _engine_arguments
from rloo_kit.machine.hardware import GIB, Hardware
from rloo_kit.models import shared_engine
from rloo_kit.models.engine_memory import (
    MIB,
    cpu_cache,
    engine_memory,
    engine_size,
    reserved_rank,
)
from rloo_kit.models.notes import ModelNotes, notes_of
from rloo_kit.models.shape import read_shape, shape_of_config
from rloo_kit.models.shared_engine import (
    EngineSettings,
    load_shared,
    why_no_start,
    why_not_shared,
)
from rloo_kit.planning.memory import CONTEXT
from rloo_kit.planning.planner import plan
from rloo_kit.sampling import choice as engines
from rloo_kit.sampling.engine import Choice


@pytest.fixture(scope="module")
def four_billion():
    return read_shape(MODEL)


def size_of(shape, rows=16, length=768, **others):
    others = {"in_4bit": True, "max_rank": 16, **others}
    return engine_size(shape, num_sequences=rows, max_length=length, **others)


def test_the_cache_holds_all_completions_at_full_length(four_billion):
    size = size_of(four_billion)
    assert size.full_cache == 16 * 768 * 2 * 2 * 36 * 8 * 128
    assert size_of(four_billion, rows=1024).full_cache * 16 == 255 * size.full_cache


def test_an_engine_that_stays_awake_leaves_half_to_the_training(four_billion):
    size = size_of(four_billion, rows=256, length=8192)
    asleep, awake = (
        engine_memory(size, 11 * GIB, sleeps=sleeps, card=12 * GIB) for sleeps in (True, False)
    )
    assert awake.cache == pytest.approx(asleep.cache * 5 / 9, rel=0.01)
    assert asleep.total < 11 * GIB


@pytest.mark.parametrize(
    ("free", "share", "says"),
    [
        (3, None, r"with 3\.0 GiB free.*lower model\.max_seq_length"),
        (11, 0.2, r"with 0\.2 of the card.*raise trainer\.vllm_gpu_memory_utilization"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused(four_billion, free, share, says):
    with pytest.raises(GenerationError, match=f"{says}.* set trainer.generation: transformers"):
        engine_memory(size_of(four_billion), free * GIB, sleeps=True, card=12 * GIB, share=share)


def test_a_cpu_gives_a_quarter_of_what_is_free(four_billion):
    size = size_of(four_billion, in_4bit=False, rows=256, length=8192)
    # a quarter of 40 GiB less 4,022,468,096 weights in 16 bit, and 16 bytes for each of 33,030,144
    assert cpu_cache(size, 40 * GIB) == 8_594_063_616
    assert cpu_cache(size, 8 * GIB) == 64 * MIB


# --- the plan and the load agree -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "card", "fits"),
    [
        ("qwen3-1.7b-8gb", 8, True),
        ("qwen3-4b-thinking-12gb", 12, True),
        ("qwen3-14b-24gb", 12, False),
    ],
)
def test_the_plan_and_the_load_ask_for_the_same_share(name, card, fits, monkeypatch):
    monkeypatch.setattr("rloo_kit.planning.facts.installed_version", lambda _: "0.31.0")
    monkeypatch.setattr("rloo_kit.planning.facts.why_not_unsloth", lambda _: None)
    made = plan(name, gpu=f"{card}GB")
    job = made.job
    assert job.engine == "shared"
    settings = EngineSettings(
        job.max_length, job.in_4bit, reserved_rank(job.rank), job.rows, sleeps=job.sleeps
    )
    total = made.facts.card.usable
    free = total - CONTEXT
    assert made.fits is fits
    if not fits:
        with pytest.raises(GenerationError, match="vLLM does not fit"):
            settings.arguments(made.facts.shape, free, total)
        return
    arguments = settings.arguments(made.facts.shape, free, total)
    asked = arguments["gpu_memory_utilization"] * free / total
    assert asked == pytest.approx(made.vllm_share, abs=0.001)
    assert arguments["max_num_seqs"] == min(255, job.rows)


# --- what Unsloth cannot share -------------------------------------------------------------------


def test_models_with_other_layers_or_code_are_not_shared(four_billion):
    assert why_not_shared(four_billion) is None
    assert "code" in why_not_shared(four_billion, trust_remote_code=True)
    small = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    neox = shape_of_config(GPTNeoXConfig(intermediate_size=64, vocab_size=64, **small), "neox")
    assert "query_key_value" in why_not_shared(neox)
    moe = Qwen3MoeConfig(num_experts=4, vocab_size=64, num_key_value_heads=1, **small)
    assert "dense" in why_not_shared(shape_of_config(moe, "moe"))


@pytest.fixture
def small_card(monkeypatch):
    card = Hardware("cuda", "a card", int(11.76 * GIB), 11 * GIB, True, 1)
    monkeypatch.setattr(shared_engine, "detect_hardware", lambda: card)


MODEL = "unsloth/Qwen3-4B-bnb-4bit"
SHARED = EngineSettings(768, True, 16, 16)
REQUIRED = replace(SHARED, required=True)


def test_what_unsloth_refuses_is_loaded_without_vllm(small_card):
    load = Mock(side_effect=[MemoryError("none left"), (SimpleNamespace(), "tokenizer")])
    model, _ = load_shared(load, MODEL, SHARED, False)
    first, second = load.call_args_list
    assert first.kwargs["fast_inference"]
    assert second.kwargs == {}
    assert "none left" in notes_of(model).why_not_shared
    with pytest.raises(GenerationError, match="not yet"):
        load_shared(Mock(side_effect=NotImplementedError("not yet")), MODEL, REQUIRED, False)


def test_a_model_that_unsloth_loads_without_vllm_is_refused_if_vllm_is_required(small_card):
    load = Mock(return_value=(SimpleNamespace(), "tokenizer"))
    model, _ = load_shared(load, MODEL, SHARED, False)
    assert "without vLLM" in notes_of(model).why_not_shared
    with pytest.raises(GenerationError, match="Unsloth loaded the model without vLLM"):
        load_shared(load, MODEL, REQUIRED, False)


@pytest.mark.parametrize(
    "settings",
    [
        {"memory_share_given": True, "vllm_gpu_memory_utilization": 0.4},
        {"vllm_max_model_length": 4096},
    ],
    ids=["share", "length"],
)
def test_settings_that_differ_from_the_shared_engines_are_refused(on_gpu, settings):
    notes_of(on_gpu).shared_engine = EngineSettings(128, True, 16, 16, share=0.5)
    args = arguments_of("vllm", **settings)
    with pytest.raises(ConfigError, match="vLLM was already started"):
        engines.start_engine(on_gpu, args, trains=False)


@pytest.mark.parametrize("sleeps", [True, False])
def test_unsloths_variable_follows_the_sleep_mode_and_is_restored(sleeps, small_card, monkeypatch):
    monkeypatch.setenv("UNSLOTH_VLLM_STANDBY", "1")

    def load(**_):
        return SimpleNamespace(vllm_engine=os.environ["UNSLOTH_VLLM_STANDBY"]), None

    settings = replace(REQUIRED, sleeps=sleeps)
    model, _ = load_shared(load, MODEL, settings, False)
    assert notes_of(model).shared_engine == settings
    assert model.vllm_engine == ("1" if sleeps else "0")
    assert os.environ["UNSLOTH_VLLM_STANDBY"] == "1"


def test_the_start_of_an_engine_leaves_threads_and_variables_as_they_were(small_card, monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    threads = torch.get_num_threads()

    def load(**_):
        torch.set_num_threads(threads + 1)
        os.environ["MASTER_PORT"] = "1"
        return SimpleNamespace(vllm_engine="an engine"), None

    load_shared(load, MODEL, REQUIRED, False)
    assert torch.get_num_threads() == threads
    assert "MASTER_PORT" not in os.environ


@pytest.mark.parametrize("had_groups", [False, True])
def test_only_the_process_groups_of_a_failed_start_end(small_card, monkeypatch, had_groups):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: had_groups)
    leave = Mock()
    monkeypatch.setattr(shared_engine, "leave_process_groups", leave)
    with pytest.raises(GenerationError):
        load_shared(Mock(side_effect=ValueError("no")), MODEL, REQUIRED, False)
    assert leave.call_count == (not had_groups)


def test_a_failed_download_is_not_an_error_of_vllm(small_card):
    def again(**_):  # as Unsloth does with an error of vLLM's start
        try:
            raise HfHubHTTPError("503 Server Error", response=Mock())
        except OSError as exc:
            error = str(exc)
            raise RuntimeError(error)  # noqa: B904

    load = Mock(side_effect=again)
    with pytest.raises(RuntimeError, match="503"):
        load_shared(load, MODEL, SHARED, False)
    assert load.call_count == 1
    missing = RemoteEntryNotFoundError("404: a file that only vLLM reads", response=Mock())
    for error in (missing, FileNotFoundError(2, "No such file or directory", "nvcc")):
        with pytest.raises(GenerationError, match=r"404|nvcc"):
            load_shared(Mock(side_effect=error), MODEL, REQUIRED, False)


def test_guessed_tokens_have_logits_too(four_billion):
    plain, guessed = (size_of(four_billion, draft_tokens=n).working for n in (0, 4))
    assert guessed - plain == 4 * 16 * four_billion.vocab_size * 12


# --- who samples ---------------------------------------------------------------------------------


def arguments_of(generation, **others):
    usual = {
        "use_vllm": False,
        "vllm_mode": "colocate",
        "vllm_max_model_length": None,
        "vllm_gpu_memory_utilization": 0.3,
        "memory_share_given": False,
        "generation_kwargs": None,
    }
    return SimpleNamespace(generation=generation, **usual | others)


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(engines, "why_not_vllm", lambda: None)
    monkeypatch.setattr(engines, "why_no_hot_swap", lambda _: None)
    notes = ModelNotes(max_seq_length=128)
    return SimpleNamespace(device=SimpleNamespace(type="cuda"), rloo_kit_notes=notes)


def test_only_auto_falls_back_when_vllm_does_not_start(on_gpu, monkeypatch):
    refuse = Mock(side_effect=GenerationError("vLLM does not fit"))
    monkeypatch.setattr(engines, "_in_process", refuse)
    found = engines.start_engine(on_gpu, arguments_of("auto"), trains=False)
    assert found == (None, Choice("transformers", "vLLM does not fit"))
    with pytest.raises(GenerationError, match="does not fit"):
        engines.start_engine(on_gpu, arguments_of("vllm"), trains=False)


def test_auto_samples_unshared_models_with_transformers(on_gpu, monkeypatch):
    monkeypatch.setattr(engines, "_in_process", lambda *_: "its own engine")
    notes_of(on_gpu).why_not_shared = "GPT-NeoX"
    engine, choice = engines.start_engine(on_gpu, arguments_of("auto"), trains=False)
    assert (engine, choice.reason) == (None, "GPT-NeoX")
    engine, _ = engines.start_engine(on_gpu, arguments_of("vllm"), trains=False)
    assert engine == "its own engine"


def test_a_second_trainer_of_a_model_samples_by_the_first_ones_engine(on_gpu, monkeypatch):
    class Started:
        def __init__(self, model, **how):
            self.is_closed = False

    monkeypatch.setattr("rloo_kit.sampling.vllm_inprocess.VllmEngine", Started)
    monkeypatch.setattr(engines, "add_to_session", lambda _: None)
    monkeypatch.setattr(engines, "batch_plan", lambda _: SimpleNamespace(in_flight=8))
    usual = {"vllm_enable_sleep_mode": True, "seed": 1}

    def start(**others):
        args = arguments_of("vllm", **usual | others)
        return engines.start_engine(on_gpu, args, trains=False)[0]

    first = start()
    assert start(seed=2, vllm_max_model_length=64) is first
    assert start(vllm_max_model_length=256) is not first
    second = start(vllm_enable_sleep_mode=False)
    assert second is not first
    second.is_closed = True
    assert start(vllm_enable_sleep_mode=False) is not second


def test_a_model_that_unsloth_loaded_has_its_notes():
    model = SimpleNamespace(for_training=Mock(), max_seq_length=64)
    assert (notes_of(model).backend, notes_of(model).max_seq_length) == ("unsloth", 64)
    assert notes_of(SimpleNamespace(max_seq_length=64)) == ModelNotes()


INSTEAD = ": set trainer.generation: transformers"


@pytest.mark.parametrize(
    ("exc", "said", "remedy"),
    [
        (
            MemoryError(
                "Unsloth: Your GPU ran out of memory loading vLLM with standby mode enabled.\n"
                "Try one of these fixes:\nOriginal error: No available memory for the cache blocks."
            ),
            "No available memory for the cache blocks.",
            "lower model.max_seq_length",
        ),
        (
            RuntimeError(
                "Unsloth: vLLM could not finish memory profiling because another process.\n"
                "Original error: Error in memory profiling. Initial free memory 122 GiB, current "
                "free memory 123 GiB."
            ),
            "Error in memory profiling.",
            "close other programs on the GPU and try again",
        ),
        (
            AssertionError(
                "Standby mode is not supported with expandable segments.\n"
                "Please set environment variable PYTORCH_ALLOC_CONF without it."
            ),
            "not supported with expandable segments",
            "call rk.setup() before unsloth is imported",
        ),
        (ValueError("1 validation error\nValue error, no such model"), "no such model", INSTEAD),
        (OSError("unsloth/Qwen3-4B-bnb-4bit has no tokenizer"), "no tokenizer", INSTEAD),
        (RuntimeError(), "RuntimeError", INSTEAD),
    ],
)
def test_an_error_of_vllms_start_is_told_by_its_reason(exc, said, remedy):
    text = why_no_start(exc)
    assert said in text
    assert remedy in text
    assert "\n" not in text


def test_an_engine_of_a_model_with_a_vision_part_does_not_sleep(small_card, tmp_path):
    folder = save_model(tmp_path / "gemma3", "gemma3")
    load = Mock(return_value=(SimpleNamespace(vllm_engine="an engine"), None))
    model, _ = load_shared(load, str(folder), REQUIRED, False)
    assert not notes_of(model).shared_engine.sleeps


def test_the_shared_engine_has_room_for_all_rows_in_flight(tmp_path):
    in_flight = {"partial_rollouts": True, "num_generations": 4}
    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    args = rk.LeaveOneOutConfig(str(tmp_path), **in_flight, **batch)
    assert _engine_arguments(args)["num_sequences"] == 32
