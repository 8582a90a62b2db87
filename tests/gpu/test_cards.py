"""The main job on a card of a size: train with vLLM, release, train again in the same process."""

import os
import time

import pytest
from runs_here import metrics_of, model_folder, run_file
from small_card import GIB, card_here

pytestmark = pytest.mark.gpu
CASES = {  # model, GB of the card, 4 bit, backend (transformers: vLLM has a copy of its own)
    "qwen3-4b-12gb": ("qwen3-4b", 12, True, "unsloth"),
    "qwen3-0.6b-8gb": ("qwen3-0.6b", 8, False, "unsloth"),
    "qwen3-1.7b-12gb": ("qwen3-1.7b", 12, False, "transformers"),
    "qwen3-8b-24gb": ("qwen3-8b", 24, True, "unsloth"),
    "qwen3-4b-16gb": ("qwen3-4b", 16, True, "transformers"),
}
NOTED = (
    "sampling/sync_seconds", "sampling/logp_difference_mean", "sampling/rounding_noise",
    "step_time", "memory/peak_gib", "speed/generation_tokens_per_second",
)  # fmt: skip
# Variables of torch.distributed that a training must leave as they were
SETTLED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def gib(size):
    return f"{size / GIB:.2f}"


def watch_start(monkeypatch, card, seen):
    """Note the peak of an engine's start, and what vLLM made of its settings."""
    from rloo_kit.sampling import choice

    start = choice._in_process

    def noting(*arguments):
        engine = start(*arguments)
        config = engine._llm.llm_engine.vllm_config
        seen["engine"] = engine.name
        seen["share"] = config.cache_config.gpu_memory_utilization
        seen["sleeps"] = config.model_config.enable_sleep_mode
        seen["v2_runner"] = getattr(config, "use_v2_model_runner", None)
        seen["start_peak"] = card.take_peak() if card else 0
        return engine

    monkeypatch.setattr(choice, "_in_process", noting)


def timed(lines):
    """Return a function that appends a line, with the seconds since now."""
    started = time.perf_counter()
    return lambda line: lines.append(f"{time.perf_counter() - started:.0f} s: {line}")


def note_run(record, number, rows, lines, card):
    """Record what a training did, and what its release left."""
    from rloo_kit.machine.engines import sleep_pool_bytes

    left = card.usage.read() - card.context if card else 0
    record(f"run_{number}_left_gib", gib(left))
    record(f"run_{number}_pool_mib", sleep_pool_bytes() // 2**20)
    for key in NOTED:
        values = [f"{row[key]:.4g}" for row in rows if key in row]
        record(f"run_{number}_{key}", " ".join(values))
    record(f"run_{number}_said", [line[:200] for line in lines])


@pytest.mark.parametrize("name", CASES)
def test_it_trains_twice_in_one_process(
    name, device, tmp_path, monkeypatch, record_property, recwarn
):
    import rloo_kit as rk
    from rloo_kit.machine.hardware import why_not_vllm

    model, gb, in_4bit, backend = CASES[name]
    rk.setup(backend)
    if reason := why_not_vllm():
        pytest.fail(reason)
    card = card_here(gb)
    path = run_file(
        tmp_path / "job",
        model_folder(model, load_in_4bit=in_4bit, fallback=tmp_path),
        load_in_4bit=in_4bit,
        generation="vllm",
    )
    overrides = [f"model.backend={backend}"]
    plan = rk.plan(path, gpu=f"{gb}GB" if card else None, overrides=overrides)
    record_property("planned", f"{gib(plan.peak_bytes)} GiB, share {plan.vllm_share}")
    monkeypatch.chdir(tmp_path)
    before = set(os.environ)
    peaks = []
    for number in (1, 2):
        seen = {}
        lines = []
        folder = tmp_path / f"run-{number}"
        with monkeypatch.context() as patches:
            watch_start(patches, card, seen)
            result = rk.train(path, [*overrides, f"output_dir={folder}"], timed(lines))
        peaks.append(max(card.take_peak(), seen.get("start_peak", 0)) if card else 0)
        record_property(f"run_{number}", f"{seen}, peak {gib(peaks[-1])} GiB")
        note_run(record_property, number, metrics_of(folder), lines, card)
        assert result.steps == 3
    record_property("released", str(result.released))
    record_property("warned", [str(w.message)[:200] for w in recwarn if "vLLM" in str(w.message)])
    assert not SETTLED & (set(os.environ) - before)
    assert not (tmp_path / "rloo-kit").exists()
    if card:
        assert max(peaks) <= min(card.total, plan.peak_bytes)
