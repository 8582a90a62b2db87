"""Train with two versions of the code and compare the adapters, bit for bit.

    python tests/scripts/same_adapters.py COMMIT [--variants NAME ...]

Each variant trains five steps of the quickstart with the code at COMMIT and with the code of this
folder. A run of COMMIT that stopped after a checkpoint is also resumed by the code of this folder,
and must end with the adapter of the whole run. The exit code is 1 if any adapter differs.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALLED_AS = ("rewards", "examples", "requirements")  # folders that are packages of rloo_kit
BASE = {
    "data.held_out": 0,
    "trainer.max_steps": 5,
    "trainer.save_steps": 3,
    "trainer.per_device_train_batch_size": 32,
}
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "slices": {"trainer.steps_per_generation": 4, "trainer.num_iterations": 2},
    "token_kl": {
        "trainer.token_level_kl": True,
        "trainer.kl_estimator": "k3",
        "trainer.normalize_advantages": True,
    },
    "many_rollouts": {
        "trainer.gradient_accumulation_steps": 4,
        "trainer.steps_per_generation": 2,
    },
    "normalized": {
        "trainer.beta": 0,
        "trainer.normalize_reward": "moving",
        "trainer.missing_eos_penalty": 0.5,
        "trainer.combine": "normalize_then_sum",
    },
    "resampled": {"trainer.dynamic_sampling": True, "trainer.tokens_per_micro_batch": 512},
    "masked": {
        "trainer.mask_truncated_completions": True,
        "trainer.normalize_reward": "batch",
        "trainer.reward_clip_range": "[-1.0,1.0]",
    },
}


def checked_out(commit: str, folder: Path) -> Path:
    """Write the code of a commit to a folder, laid out as it is installed."""
    folder.mkdir()
    archive = folder / "code.tar"
    subprocess.run(["git", "archive", "-o", archive, commit], cwd=ROOT, check=True)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    for name in INSTALLED_AS:
        (folder / "rloo_kit" / name).symlink_to(folder / name)
    return folder


def train(code: Path, run: Path, settings: dict[str, object], *more: str) -> None:
    """Train the quickstart in a process that imports ``rloo_kit`` from the folder ``code``."""
    given = {**BASE, **settings, "output_dir": run}
    options = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    subprocess.run(
        [sys.executable, "-m", "rloo_kit", "train", "quickstart", *options, *more],
        cwd=code, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def digest(run: Path) -> str:
    """Return the hash of a run's adapter."""
    return hashlib.sha256((run / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def cut_off(whole: Path, run: Path) -> Path:
    """Return a copy of a run as a kill after its first checkpoint leaves it."""
    shutil.copytree(whole, run)
    shutil.rmtree(run / "adapter")
    shutil.rmtree(run / "checkpoint-5")
    (run / "end.json").unlink()
    settings = run / "run.yaml"
    settings.write_text(settings.read_text().replace(str(whole), str(run)))
    return run


def main() -> int:
    """Compare all variants; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("--variants", nargs="*", default=[*VARIANTS], choices=[*VARIANTS])
    options = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = checked_out(options.commit, folder / "before")
        for variant in options.variants:
            runs = {one: folder / f"{variant}-{one}" for one in ("before", "after", "resumed")}
            train(before, runs["before"], VARIANTS[variant])
            train(ROOT, runs["after"], VARIANTS[variant])
            cut_off(runs["before"], runs["resumed"])
            train(ROOT, runs["resumed"], VARIANTS[variant], "--resume")
            wanted = digest(runs["before"])
            for one in ("after", "resumed"):
                same = digest(runs[one]) == wanted
                different += not same
                print(f"{variant}: {one} {'same' if same else 'DIFFERENT'}", flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
