"""The command line of rloo-kit: the parser, the commands, and their exit codes.

The exit codes are:

- 0: the command succeeded;
- 1: training cannot start on this machine (doctor), the run did not learn (doctor RUN), the rewards
  do not let the model learn (rewards check), the run does not fit into memory (plan), or an
  unexpected error occurred, whose traceback is printed;
- 2: the input is wrong, or a run failed in a way that the kit knows; the error message says what to
  change;
- 130: Ctrl-C ended the command;
- 143: SIGTERM or SIGHUP (a closed terminal) ended the command.
"""

import argparse
import contextlib
import io
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import rloo_kit as rk
from rloo_kit.checkpoints.stopping import exit_code, silence, terminate_as_interrupt
from rloo_kit.errors import ConfigError, KitError, ProcessEndedError
from rloo_kit.machine.processes import is_first
from rloo_kit.text.redaction import redact, redacted_logs, redacting, remember_arguments
from rloo_kit.text.wording import did_you_mean

# Seconds that a process other than the first waits before it prints its error. If the first process
# failed too, the launcher ends this process in that time
LAUNCHER_SECONDS = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Secrets are masked in messages, logs, warnings and the traceback of an unexpected error.

    Args:
        argv: The words after ``rloo-kit``; None to use ``sys.argv[1:]``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    remember_arguments(words)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # write a ? for a character that cannot be encoded, and write each line at once, even to
        # a log file
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    with redacted_logs():
        return _run(words or ["--help"])


def _run(words: list[str]) -> int:
    """Run the command that the words name, print its error if any, and return its exit code."""
    options = vars(PARSER.parse_args(words))
    call = options.pop("call")
    try:
        with terminate_as_interrupt(), warnings.catch_warnings():
            warnings.showwarning = _show_warning  # until the end of catch_warnings
            return call(**options) or 0
    except BrokenPipeError:  # the reader of the output has ended, as in `rloo-kit ... | head`
        return 0
    except KitError as exc:
        if not (is_first() or isinstance(exc, ProcessEndedError)):
            # if the first process fails too, only it prints: the launcher then ends this process
            time.sleep(LAUNCHER_SECONDS)
        _complain(f"rloo-kit: {redact(str(exc))}")
        return 2
    except KeyboardInterrupt as exc:
        if is_first():
            _complain("rloo-kit: interrupted")
        return exit_code(exc)
    except Exception:
        _complain(redact(traceback.format_exc()).rstrip())
        return 1
    finally:
        for output in (sys.stdout, sys.stderr):
            try:
                output.flush()
            except OSError:  # at exit, Python would try to write again, and change the exit code
                silence(output.fileno())


def _complain(text: str) -> None:
    """Print a text to stderr; a terminal that is gone must not change the exit code."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, *_: object
) -> None:
    """Print a warning of the kit or a warning meant for users as a note; ignore all others."""
    of_the_kit = issubclass(category, RuntimeWarning) and "rloo_kit" in filename
    if is_first() and (of_the_kit or issubclass(category, FutureWarning | UserWarning)):
        _complain(f"note: {redact(str(message))}")


# --- the parser ----------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser that suggests the most similar command if the user gives an unknown one."""

    def error(self, message: str) -> NoReturn:
        """Print the message, with a suggestion if there is one, and exit with code 2."""
        found = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = did_you_mean(found[1], re.findall(r"[\w-]+", found[2])) if found else ""
        super().error(redact(message + hint))


# A function that adds one argument or option to the parser of a command
Argument = Callable[[argparse.ArgumentParser], object]
PARSER = _Parser(
    prog="rloo-kit",
    description="RLOO fine-tuning of thinking models on one GPU. First step: rloo-kit quickstart.",
)
PARSER.add_argument("--version", action="version", version=f"rloo-kit {rk.__version__}")
# argparse's subparsers, by the word before them: VERBS[""] parses the first word of a command, and
# VERBS["rewards"] parses the second word of commands such as `rewards list`
VERBS = {"": PARSER.add_subparsers(required=True, metavar="COMMAND")}


