"""Unsloth samples by itself: float16 with 8-bit Adam on 8 GB, and tokens a second."""

import statistics
import time

import pytest
from runs_here import TOY, metrics_of, model_folder, run_file
from small_card import GIB, card_here

pytestmark = pytest.mark.gpu


def test_float16_and_8_bit_adam_train_4b_on_8_gb(device, tmp_path, record_property):
    import rloo_kit as rk

    backend = "auto" if device == "cuda" else "transformers"  # what float16 asks for on a CPU
    rk.setup(backend)
    card = card_here(8)
    path = run_file(
        tmp_path / "job",
        model_folder("qwen3-4b", load_in_4bit=True, fallback=tmp_path),
        load_in_4bit=True,
        generation="transformers",
        fp16=True,
        bf16=False,
        per_device_train_batch_size=8,
    )
    result = rk.train(path, [f"output_dir={tmp_path / 'run'}", f"model.backend={backend}"], str)
    rows = metrics_of(tmp_path / "run")
    assert result.steps == 3
    for key in ("step_time", "loss", "memory/peak_gib", "speed/generation_tokens_per_second",
                "speed/learning_tokens_per_second"):  # fmt: skip
        record_property(key, " ".join(f"{row[key]:.4g}" for row in rows if key in row))
    if card:
        record_property("peak_gib", f"{card.take_peak() / GIB:.2f}")
        left = card.usage.read() - card.context
        record_property("left_gib", f"{left / GIB:.2f}")
        assert left < GIB


def test_speed_of_sampling_with_and_without_unsloths_graphs(
    kit, device, tmp_path, record_property, monkeypatch
):
    import torch

    folder = model_folder("qwen3-4b", load_in_4bit=True, fallback=tmp_path)
    rows, length = (4, 8) if TOY else (16, 128)
    model, tokenizer = kit.load_model(folder, max_seq_length=length + 64)
    trainer = kit.LeaveOneOutTrainer(
        model=kit.attach_lora(model, r=16),
        processing_class=tokenizer,
        train_dataset=kit.load_prompts("arithmetic", num_prompts=rows),
        reward_funcs="length",
        args=kit.LeaveOneOutConfig(
            str(tmp_path / "out"), per_device_train_batch_size=rows, num_generations=4,
            max_completion_length=length, generation="transformers",
            generation_kwargs={"min_new_tokens": length}, max_steps=1, dry_run=False,
        ),
    )  # fmt: skip
    prompts = [tokenizer("12 + 34 = ")["input_ids"]] * rows
    for graphs in ("1", "0"):
        monkeypatch.setenv("UNSLOTH_DECODE_CUDA_GRAPHS", graphs)
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            drawn = trainer.sampler.generate(prompts)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        assert [len(ids) for ids in drawn] == [length] * rows
        speed = rows * length / statistics.median(seconds[1:])
        record_property(f"tokens_per_second_graphs_{graphs}", round(speed))
    kit.release(trainer)
