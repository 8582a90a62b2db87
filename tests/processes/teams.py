"""Call a function in N processes that torch.distributed joins, and train a fixed task in them."""

import functools
import json
import os
import pickle
import random
import socket
import zlib
from pathlib import Path

import lives


def in_team(function, size, folder, seconds=240.0):
    """Return what ``function(team)`` returned in every process, by rank."""
    begun = start_team(function, size, folder)
    try:
        for life in begun:
            assert life.finish(seconds) == 0, life.text
    finally:
        for life in begun:
            life.kill()
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(size)]


def start_team(function, size, folder):
    """Start the processes; each writes what the function returned."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        lives.begin([], folder / f"output-{rank}", functools.partial(_be, function, variables))
        for rank, variables in enumerate(places(size))
    ]


def places(size):
    """Return the variables of every process, as a launcher sets them; none for a single one."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    every = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size}
    return [
        {name: str(value) for name, value in {**every, "RANK": rank, "LOCAL_RANK": rank}.items()}
        if size > 1
        else {}
        for rank in range(size)
    ]


def _be(function, variables):
    folder, rank = Path(os.readlink("/proc/self/fd/1")).parent, variables.get("RANK", "0")
    os.environ.update(variables)
    from rloo_kit.processes import ALONE, join_team

    result = function(join_team(on_cpu=True) if variables else ALONE)
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    os._exit(0)


# --- a training with given completions -----------------------------------------------------------


class Given:
    """An engine whose completions depend on the prompt and on how often it was asked: no model."""

    name, sync_seconds = "given completions", 0.0

    def __init__(self, longest, vocabulary, end):
        import torch

        self.adapter_dtype = torch.float32
        self.longest, self.vocabulary, self.end = longest, vocabulary, end
        self.calls = 0

    def sync(self, model):
        """Nothing depends on the adapter."""

    def generate(self, prompt_ids, sampling, seed):
        from rloo_kit.sampling.engine import Generations

        self.calls += 1
        found = [self._complete((self.calls, row, ids)) for row, ids in enumerate(prompt_ids)]
        return Generations(found, [[0.0] * len(ids) for ids in found])

    def _complete(self, key):
        chance = random.Random(zlib.crc32(repr(key).encode()))
        ids = [chance.choice(self.vocabulary) for _ in range(chance.randint(1, self.longest))]
        return [*ids[:-1], self.end] if chance.random() < 0.8 else ids

    def sleep(self):
        """It holds no memory."""

    close = sleep


def lottery(completions, log_metric, log_extra, **_):
    """Scores by the text; a quarter of them equal, so that some groups have no signal."""
    for completion in completions:
        log_metric("longest", len(completion[-1]["content"]))
    log_extra("text", [completion[-1]["content"] for completion in completions])
    sums = [zlib.crc32(completion[-1]["content"].encode()) % 8 for completion in completions]
    return [0.5 if number < 2 else number / 8 for number in sums]


def train(team, folder, steps=4, callbacks=(), resume=None, **settings):
    """Train a float32 tiny-thinker by TRL's rules on given completions; return what came of it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    import rloo_kit as rk
    from rloo_kit.models.loading import TINY_THINKER
    from rloo_kit.sampling.choice import SharedEngine
    from rloo_kit.training.preparation import divided_batch

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(TINY_THINKER, dtype=torch.float32)
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=8, target_modules=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    tokenizer = AutoTokenizer.from_pretrained(TINY_THINKER)
    settings = {
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "bf16": False,
        "fp16": False,
        "save_strategy": "no",
        "canary": False,
        "doctor": False,
        "max_steps": steps,
        **settings,
    }
    settings |= divided_batch(settings, team.size)
    words = [n for n in range(len(tokenizer)) if n not in tokenizer.all_special_ids]
    given = Given(settings["max_completion_length"], words, tokenizer.eos_token_id)
    kept = []

    class Keeper(TrainerCallback):
        def on_completions(self, args, state, control, records, **_):
            kept.extend(records)

    trainer = rk.LeaveOneOutTrainer(
        model=model,
        reward_funcs=lottery,
        args=rk.LeaveOneOutConfig(str(folder), **settings),
        train_dataset=rk.load_prompts("arithmetic", num_prompts=24),
        processing_class=tokenizer,
        engine=SharedEngine(team, lambda: given),
        callbacks=[Keeper(), *callbacks],
    )
    begun = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    trainer.train(resume_from_checkpoint=resume)
    adapter = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    rows = [row for row in trainer.state.log_history if "reward" in row]
    return {
        "records": json.loads(json.dumps(kept)),
        "rows": rows,
        "extra": list(trainer._logs["extra"]["text"]),
        "texts": list(trainer._logs["completion"]),
        "adapter": adapter,
        "moved": {n: adapter[n] - begun[n] for n in adapter},
    }
