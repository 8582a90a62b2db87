"""Seconds of the steps of one trainer on a GPU: the kit, TRL's RLOO, or Unsloth's GRPO.

    python benchmarks/gpu_peers.py kit --models FOLDER --answer kit.json

Each trainer is set up as its own documentation says. The kit and Unsloth share a 4-bit base with
vLLM. TRL has a 16-bit base, and a colocated vLLM with merged weights. ``kit-16bit`` is the kit with
a 16-bit base, for the comparison with TRL. All use 8-bit Adam. Weights are random, so completions
have full length. The first step compiles and is not counted. On a CPU, all sample with
transformers.

With ``--turns FOLDER``, arms that run at the same time take their counted steps in turn, A B C D
A B C D. So the card does nothing else during a timed step, and whatever slows the card down slows
all arms. The caller makes a file ``hold`` in the folder, and removes it once every arm has written
``ARM.ready``. It writes ``ARM.gone`` for an arm that has ended.
"""

import json
import os
import tempfile
import time
from pathlib import Path

from shared import parser_of

# Backend of each arm, in the order in which they take turns
ARMS = {"kit": "auto", "unsloth-grpo": "auto", "trl-rloo": "transformers", "kit-16bit": "auto"}
IN_4_BIT = ("kit", "unsloth-grpo")


class Turns:
    """Order of the counted steps of arms that run at the same time."""

    def __init__(self, folder: Path | None, arm: str) -> None:
        self.folder, self.arm = folder, arm

    def wait(self, step: int) -> None:
        """Wait for the turn of a counted step (0 or more); step -1, which compiles, has no turn."""
        if self.folder is None or step < 0:
            return
        (self.folder / f"{self.arm}.ready").touch()
        while (self.folder / "hold").exists():
            time.sleep(0.1)
        mine = step * len(ARMS) + list(ARMS).index(self.arm)
        while not all(map(self._is_over, range(mine))):
            time.sleep(0.02)

    def give_on(self, step: int) -> None:
        """Let the next arm take its step."""
        if self.folder is not None and step >= 0:
            (self.folder / f"{step}-{self.arm}.done").touch()

    def _is_over(self, turn: int) -> bool:
        """Return whether the step of a turn is done, or its arm has ended."""
        arm = list(ARMS)[turn % len(ARMS)]
        names = (f"{turn // len(ARMS)}-{arm}.done", f"{arm}.gone")
        return any((self.folder / name).exists() for name in names)


class Steps:
    """Seconds of every step and of its sampling, written to the file ``answer`` after each step."""

    def __init__(self, torch, turns: Turns, answer: Path):
        self.wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        self.turns = turns
        self.answer = answer
        self.rows = []
        self.sampling = 0.0
        self.watch = None

    def sampled(self, draw):
        def timed(*arguments, **keywords):
            self.wait()
            started = time.perf_counter()
            drawn = draw(*arguments, **keywords)
            self.wait()
            self.sampling += time.perf_counter() - started
            return drawn

        return timed

    def callback(self):
        from transformers import TrainerCallback

        steps = self

        class Clock(TrainerCallback):
            def on_step_begin(self, *_, **__):
                steps.wait()
                steps.turns.wait(len(steps.rows) - 1)
                steps.sampling = 0.0
                steps.started = time.perf_counter()

            def on_step_end(self, *_, **__):
                steps.wait()
                whole = time.perf_counter() - steps.started
                row = {"step": whole, "sampling": steps.sampling}
                steps.rows.append(row | {"learning": whole - steps.sampling})
                steps.turns.give_on(len(steps.rows) - 2)
                steps.write()

        return Clock()

    def write(self):
        found = {"arm": self.turns.arm, "steps": self.rows}
        if self.watch is not None:
            found["peak_gib"] = self.watch.peak / 2**30
        self.answer.write_text(json.dumps(found))