def _group(name: str, text: str) -> None:
    """Add the first word of commands with two words, such as ``rewards`` in ``rewards list``.

    Args:
        name: The first word.
        text: Its help text.
    """
    group = VERBS[""].add_parser(name, help=text)
    VERBS[name] = group.add_subparsers(required=True, metavar="VERB")


def _command(words: str, text: str, *arguments: Argument) -> Callable[..., Any]:
    """Return a decorator that makes a function a command.

    The function gets the arguments of the command as keyword arguments. It returns the exit code,
    or None for 0.

    Args:
        words: The command: one word, or two words whose first one ``_group`` has added.
        text: Help text of the command.
        *arguments: Arguments and options of the command.
    """
    group, _, name = words.rpartition(" ")
    command = VERBS[group].add_parser(name, help=text, description=text)
    for add_to in arguments:
        add_to(command)

    def register(call: Callable[..., Any]) -> Callable[..., Any]:
        command.set_defaults(call=call)
        return call

    return register


def _argument(name: str, text: str | None = None, **how: Any) -> Argument:
    """Return a function that adds an argument or option to the parser of a command.

    Args:
        name: Name of the argument, or of the option with its dashes.
        text: Help text.
        how: Other arguments of ``ArgumentParser.add_argument``.
    """
    return lambda command: command.add_argument(name, help=text, **how)


def _set(text: str) -> Argument:
    """Return the option ``--set KEY=VALUE``; the command receives its values as ``overrides``."""
    return _argument(
        "--set",
        f"{text} (may be repeated)",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
    )


