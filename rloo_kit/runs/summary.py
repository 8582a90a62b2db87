"""The result of a run, and the lines that a run prints before and after training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_kit.checkpoints.store import list_steps
from rloo_kit.config.engine_settings import requested_engine
from rloo_kit.diagnosis.record import read_run
from rloo_kit.diagnosis.run_rules import find_in_run, verdict
from rloo_kit.evaluation.evaluator import Evaluation
from rloo_kit.job import PreparedJob
from rloo_kit.machine.cleanup import Released
from rloo_kit.machine.hardware import GIB, why_not_vllm
from rloo_kit.machine.processes import num_processes
from rloo_kit.models.adapters import EMBEDDED
from rloo_kit.models.notes import notes_of
from rloo_kit.runs.folder import command_after_stop
from rloo_kit.text.wording import resume_command, shell_path, text_of
from rloo_kit.types import Say

# Number of held-out prompts whose completions before and after training are printed
SAMPLES_SHOWN = 2
# Model, prompts and rewards of the quickstart; after it a line says how to train a model
QUICKSTART = ("tiny-thinker", "arithmetic", ["accuracy"])


@dataclass(frozen=True)
class RunResult:
    """Result of a run."""

    folder: Path
    before: Evaluation | None  # held-out scores before training; None if there are none
    after: Evaluation | None  # held-out scores after training; None if there are none
    steps: int
    seconds: float  # duration of the training alone, since the start or the last resume
    interrupted: bool = False  # True after Ctrl-C, SIGTERM or SIGHUP
    terminated: bool = False  # True after SIGTERM or SIGHUP
    released: Released | None = None  # the memory that was released at the end

    @property
    def adapter(self) -> Path:
        """The folder of the trained adapter."""
        return self.folder / "adapter"


def announce_load(job: PreparedJob) -> None:
    """Print which model is loaded, and what will take minutes at the start.

    Nothing is printed for an embedded model on a CPU, which loads at once.
    """
    name = job.model_name
    text = f"loading {name}"
    on_gpu = job.environment.hardware.on_gpu
    if on_gpu and requested_engine(job.args) in ("auto", "vllm") and why_not_vllm() is None:
        text += "; vLLM compiles at its first start, which takes minutes"
    if on_gpu and job.environment.backend == "unsloth":
        text += "; Unsloth compiles in the first step, which takes a minute or two"
    if on_gpu or name not in EMBEDDED:
        job.say(text)


def introduce(job: PreparedJob) -> None:
    """Print the model and the device.

    Also print, if it applies, why ``model.backend: auto`` did not choose Unsloth, why TRL's
    training step is used, and how to train on all cards of the machine.
    """
    config = job.config
    environment = job.environment
    say = job.say
    bits = "4-bit NF4" if config.model.load_in_4bit else "16-bit"
    hardware = environment.hardware
    say(
        f"{job.model_name}, {bits}, LoRA r={config.lora.r}, {notes_of(job.policy[0]).backend} "
        f"on {hardware.name} ({hardware.total_memory / GIB:.0f} GiB)"
    )
    if environment.why_not_unsloth and config.model.backend == "auto":
        say(f"without Unsloth: {environment.why_not_unsloth}")
    if job.step.by_trl:
        by_vllm = job.args.use_vllm or job.args.generation in ("vllm", "server")
        say(f"{job.step}{'; trainer.canary does not check its vLLM' if by_vllm else ''}")
    if hardware.num_devices > 1 and num_processes() == 1:
        say(
            f"only one of {hardware.num_devices} cards is used: to use all of them, start the run "
            f"with torchrun --nproc-per-node {hardware.num_devices} -m rloo_kit train RUN.yaml"
        )


def means(evaluation: Evaluation) -> str:
    """Return a line with the mean of each reward.

    It also says how many held-out prompts were scored, and how their completions were sampled.
    """
    parts = [
        f"{name} {'none' if value is None else f'{value:.3f}'}"
        for name, value in evaluation.rewards.items()
    ]
    return f"{', '.join(parts)} on {evaluation.num_prompts} held-out prompts, {evaluation.drawn}"


def compare(say: Say, before: Evaluation | None, after: Evaluation | None) -> None:
    """Print the scores after training, and the completions whose scores have risen the most.

    Nothing is printed if there are no scores after training.
    """
    if after is None:
        return
    say(f"after:  {means(after)}")
    if before is None:
        return
    pairs = zip(before.samples, after.samples, strict=True)
    risen = [(old, new) for old, new in pairs if _total(new) > _total(old)]
    risen.sort(key=lambda pair: _total(pair[0]) - _total(pair[1]))
    for old, new in risen[:SAMPLES_SHOWN]:
        say(f"\n  {_one_line(text_of(old['prompt']))}")
        say(f"    before: {_one_line(old['completion'])}")
        say(f"    after:  {_one_line(new['completion'])}")


def _total(sample: dict[str, Any]) -> float:
    """Return the sum of the rewards of a sample."""
    return sum(value for value in sample["rewards"].values() if value is not None)


def _one_line(text: str) -> str:
    """Return the text on one line, cut to 160 characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= 160 else f"{flat[:157]}..."


def conclude(say: Say, result: RunResult) -> None:
    """Print the verdict on the run, its paths, the released memory, and a command to run next."""
    record = read_run(result.folder)
    say(f"\n{verdict(record, find_in_run(record))}")
    say(f"{result.steps} steps in {result.seconds:.0f} s; adapter in {result.adapter}")
    say(f"read {result.folder / 'report.html'} in a browser")
    say(str(result.released))
    config = record.config
    if command := command_after_stop(result.folder):
        say(f"train the kept weights further with {command}")
    elif record.end.get("how") != "finished" and list_steps(result.folder):
        say(f"resume with {resume_command(result.folder)}")
    elif config and (config.model.name, config.data.prompts, config.rewards) == QUICKSTART:
        say("next: rloo-kit rewards list, then copy examples/quickstart.yaml and train your model")
    else:
        run = shell_path(result.folder)
        say(f"next: rloo-kit chat {run} to try it, rloo-kit export {run} --to merged to use it")
