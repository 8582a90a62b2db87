"""The ``rloo-kit`` command: parser, commands, exit codes.

Exit codes: 0 done; 1 training cannot start here (doctor), a run did not learn (doctor RUN), cannot
learn (rewards check) or does not fit (plan); 2 the input is wrong, with one sentence that says what
to change; 130 ended by Ctrl-C; 143 ended by SIGTERM.
"""

import argparse
import io
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rloo_kit import __version__
from rloo_kit.checkpoints.stopping import Terminated, exit_code, terminate_as_interrupt
from rloo_kit.errors import ConfigError, KitError, ProcessEndedError
from rloo_kit.machine.processes import is_first
from rloo_kit.text.redaction import (
    redact,
    redacted_logs,
    redacting,
    remember_arguments,
)
from rloo_kit.text.wording import did_you_mean

# Seconds in which a launcher ends the other processes after the first one failed
LAUNCHER_SECONDS = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Secrets are masked in messages, logs, warnings and the traceback of an unexpected error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    remember_arguments(words)
    if isinstance(sys.stdout, io.TextIOWrapper):  # show a ? for what it cannot encode
        sys.stdout.reconfigure(errors="replace")
    with redacted_logs():
        return _run(words or ["--help"])


def _run(words: list[str]) -> int:
    options = vars(PARSER.parse_args(words))
    call = options.pop("call")
    try:
        with terminate_as_interrupt(), warnings.catch_warnings():
            # catch_warnings puts it back
            warnings.showwarning = _show_warning
            code = call(**options) or 0
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # `rloo-kit ... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KitError as exc:
        if not (is_first() or isinstance(exc, ProcessEndedError)):
            # the launcher ends this process if the first one fails, too
            time.sleep(LAUNCHER_SECONDS)
        print(f"rloo-kit: {redact(str(exc))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as exc:
        if is_first():
            print("rloo-kit: interrupted", file=sys.stderr)
        return exit_code(exc)
    except Exception:
        print(redact(traceback.format_exc()), file=sys.stderr, end="")
        return 1


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, *_: object
) -> None:
    if not is_first():
        return
    of_the_kit = issubclass(category, RuntimeWarning) and "rloo_kit" in filename
    if of_the_kit or issubclass(category, FutureWarning | UserWarning):
        print(f"note: {redact(str(message))}", file=sys.stderr)


# --- the parser ----------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser that names the nearest command for an unknown one."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with 2."""
        found = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = did_you_mean(found[1], re.findall(r"[\w-]+", found[2])) if found else ""
        super().error(message + hint)


# Adds one argument or option to the parser of a command
Argument = Callable[[argparse.ArgumentParser], object]
PARSER = _Parser(
    prog="rloo-kit",
    description="RLOO fine-tuning of thinking models on one GPU. First step: rloo-kit quickstart.",
)
PARSER.add_argument("--version", action="version", version=f"rloo-kit {__version__}")
# First word of a command with verbs -> its verbs; "": the commands themselves
VERBS = {"": PARSER.add_subparsers(required=True, metavar="COMMAND")}


def _group(name: str, text: str) -> None:
    """Add a command with verbs."""
    group = VERBS[""].add_parser(name, help=text)
    VERBS[name] = group.add_subparsers(required=True, metavar="VERB")


def _command(words: str, text: str, *arguments: Argument) -> Callable[..., Any]:
    """Return a decorator that makes a function a command.

    The command calls it with its arguments by name. The function returns the exit code, None for 0.
    """
    group, _, name = words.rpartition(" ")
    command = VERBS[group].add_parser(name, help=text, description=text)
    for add_to in arguments:
        add_to(command)

    def register(call: Callable[..., int | None]) -> Callable[..., int | None]:
        command.set_defaults(call=call)
        return call

    return register


def _argument(name: str, text: str | None = None, **how: Any) -> Argument:
    """Return an argument of a command; ``how`` is for ``ArgumentParser.add_argument``."""
    return lambda command: command.add_argument(name, help=text, **how)


def _set(dest: str, text: str) -> Argument:
    return _argument(
        "--set",
        f"{text} (may be repeated)",
        action="append",
        default=[],
        dest=dest,
        metavar="KEY=VALUE",
    )