SET = _set("override a setting, for example trainer.beta=0.1")
RUN_FILE = _argument("source", "a run file, or the folder of a run", metavar="RUN.yaml")
MODEL = _argument("model", "a run, a checkpoint, an adapter or a model", metavar="RUN")
RESUME = _argument(
    "--resume",
    "resume the given run (its folder, or the run.yaml in that folder); for any other run file, "
    "resume the newest run in output_dir, or start a new run if there is none; a run resumes from "
    "its newest complete checkpoint, or from step 0 if it has neither a checkpoint nor an adapter",
    action="store_true",
)
# Options that the commands eval and judge share
ASKED = (
    _argument(
        "--prompts",
        "a file, task or dataset with prompts (default: the held-out prompts of the run)",
        metavar="SOURCE",
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
    _argument("--output", "write the results to DIR instead of the run's folder", metavar="DIR"),
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
    result = rk.train(source, **options)
    return 143 if result.terminated else 130 if result.interrupted else 0


@_command(
    "doctor",
    "check this machine, or diagnose a run",
    _argument("run", "the folder of a run (default: check this machine)", nargs="?", metavar="RUN"),
)
def _doctor(run: str | None) -> int:
    if run is not None:
        return int(any(finding.level == "error" for finding in rk.diagnose(run)))
    from rloo_kit.diagnosis.installation import examine

    lines, can_train = examine()
    print("\n".join(lines))
    return int(not can_train)


@_command(
    "plan",
    "estimate how much memory each part of a run needs on a card, and suggest changes if it does "
    "not fit",
    _argument(
        "source",
        "a run file, the folder of a run, or the name or folder of a model (default: list models "
        "that fit the card)",
        nargs="?",
        metavar="RUN.yaml",
    ),
    _argument(
        "--gpu",
        "memory or name of the card, such as 12GB or 'RTX 4070' (default: the card of this "
        "machine)",
        default="this",
        metavar="GPU",
    ),
    _argument(
        "--cards",
        "number of such cards (default: 1); if it is above 1, also show which ways of training on "
        "several cards fit",
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
            raise ConfigError(
                "--set and --cards need a run file: add them to `rloo-kit plan RUN.yaml`"
            )
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
    "sample completions at every difficulty level of a task, and write a run file with the level "
    "that the model solves sometimes but not always",
    RUN_FILE,
    _argument(
        "--num-prompts", "prompts per level (default: 32)", type=int, default=32, metavar="N"
    ),
    _argument(
        "--num-generations",
        "completions per prompt (default: as in the run file)",
        type=int,
        metavar="G",
    ),
    _argument(
        "--output",
        "name of the new run file (default: RUN-calibrated.yaml; an existing file is not "
        "overwritten)",
        metavar="FILE.yaml",
    ),
    _argument(
        "--precision",
        "also measure how well sampler and trainer agree in bfloat16 and in float16, and set the "
        "better precision in the new run file",
        action="store_true",
    ),
    SET,
)
def _calibrate(**options: Any) -> None:
    rk.calibrate(**options)


@_command(
    "warm-up",
    "train an adapter on examples with TRL's SFTTrainer; a run can then train it further",
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
        "number of optimizer steps, each with 4 examples (default: --epochs decides)",
        type=int,
        metavar="N",
    ),
    _argument(
        "--epochs", "number of passes over the examples (default: 2)", type=float, metavar="N"
    ),
    _argument(
        "--learning-rate",
        "initial learning rate, which falls linearly to 0 (default: 2e-4)",
        type=float,
        default=2e-4,
        metavar="LR",
    ),
    _argument(
        "--output",
        "folder for the adapter (default: OUTPUT_DIR-warm-up; if it exists, a number is added)",
        metavar="DIR",
    ),
    SET,
)
def _warm_up(**options: Any) -> None:
    rk.warm_up(**options)


@_command(
    "report",
    "write an HTML page that shows what a run did, explains its problems, and says what to change; "
    "for several runs, a page that compares them",
    _argument("runs", "the folder of a run", nargs="+", metavar="RUN"),
    _argument(
        "--output",
        "file for the page (default: report.html in the run's folder; comparison.html for several "
        "runs)",
        metavar="FILE.html",
    ),
)
def _report(runs: list[str], output: str | None) -> None:
    print(rk.write_report(runs, output, say=print))


@_command(
    "eval",
    "score models on the same held-out prompts, and print accuracy and pass@k with their "
    "confidence intervals",
    _argument("models", "a run, a checkpoint, an adapter or a model", nargs="+", metavar="RUN"),
    _argument(
        "--no-base", "do not score the base model, only each RUN", action="store_false", dest="base"
    ),
    _argument(
        "--samples",
        "sampled completions per prompt (default: 4); 0: only a greedy completion",
        type=int,
        default=4,
        dest="num_samples",
        metavar="K",
    ),
    _argument("--no-greedy", "make no greedy completions", action="store_false", dest="greedy"),
    *ASKED,
)
def _eval(**options: Any) -> None:
    print(f"\n{rk.evaluate_models(**options)}")


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
    _argument(
        "--sampled",
        "sample completions at the run's temperature (default: greedy completions)",
        action="store_true",
    ),
    *ASKED,
)
def _judge(**options: Any) -> None:
    print(f"\n{rk.judge_models(**options)}")


@_command(
    "chat",
    "chat with a trained model in the terminal",
    MODEL,
    _argument("--base", "also show the answers of the base model", action="store_true"),
)
def _chat(**options: Any) -> None:
    from rloo_kit.export.chat import chat

    chat(**options)


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
    _argument("run", "a run, a checkpoint or an adapter", metavar="RUN"),
    _argument(
        "--to", "adapter, merged, gguf, or hub (upload the adapter)", required=True, metavar="KIND"
    ),
    _argument(
        "--output",
        "folder for the export (default: export-KIND next to the adapter)",
        metavar="DIR",
    ),
    _argument(
        "--dtype",
        "data type of the weights: bf16 (default), f16, q8_0, q5_k_m or q4_k_m with --to gguf; "
        "bf16 (default) or nf4 with --to merged",
        metavar="TYPE",
    ),
    _argument(
        "--base",
        "with --to merged or gguf: the 16-bit base model to merge the adapter into, or the word "
        "'dequantized' to use the run's 4-bit base model converted to 16 bit; with --to adapter or "
        "hub: the name of the base model that is written into the adapter's config",
        metavar="NAME",
    ),
    _argument(
        "--repo",
        "upload the export (of any KIND) to this repository on the hub",
        metavar="OWNER/NAME",
    ),
    _argument("--public", "make the repository public (default: private)", action="store_true"),
    _argument("--converter", "folder of llama.cpp, which has convert_hf_to_gguf.py", metavar="DIR"),
    _argument(
        "--no-check",
        "skip the check, which loads the export and compares its answers with those of the trained "
        "model",
        action="store_false",
        dest="check",
    ),
    _argument(
        "--prompts",
        "number of prompts whose answers are compared (default: 16)",
        type=int,
        default=16,
        dest="num_prompts",
        metavar="N",
    ),
)
def _export(**options: Any) -> None:
    rk.export_model(**options)


