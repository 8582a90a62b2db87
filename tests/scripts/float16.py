"""Train the embedded model for two steps in float16, three times; print what was seen as JSON.

Unsloth keeps no float16 weights on a CPU, so transformers loads the model.
"""

import json
import sys

import rloo_kit as rk

rk.setup("transformers")

import torch


def odd_ids(completion_ids, **_):
    return [sum(one % 2 for one in ids) / len(ids) for ids in completion_ids]


def all_equal(completion_ids, **_):
    return [1.0] * len(completion_ids)


def seen(folder, scale=None, reward=odd_ids):
    model, tokenizer = rk.load_model("tiny-thinker", precision="fp16", max_seq_length=128)
    model = rk.attach_lora(model)
    trainer = rk.LeaveOneOutTrainer(
        model=model,
        reward_funcs=reward,
        args=rk.LeaveOneOutConfig(
            folder, max_steps=2, max_completion_length=24, save_strategy="no", fp16=True,
            bf16=False, learning_rate=1e-3, beta=0.0 if reward is all_equal else 0.05,
        ),
        train_dataset=rk.load_prompts("arithmetic", num_prompts=32),
        processing_class=tokenizer,
    )  # fmt: skip
    if scale is not None:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in trained.items()}
    trainer.train()
    with trainer.accelerator.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    return {
        "model": str(model.dtype),
        "adapter": sorted({str(p.dtype) for p in trained.values()}),
        "pass": str(product.dtype),
        "norms": [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row],
        "moved": any(not p.equal(before[n]) for n, p in trained.items()),
        "skipped": trainer.rloo.guard.skipped,
        "scale": trainer.accelerator.scaler.get_scale(),
    }


folder = sys.argv[1]
print(json.dumps([seen(folder), seen(folder, 2.0**60), seen(folder, reward=all_equal)]))