SET = _set("overrides", "override a setting, for example trainer.beta=0.1")
RUN_FILE = _argument("source", "a run file, or the folder of a run", metavar="RUN.yaml")
MODEL = _argument("model", "a run, a checkpoint, an adapter or a model", metavar="RUN")
RESUME = _argument(
    "--resume",
    "resume the newest run of output_dir, or the run in this folder, from its newest complete "
    "checkpoint; start a run if there is none",
    action="store_true",
)
# Options of eval and judge
ASKED = (
    _argument(
        "--prompts", "a file, task or dataset (default: the held-out prompts)", metavar="SOURCE"
    ),
    _argument("--num-prompts", "use at most N prompts", type=int, metavar="N"),
    _argument("--batch-size", "sample B completions at a time", type=int, metavar="B"),
    SET,
    _argument(
        "--vllm",
        "sample with vLLM (the default on a GPU, if it can run)",
        action="append_const",
        dest="overrides",
        const="trainer.generation=vllm",
    ),
    _argument("--output", "write the result to DIR instead of the run's folder", metavar="DIR"),
)


# --- the commands --------------------------------------------------------------------------------


@_command(
    "quickstart",
    "train the small model that comes with the kit; it takes about a minute on a CPU",
    RESUME,
    SET,
)
def _quickstart(**options: Any) -> int:
    return _train("quickstart", **options)


@_command("train", "train a model with the settings of a run file", RUN_FILE, RESUME, SET)
def _train(source: str, **options: Any) -> int:
    from rloo_kit.runs.train import train

    result = train(source, **options)
    if result.interrupted:
        return exit_code(Terminated() if result.terminated else KeyboardInterrupt())
    return 0


@_command(
    "doctor",
    "check this machine, or diagnose a run",
    _argument("run", "the folder of a run (default: check this machine)", nargs="?", metavar="RUN"),
)
def _doctor(run: str | None) -> int:
    if run is not None:
        from rloo_kit.diagnosis.run_rules import diagnose

        return int(any(finding.level == "error" for finding in diagnose(run)))
    from rloo_kit.diagnosis.installation import examine

    lines, can_train = examine()
    print("\n".join(lines))
    return 0 if can_train else 1


@_command(
    "plan",
    "estimate the memory of a run on a card, part by part, and suggest changes until it fits",
    _argument(
        "source",
        "a run file, the folder of a run, or a model's name or folder (default: list the models "
        "that fit the card)",
        nargs="?",
        metavar="RUN.yaml",
    ),
    _argument(
        "--gpu",
        "the card's memory (12GB) or name (RTX 4070) (default: this machine's)",
        default="this",
        metavar="GPU",
    ),
    _argument(
        "--cards",
        "the number of such cards; above 1, also show which ways to train on several of them fit",
        default=1,
        type=int,
        metavar="N",
    ),
    SET,
)
def _plan(source: str | None, gpu: str, cards: int, overrides: list[str]) -> int:
    from rloo_kit.job import read_config
    from rloo_kit.planning.card_fits import TYPICAL, describe_fits, is_model
    from rloo_kit.planning.planner import find_room, make_plan

    if source is None:
        if overrides or cards > 1:
            raise ConfigError("--set and --cards need a run file: rloo-kit plan RUN.yaml ...")
        print(describe_fits(find_room(gpu)[0]))
        return 0
    if is_model(source):
        print(f"with the settings of {TYPICAL}; --set changes them")
        overrides = [f"model.name={source}", *overrides]
        source = TYPICAL
    config, base = read_config(source, overrides)
    plan = make_plan(config, gpu, base=base, cards=cards)
    print(plan)
    return 0 if plan.fits or (cards > 1 and plan.fitting_ways(cards)) else 1


@_command(
    "calibrate",
    "sample every level of a task, and write a run file with the level that the model solves "
    "sometimes",
    RUN_FILE,
    _argument(
        "--num-prompts", "prompts of each level (default: 32)", type=int, default=32, metavar="N"
    ),
    _argument(
        "--num-generations",
        "completions of each prompt (default: as in the run file)",
        type=int,
        metavar="G",
    ),
    _argument(
        "--output",
        "the new run file (default: RUN-calibrated.yaml; nothing is overwritten)",
        metavar="FILE.yaml",
    ),
    _argument(
        "--precision",
        "also compare bfloat16 with float16, and write the one in which sampler and trainer agree "
        "better to the new run file",
        action="store_true",
    ),
    SET,
)
def _calibrate(**options: Any) -> None:
    from rloo_kit.runs.calibrate import calibrate

    calibrate(**options)