def policy(arm: str, options, on_gpu: bool):
    """Return the model with its adapter, and the tokenizer, as in the arm's documentation."""
    import gpu_models

    import rloo_kit as rk

    in_4bit = arm in IN_4_BIT
    folder = gpu_models.model_folder(
        options.models, options.geometry, load_in_4bit=in_4bit, device="cuda" if on_gpu else "cpu"
    )
    longest = options.length + 64
    if arm != "unsloth-grpo":
        model, tokenizer = rk.load_model(
            folder, max_seq_length=longest, load_in_4bit=in_4bit, num_sequences=options.rows,
            fast_inference=False if arm == "trl-rloo" else "auto",
        )  # fmt: skip
        return rk.attach_lora(model, r=16, lora_alpha=16), tokenizer
    from unsloth import FastLanguageModel

    engine = {"fast_inference": True, "max_lora_rank": 16, "gpu_memory_utilization": options.share}
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=longest, load_in_4bit=True, **(engine if on_gpu else {})
    )
    lora = {"r": 16, "lora_alpha": 16, "use_gradient_checkpointing": "unsloth"}
    return FastLanguageModel.get_peft_model(model, **lora), tokenizer


def trainer(arm: str, options, on_gpu: bool, steps: Steps):
    """Return the arm's trainer."""
    from datasets import Dataset

    import rloo_kit as rk

    model, tokenizer = policy(arm, options, on_gpu)
    fixed = {
        "output_dir": tempfile.mkdtemp(), "save_strategy": "no", "report_to": "none",
        "max_steps": options.steps, "per_device_train_batch_size": options.rows,
        "num_generations": 8, "max_completion_length": options.length, "beta": 0.02,
        "learning_rate": 1e-6, "temperature": 1.0, "bf16": on_gpu, "use_cpu": not on_gpu,
        "gradient_accumulation_steps": 1,  # Unsloth's default is 2
        **({"optim": "adamw_8bit"} if on_gpu else {}),
    }  # fmt: skip

    def reward(completions, **_):
        return [sum(map(str.isalpha, text)) / (len(text) + 1) for text in completions]

    parts = {
        "model": model, "processing_class": tokenizer, "reward_funcs": reward,
        "train_dataset": Dataset.from_dict({"prompt": ["12 + 34 = "] * 64}),
        "callbacks": [steps.callback()],
    }  # fmt: skip
    if arm.startswith("kit"):
        fixed |= {"doctor": False, "dry_run": False}
        made = rk.LeaveOneOutTrainer(args=rk.LeaveOneOutConfig(**fixed), **parts)
        made.completer.draw = steps.sampled(made.completer.draw)
        return made
    import trl

    fixed |= {"use_vllm": True, "vllm_mode": "colocate"} if on_gpu else {}
    if arm == "trl-rloo":
        engine = {"vllm_gpu_memory_utilization": options.share,
                  "vllm_max_model_length": options.length + 64}  # fmt: skip
        fixed |= engine if on_gpu else {}
        made = trl.RLOOTrainer(args=trl.RLOOConfig(**fixed), **parts)
    else:
        made = trl.GRPOTrainer(args=trl.GRPOConfig(**fixed), **parts)
    made._generate_single_turn = steps.sampled(made._generate_single_turn)
    return made


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("arm", choices=ARMS)
    add("--models", type=Path, required=True, help="folder of weights, made if missing")
    add("--answer", type=Path, required=True, help="JSON file to write")
    add("--geometry", default="qwen3-1.7b")
    add("--rows", type=int, default=64)
    add("--length", type=int, default=512)
    add("--steps", type=int, default=4)
    add("--share", type=float, default=0.3, help="share of the card for vLLM of TRL and Unsloth")
    add("--turns", type=Path, help="folder of the turns of several arms")
    add("--card", type=int, help="GB of the card that the arm sees")
    options = parser.parse_args()
    import rloo_kit as rk

    rk.setup(ARMS[options.arm])
    import torch

    on_gpu = torch.cuda.is_available()
    steps = Steps(torch, Turns(options.turns, options.arm), options.answer)
    if on_gpu:
        from small_card import SmallCard, Watch

        steps.watch = SmallCard(options.card, limited=False) if options.card else Watch()
    else:
        from rloo_kit.training.trl_step import route_trl_lm_head

        route_trl_lm_head()
        if options.arm == "unsloth-grpo":
            from unsloth.models.rl import patch_trl_rl_trainers

            patch_trl_rl_trainers()  # on a GPU, Unsloth does this itself
            os.environ["UNSLOTH_MIXED_PRECISION"] = "bfloat16"  # it means neither bf16 nor fp16
            os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # Unsloth's GRPO loss reads it
    trainer(options.arm, options, on_gpu, steps).train()


if __name__ == "__main__":
    main()