@_command(
    "hand-over",
    "write a folder with which verl, another trainer, repeats a run on several cards",
    RUN_FILE,
    _argument("--to", "name of the other trainer: verl", required=True, metavar="TRAINER"),
    _argument(
        "--output", "folder to write (a number is added if it exists)", required=True, metavar="DIR"
    ),
    SET,
)
def _hand_over(**options: Any) -> None:
    from rloo_kit.export.hand_over import hand_over

    hand_over(**options)


@_command(
    "legacy",
    "convert a command line of rloo.py (TRL before 0.22) to a run file, and print it",
    _argument(
        "words",
        "the command line of rloo.py, written after --",
        nargs=argparse.REMAINDER,
        metavar="...",
    ),
)
def _legacy(words: list[str]) -> None:
    from rloo_kit.config.legacy import legacy_run_file

    redacting(print)(legacy_run_file([word for word in words if word != "--"]))


_group("rewards", "list, show and check rewards")


@_command("rewards list", "list all built-in rewards with a summary of each")
def _rewards_list() -> None:
    from rloo_kit.scoring.catalogue import describe_rewards

    for entry in describe_rewards():
        print(f"{entry.name:<21} {entry.summary}")


@_command(
    "rewards show",
    "show what a reward measures, its parameters and an example",
    _argument("name", "the name of the reward", metavar="NAME"),
)
def _rewards_show(name: str) -> None:
    from rloo_kit.scoring.catalogue import describe_reward, entry_text

    print(entry_text(describe_reward(name)))


@_command(
    "rewards check",
    "test the rewards of a run file on completions of the untrained model, before a training",
    _argument("source", "a run file", metavar="RUN.yaml"),
    _argument(
        "--completions",
        "score the completions in this file instead of sampling some; no model is loaded",
        metavar="FILE.jsonl",
    ),
    _argument(
        "--prompts",
        "number of prompts to sample completions for (default: 16)",
        type=int,
        dest="num_prompts",
        metavar="N",
    ),
    _argument(
        "--generations",
        "completions per prompt (default: as in the run file)",
        type=int,
        dest="num_generations",
        metavar="G",
    ),
    _argument("--output-dir", "write the findings and the completions to DIR", metavar="DIR"),
    SET,
)
def _rewards_check(**options: Any) -> int:
    return int(rk.check_rewards(**options, say=redacting(print)).has_errors)


_group("reward-model", "train a reward model")


@_command(
    "reward-model train",
    "train a reward model on pairs of a better and a worse text",
    _argument("pairs", "a file whose rows have prompt, chosen and rejected", metavar="PAIRS.jsonl"),
    _argument(
        "--model",
        "the base model: a folder or a name on the hub (default: tiny-thinker, which comes with "
        "the kit)",
    ),
    _argument(
        "--output-dir",
        "folder for the reward model (default: runs/reward-model)",
        metavar="DIR",
    ),
    _set(
        "set an argument of train_reward_model or a field of TRL's RewardConfig, for example "
        "max_steps=100 or load_in_4bit=false",
    ),
)
def _reward_model_train(overrides: list[str], **options: Any) -> None:
    from rloo_kit.config.run_file import read_overrides

    given = read_overrides(overrides)
    if "say" in given:
        raise ConfigError("--set 'say' is not a setting of a reward model: leave it out")
    for name in given:
        if options.get(name) is not None:
            raise ConfigError(f"{name} is given twice: leave --set {name} out")
    options |= given | {"say": print}
    rk.train_reward_model(**{name: value for name, value in options.items() if value is not None})