@_command(
    "warm-up",
    "train on examples before a run, which then continues the adapter",
    RUN_FILE,
    _argument(
        "--examples",
        "a file whose rows have prompt and completion, or messages; or the folder of a run, to use "
        "its best completions",
        required=True,
        metavar="FILE",
    ),
    _argument(
        "--steps",
        "number of steps, of 4 examples each (default: by --epochs)",
        type=int,
        metavar="N",
    ),
    _argument("--epochs", "passes over the examples (default: 2)", type=float, metavar="N"),
    _argument(
        "--learning-rate",
        "peak learning rate (default: 2e-4)",
        type=float,
        default=2e-4,
        metavar="LR",
    ),
    _argument(
        "--output",
        "the new folder (default: OUTPUT_DIR-warm-up; nothing is overwritten)",
        metavar="DIR",
    ),
    SET,
)
def _warm_up(**options: Any) -> None:
    from rloo_kit.runs.warm_up import warm_up

    warm_up(**options)


@_command(
    "report",
    "write a page about what a run did, why, and what to change, or a page that compares runs",
    _argument("runs", "the folder of a run", nargs="+", metavar="RUN"),
    _argument(
        "--output",
        "the new page (default: report.html in the run's folder; comparison.html for several runs)",
        metavar="FILE.html",
    ),
)
def _report(runs: list[str], output: str | None) -> None:
    from rloo_kit.report.page import write_report

    print(write_report(runs, output, say=print))


@_command(
    "eval",
    "score models on the same held-out prompts: accuracy, pass@k and their intervals",
    _argument("models", "a run, a checkpoint, an adapter or a model", nargs="+", metavar="RUN"),
    _argument("--no-base", "leave the base model out", action="store_false", dest="base"),
    _argument(
        "--samples",
        "sampled completions of each prompt (default: 4); 0: only greedy ones",
        type=int,
        default=4,
        dest="num_samples",
        metavar="K",
    ),
    _argument("--no-greedy", "only sampled completions", action="store_false", dest="greedy"),
    *ASKED,
)
def _eval(**options: Any) -> None:
    from rloo_kit.evaluation.table import evaluate_models

    print(f"\n{evaluate_models(**options)}")


@_command(
    "judge",
    "measure how often a judge prefers a model's completions to those of another model",
    MODEL,
    _argument(
        "--against",
        "the model to compare with: base (default), or a run, a checkpoint, an adapter or a model",
        default="base",
        metavar="RUN",
    ),
    _argument(
        "--by",
        "the judge: a reward as in a run file, for example 'models/my-reward-model' or "
        "'{name: judge, model: NAME, mode: pairwise}' (default: the first held-out reward)",
        metavar="REWARD",
    ),
    _argument("--sampled", "sample at the run's temperature, not greedily", action="store_true"),
    *ASKED,
)
def _judge(**options: Any) -> None:
    from rloo_kit.evaluation.win_rate import judge_models

    print(f"\n{judge_models(**options)}")


@_command(
    "chat",
    "chat with a trained model in the terminal",
    MODEL,
    _argument("--base", "let the base model answer too", action="store_true"),
)
def _chat(model: str, base: bool) -> None:
    from rloo_kit.export.chat import chat

    chat(model, base=base)


@_command(
    "serve",
    "serve a trained model with vLLM's OpenAI-compatible server",
    MODEL,
    _argument(
        "more", "options of vLLM, such as --port 9000", nargs=argparse.REMAINDER, metavar="..."
    ),
)
def _serve(model: str, more: list[str]) -> None:
    from rloo_kit.export.serve import serve

    serve(model, [word for word in more if word != "--"])


