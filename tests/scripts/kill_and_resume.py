"""Kill trainings at random moments, resume them, and compare them with uninterrupted runs.

    python tests/scripts/kill_and_resume.py [--kills 200] [--seed 1] [--settings NAME ...]

Every run is killed by SIGKILL several times, while it loads, trains, writes a checkpoint or ends.
It is resumed each time until it finishes. Then its adapter and its completions must be equal to
those of the uninterrupted run, byte for byte. Its metrics and scores must be equal too, except for
times and memory. The exit code is 1 if anything differs or a run could not be resumed.
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "faults"))

from lives import Life, begin, warm_up

QUICKSTART = HERE.parents[1] / "examples" / "quickstart.yaml"
BASE = {
    "model.load_in_4bit": False,
    "data.num_prompts": 48,
    "data.held_out": 0,
    "trainer.max_steps": 8,
    "trainer.per_device_train_batch_size": 8,
    "trainer.num_generations": 4,
    "trainer.beta": 0.0,
    "trainer.save_steps": 2,
}
REWARD = '''\
import asyncio, random

import numpy
import torch


async def lucky(completions, answer, **_):
    """1 for the answer, and a little luck from every generator of random numbers."""
    await asyncio.sleep(0.005)
    texts = [c[-1]["content"] for c in completions]
    draw = lambda: 0.1 * (random.random() + numpy.random.random() + torch.rand(()).item())
    return [float(t.endswith(str(a))) + draw() for t, a in zip(texts, answer)]
'''
GAME = '''\
import pathlib, time

TURN = pathlib.Path(__file__).with_name("turn")


class Game:
    """Adds, slowly; the file "turn" is there from the first call of a batch to its rewards."""

    def reset(self, answer, **row):
        self.answer = answer
        self.calls = 0

    def calculator(self, expression: str) -> str:
        """Compute.

        Args:
            expression: What.
        """
        TURN.touch()
        time.sleep(0.1)
        self.calls += 1
        return self.answer if self.calls == 1 else "no more"

    def get_reward(self):
        TURN.unlink(missing_ok=True)
        return -0.1 * self.calls
'''
SETTINGS: dict[str, tuple[str, dict[str, object]]] = {
    "quickstart": (
        "4-bit model, KL penalty against the reference, a checkpoint every step",
        {"model.load_in_4bit": True, "trainer.beta": 0.02, "trainer.save_steps": 1},
    ),
    "straddling": (
        "generation batches that straddle optimizer steps (3 slices a step, 4 a batch)",
        {
            "trainer.per_device_train_batch_size": 4,
            "trainer.gradient_accumulation_steps": 3,
            "trainer.steps_per_generation": 4,
            "trainer.save_steps": 1,
            "trainer.max_steps": 6,
        },
    ),
    "drawn_again": (
        "dynamic sampling, moving reward normalisation, a watch on groups without signal",
        {
            "trainer.dynamic_sampling": True,
            "trainer.normalize_reward": "moving",
            "data.num_prompts": 12,
            "trainer.max_steps": 6,
            "trainer.save_steps": 1,
        },
    ),
    "epochs": (
        "four epochs over six prompts, two slices a step, in place of a number of steps",
        {
            "data.num_prompts": 6,
            "trainer.max_steps": -1,
            "trainer.num_train_epochs": 4,
            "trainer.per_device_train_batch_size": 4,
            "trainer.gradient_accumulation_steps": 2,
            "trainer.shuffle_dataset": True,
        },
    ),
    "schedules": (
        "cosine learning rate with warm-up, weights that change, an async reward with luck in it",
        {
            "trainer.lr_scheduler_type": "cosine",
            "trainer.warmup_steps": 3,
            "rewards": [
                {"name": "reward.py:lucky", "weight": {0: 1.0, 0.5: 0.5}},
                {"name": "thinking", "weight": {0: 0.0, 1.0: 0.2}},
            ],
        },
    ),
    "held_out": (
        "held-out prompts scored every second step, completions cut off and masked",
        {
            "data.held_out": 8,
            "data.held_out_every": 2,
            "trainer.max_completion_length": 29,
            "trainer.mask_truncated_completions": True,
            "trainer.missing_eos_penalty": 0.5,
            "trainer.save_steps": 3,
            "trainer.max_steps": 7,
        },
    ),
    "tools": (
        "an environment whose calls take a while, over several turns",
        {
            "model.name": "tiny-caller",
            "model.max_seq_length": 512,
            "data.prompts": "sums",
            "environment": "game.py:Game",
            "rewards": ["accuracy"],
            "trainer.max_completion_length": 96,
            "trainer.learning_rate": 1e-3,
            "trainer.per_device_train_batch_size": 16,
            "trainer.save_steps": 1,
        },
    ),
}
"""Name -> (description, changes of the quickstart's run file after those of BASE)."""
TIMES = (
    "time",
    "step_time",
    "eps",
    "speed/",
    "memory/",
    "tools/seconds",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
)
"""Beginnings of the names of metrics that differ between any two runs."""
MOST_KILLS = 8
"""Number of kills after which a run may finish."""


def write_run_file(folder: Path, overrides: dict[str, object]) -> Path:
    """Write RUN.yaml and the files that it names; the folder of its run is FOLDER/run."""
    content = yaml.safe_load(QUICKSTART.read_text())
    for key, value in {**BASE, **overrides, "output_dir": str(folder / "run")}.items():
        section, _, name = key.partition(".")
        if name:
            content.setdefault(section, {})[name] = value
        else:
            content[section] = value
    folder.mkdir(parents=True)
    (folder / "reward.py").write_text(REWARD)
    (folder / "game.py").write_text(GAME)
    (folder / "RUN.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder / "RUN.yaml"


# --- comparing -----------------------------------------------------------------------------------


def differences(reference: Path, run: Path) -> list[str]:
    """Return a text for each difference between a finished run and the uninterrupted one."""
    found = []
    for name in ("adapter/adapter_model.safetensors", "completions.jsonl"):
        mine = _bytes(run / name)
        wanted = _bytes(reference / name)
        if mine != wanted:
            found.append(f"{name}: {len(mine)} bytes for {len(wanted)}")
    pairs = zip_longest(metrics(run), metrics(reference))
    found += [f"metrics.jsonl: {mine} for {wanted}" for mine, wanted in pairs if mine != wanted][:1]
    found += [
        f"{name} differs"
        for name in ("evaluation.json", "end.json")
        if _without_times(run / name) != _without_times(reference / name)
    ]
    return found


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def metrics(run: Path) -> list[dict[str, object]]:
    """Return the rows of metrics.jsonl without what differs between any two runs."""
    lines = _bytes(run / "metrics.jsonl").decode().splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        {k: v for k, v in row.items() if not k.startswith(TIMES) and not k.endswith("_seconds")}
        for row in rows
    ]


def _without_times(path: Path) -> object:
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    return {k: v for k, v in content.items() if k not in ("time", "seconds", "resumed_at")}


# --- killing -------------------------------------------------------------------------------------


@dataclass
class Count:
    """Results of one setting."""

    setting: str
    what: str
    runs: int = 0
    kills: int = 0
    while_loading: int = 0
    while_writing: int = 0
    """Kills while a checkpoint was half written."""
    while_ending: int = 0
    """Kills after the adapter was written."""
    while_in_turns: int = 0
    """Kills after some trajectories of a batch had called a tool."""
    resumed_from: list[int] = field(default_factory=list)
    """Steps from which runs were resumed; 0: from the start."""
    lost: int = 0
    """Runs that could not be resumed."""
    different: list[str] = field(default_factory=list)


@dataclass
class Reference:
    """An uninterrupted run."""

    folder: Path
    steps: int
    seconds: float


def run_reference(folder: Path, overrides: dict[str, object]) -> Reference:
    """Train without interruption; raise RuntimeError if that fails."""
    life = begin(["train", write_run_file(folder, overrides)], folder / "output.txt")
    if life.finish(300):
        raise RuntimeError(f"the uninterrupted run failed:\n{life.text}")
    steps = json.loads((folder / "run" / "end.json").read_text())["steps"]
    return Reference(folder / "run", steps, life.seconds)


def newest_checkpoint(run: Path) -> int:
    """Return the step of the newest complete checkpoint, or 0 if there is none."""
    steps = [
        int(folder.name.removeprefix("checkpoint-"))
        for folder in run.glob("checkpoint-*")
        if folder.name.removeprefix("checkpoint-").isdigit()
    ]
    return max(steps, default=0)


def checkpoint_parts(run: Path) -> set[str]:
    """Return the names of all checkpoints of a run, complete or not."""
    try:
        return {name for name in os.listdir(run) if "checkpoint" in name}
    except FileNotFoundError:
        return set()


def kill_somewhere(
    life: Life, run: Path, expected: float, chance: random.Random, in_turns: bool
) -> bool:
    """Kill a training at a random moment; return False if it had ended before.

    Half of the moments are spread over the whole training. The other half are shortly after the
    write of a checkpoint began, most of them within milliseconds. With ``in_turns``, most moments
    are shortly after the first call of a batch.
    """
    if in_turns and chance.random() < 0.85:
        if not has_turn(life, run.parent / "turn", chance):
            return False
    elif chance.random() < 0.5:
        if life.wait(chance.uniform(0, expected)):
            return False
    else:
        for _ in range(chance.randint(1, 3)):
            before = checkpoint_parts(run)
            if not life.wait_for(lambda before=before: checkpoint_parts(run) - before, 60):
                return False
        if life.wait(10 ** chance.uniform(-4, -0.5)):
            return False
    life.kill()
    return True


def has_turn(life: Life, turn: Path, chance: random.Random) -> bool:
    """Wait until a training is in the turns of a batch; return False if it ends before."""
    turn.unlink(missing_ok=True)
    return all(
        life.wait_for(lambda: not turn.exists(), 60) and life.wait_for(turn.exists, 60)
        for _ in range(chance.randint(1, 3))
    ) and not life.wait(chance.uniform(0, 0.3))


def note_kill(count: Count, life: Life, run: Path) -> None:
    """Count a kill, and the phase of the training in which it happened."""
    count.kills += 1
    if any(name.startswith(".") for name in checkpoint_parts(run)):
        count.while_writing += 1
    elif (run / "adapter").exists():
        count.while_ending += 1
    elif (run.parent / "turn").exists():
        count.while_in_turns += 1
    elif not re.search(r"^step +\d+/", life.text, re.MULTILINE):
        count.while_loading += 1


def kill_until_finished(
    folder: Path,
    overrides: dict[str, object],
    reference: Reference,
    chance: random.Random,
    count: Count,
) -> None:
    """Train, kill and resume until the run is finished; add the results to ``count``.

    The folder of a run without differences is removed.
    """
    count.runs += 1
    kills = 0
    file = write_run_file(folder, overrides)
    run = folder / "run"
    while True:
        step = newest_checkpoint(run)
        if kills:
            count.resumed_from.append(step)
        source = run if (run / "run.yaml").exists() and chance.random() < 0.5 else file
        resume = ["--resume"] if kills else []
        life = begin(["train", source, *resume], folder / f"output-{kills}.txt")
        left = reference.seconds * (1 - step / reference.steps)
        if kills == MOST_KILLS or not kill_somewhere(
            life, run, left + 0.5, chance, "environment" in overrides
        ):
            break
        note_kill(count, life, run)
        kills += 1
    if life.finish(300):
        count.lost += 1
        last = " | ".join(life.text.strip().splitlines()[-3:])
        faults = [f"{folder}: code {life.code}: {last}"]
    else:
        faults = [f"{folder}: {one}" for one in differences(reference.folder, run)]
    print(f"{count.setting}: killed {kills} times: {faults or 'the same, bit for bit'}", flush=True)
    count.different += faults
    if not faults:
        shutil.rmtree(folder)


def kill_and_resume(
    work: Path, kills: int, names: list[str], seed: int, rows: Path | None = None
) -> list[Count]:
    """Kill at least ``kills`` times, one setting after the other; return a row for each setting.

    ``rows`` is a folder for kills.json.
    """
    warm_up()
    counts = {name: Count(name, SETTINGS[name][0]) for name in names}
    references: dict[str, Reference] = {}
    number = 0
    while sum(count.kills for count in counts.values()) < kills:
        name = names[number % len(names)]
        number += 1
        overrides = SETTINGS[name][1]
        if name not in references:
            references[name] = run_reference(work / name, overrides)
            print(f"{name}: uninterrupted in {references[name].seconds:.1f} s", flush=True)
        chance = random.Random(f"{seed} {number}")
        folder = work / f"{name}-{number}"
        kill_until_finished(folder, overrides, references[name], chance, counts[name])
        if rows is not None:
            rows.mkdir(parents=True, exist_ok=True)
            content = json.dumps([asdict(count) for count in counts.values()], indent=1)
            (rows / "kills.json").write_text(content + "\n")
    return list(counts.values())


def main() -> int:
    """Kill, resume, compare, print."""
    parser = argparse.ArgumentParser(description="Kill trainings, resume them, compare them.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rows", type=Path, help="folder for kills.json, which a page shows")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="rloo-kit-kills-"))
    counts = kill_and_resume(work, args.kills, args.settings, args.seed, args.rows)
    print(f"{sum(count.kills for count in counts)} kills")
    faults = [text for count in counts for text in count.different]
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return 1
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
