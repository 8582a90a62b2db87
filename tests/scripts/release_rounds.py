"""Load, train and release with vLLM, several times in a process; print the memory after each.

python release_rounds.py ROUNDS (ends|raises|interrupted) [MODEL]
"""

import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict

import rloo_kit as rk
from rloo_kit.machine.cleanup import measure

rk.setup()


class Stop(Exception):
    pass


def lengths(completions, **_):
    return [float(len(str(completion)) % 5) for completion in completions]


def train(generation, reward=lengths, name="tiny-thinker"):
    """Train for two steps, and return the number of steps made."""
    model, tokenizer = rk.load_model(name, load_in_4bit=False, max_seq_length=128)
    trainer = rk.LeaveOneOutTrainer(
        model=rk.attach_lora(model, r=16),
        processing_class=tokenizer,
        train_dataset=rk.load_prompts("arithmetic", num_prompts=64),
        reward_funcs=reward,
        args=rk.LeaveOneOutConfig(
            tempfile.mkdtemp(),
            max_steps=2,
            per_device_train_batch_size=16,
            max_completion_length=32,
            generation=generation,
            save_strategy="no",
        ),
    )
    trainer.train()
    return trainer.state.global_step


def main(rounds, how, *model):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it

    def reward(completions, trainer_state, **_):
        if trainer_state.global_step == 1 and how == "raises":
            raise Stop
        if trainer_state.global_step == 1 and how == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
        return lengths(completions)

    for number in range(int(rounds)):
        ended = "end"
        try:
            with rk.session():
                train("vllm", reward, *model)
        except (Stop, rk.RewardError, KeyboardInterrupt) as exc:
            ended = type(exc).__name__
        print(json.dumps({"round": number + 1, "ended": ended, **asdict(measure())}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