@_command(
    "export",
    "export a trained model as adapter, merged weights or GGUF file, or upload it to the hub",
    _argument("run", "a run, a checkpoint, an adapter, or an export", metavar="RUN"),
    _argument(
        "--to", "adapter, merged, gguf, or hub (upload the adapter)", required=True, metavar="KIND"
    ),
    _argument(
        "--output", "the new folder (default: export-KIND next to the adapter)", metavar="DIR"
    ),
    _argument(
        "--dtype",
        "with --to gguf: bf16 (default), f16, q8_0, q5_k_m or q4_k_m; with --to merged: bf16 "
        "(default) or nf4",
        metavar="TYPE",
    ),
    _argument(
        "--base",
        "with --to merged or gguf: the 16-bit base to merge into (dequantized: the run's 4-bit "
        "base, written out in 16 bit); with --to adapter or hub: the name of the base to write "
        "into the adapter's config",
        metavar="NAME",
    ),
    _argument("--repo", "upload the export, of any kind, to this repository", metavar="OWNER/NAME"),
    _argument("--public", "make the repository public (default: private)", action="store_true"),
    _argument("--converter", "llama.cpp's folder, with convert_hf_to_gguf.py", metavar="DIR"),
    _argument(
        "--no-check",
        "do not load the export back to compare its answers",
        action="store_false",
        dest="check",
    ),
    _argument(
        "--prompts",
        "compare the answers to N prompts (default: 16)",
        type=int,
        default=16,
        dest="num_prompts",
        metavar="N",
    ),
)
def _export(**options: Any) -> None:
    from rloo_kit.export.exporter import export_model

    export_model(**options)


@_command(
    "hand-over",
    "write a folder from which verl trains with the settings of a run file on several cards",
    RUN_FILE,
    _argument("--to", "the trainer to write for (verl)", required=True, metavar="TRAINER"),
    _argument("--output", "the new folder", required=True, metavar="DIR"),
    SET,
)
def _hand_over(**options: Any) -> None:
    from rloo_kit.export.hand_over import hand_over

    hand_over(**options)


@_command(
    "legacy",
    "print the run file for a command line of rloo.py in TRL before 0.22",
    _argument(
        "words", "the older command line, written after --", nargs=argparse.REMAINDER, metavar="..."
    ),
)
def _legacy(words: list[str]) -> None:
    from rloo_kit.config.legacy import legacy_run_file

    redacting(print)(legacy_run_file([word for word in words if word != "--"]))


_group("rewards", "list, show and check rewards")


@_command("rewards list", "list every reward that has a short name")
def _rewards_list() -> None:
    from rloo_kit.scoring.catalogue import describe_rewards

    for entry in describe_rewards():
        print(f"{entry.name:<21} {entry.summary}")


@_command(
    "rewards show",
    "show what a reward pays for, its parameters and an example",
    _argument("name", "the name of the reward", metavar="NAME"),
)
def _rewards_show(name: str) -> None:
    from rloo_kit.scoring.catalogue import describe_reward, entry_text

    print(entry_text(describe_reward(name)))


@_command(
    "rewards check",
    "call the rewards of a run file on the model's own completions, before any training",
    _argument("source", "a run file", metavar="RUN.yaml"),
    _argument(
        "--completions",
        "score the completions in this file; no model is loaded",
        metavar="FILE.jsonl",
    ),
    _argument(
        "--prompts",
        "sample completions of N prompts (default: 16)",
        type=int,
        default=16,
        dest="num_prompts",
        metavar="N",
    ),
    _argument(
        "--generations",
        "completions of each prompt (default: as in the run file)",
        type=int,
        dest="num_generations",
        metavar="G",
    ),
    _argument("--output-dir", "write the findings and the completions to DIR", metavar="DIR"),
    SET,
)
def _rewards_check(**options: Any) -> int:
    from rloo_kit.reward_lab.lab import check_rewards

    return 1 if check_rewards(**options, say=redacting(print)).has_errors else 0


_group("reward-model", "train a reward model")


@_command(
    "reward-model train",
    "train a reward model on pairs of a better and a worse text",
    _argument("pairs", "a file whose rows have prompt, chosen, rejected", metavar="PAIRS.jsonl"),
    _argument(
        "--model",
        "the base: a folder or a hub name (default: tiny-thinker)",
        default="tiny-thinker",
    ),
    _argument(
        "--output-dir",
        "the new folder (default: runs/reward-model)",
        default="runs/reward-model",
        metavar="DIR",
    ),
    _set(
        "settings",
        "set an argument of train_reward_model or a field of TRL's RewardConfig, for example "
        "max_steps=100 or load_in_4bit=false",
    ),
)
def _reward_model_train(pairs: str, settings: list[str], **options: Any) -> None:
    from rloo_kit.config.run_file import read_overrides
    from rloo_kit.reward_lab.reward_model import train_reward_model

    options |= read_overrides(settings)
    for name in {"pairs", "say"} & set(options):
        raise ConfigError(f"--set {name!r} is not a setting of a reward model: leave it out")
    train_reward_model(pairs, **options)
