"""The ``rloo-kit`` command: parse, call, print, exit code.

Exit codes: 0 done; 1 training cannot start here (doctor); 2 the input is wrong, with one sentence
that says what to change; 130 ended by Ctrl-C.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence

from rloo_kit import __version__
from rloo_kit.errors import KitError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    warnings.showwarning = _show_warning
    try:
        return args.call(args)
    except KitError as exc:
        print(f"rloo-kit: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rloo-kit: interrupted before training began; nothing was written", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rloo-kit", description="RLOO fine-tuning of thinking models on one consumer GPU."
    )
    parser.add_argument("--version", action="version", version=f"rloo-kit {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text in (
        ("quickstart", "train the embedded model: a minute on a CPU"),
        ("train", "train as a run file says"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(call=_train, run_file="quickstart")
        if name == "train":
            command.add_argument("run_file", metavar="RUN.yaml")
        _add_set(command)
    doctor = commands.add_parser("doctor", help="what this machine can run, and what to mend")
    doctor.set_defaults(call=_doctor)
    rewards = commands.add_parser("rewards", help="the reward library")
    verbs = rewards.add_subparsers(required=True, metavar="VERB")
    verbs.add_parser("list", help="every reward with a short name, in one line").set_defaults(
        call=_rewards_list
    )
    show = verbs.add_parser("show", help="one reward: what it earns, its parameters, an example")
    show.add_argument("name", metavar="NAME")
    show.set_defaults(call=_rewards_show)
    return parser


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting, such as trainer.max_steps=100 (may be repeated)",
    )


def _train(args: argparse.Namespace) -> int:
    from rloo_kit.run import train

    result = train(args.run_file, args.set)
    return 130 if result.interrupted else 0


def _doctor(args: argparse.Namespace) -> int:
    from rloo_kit.diagnostics import examine

    report = examine()
    print("\n".join(report.lines))
    return 0 if report.can_train else 1


def _rewards_list(args: argparse.Namespace) -> int:
    from rloo_kit.reward_catalogue import describe_rewards

    for entry in describe_rewards():
        origin = "" if entry.origin == "built in" else f" ({entry.origin})"
        print(f"{entry.name:<21} {entry.summary}{origin}")
    return 0


def _rewards_show(args: argparse.Namespace) -> int:
    from rloo_kit.reward_catalogue import describe_reward, entry_text

    print(entry_text(describe_reward(args.name)))
    return 0


def _show_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
    if issubclass(category, FutureWarning | UserWarning):
        print(f"note: {message}", file=sys.stderr)
