"""Two steps of training with a large learning rate, for tests of what an adapter learns."""

import zlib

import rloo_kit as rk


def lottery(completion_ids, **_):
    """Scores that differ in every group."""
    return [zlib.crc32(str(ids).encode()) % 100 / 100 for ids in completion_ids]


def short_trainer(model, tokenizer, folder, **settings):
    """Return a trainer whose checkpoints and logs would go to ``folder``."""
    few = {"max_steps": 2, "max_completion_length": 8, "per_device_train_batch_size": 8}
    usual = few | {"temperature": 2.0, "learning_rate": 1e-2, "save_strategy": "no"}
    return rk.LeaveOneOutTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lottery,
        train_dataset=rk.load_prompts("arithmetic", num_prompts=8),
        args=rk.LeaveOneOutConfig(str(folder), **usual, doctor=False, **settings),
    )
