"""The ``rloo-kit`` command: parse, call, print, exit code.

Exit codes: 0 done; 1 training cannot start here, a run did not learn (doctor), could not (rewards
check) or would not fit (plan); 2 the input is wrong, with one sentence that says what to change;
130 ended by Ctrl-C; 143 by SIGTERM.
"""

import argparse
import io
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from rloo_kit import __version__
from rloo_kit.checkpoints.stopping import Terminated, exit_code, terminate_as_interrupt
from rloo_kit.errors import ConfigError, KitError
from rloo_kit.text.redaction import (
    redact,
    redacted_logs,
    redacting,
    remember_arguments,
)

# What the verbs of a command are added to
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Secrets are masked in messages, logs, warnings and the traceback of an unexpected error.
    """
    remember_arguments(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # one that is not UTF-8 shows a ? instead
        sys.stdout.reconfigure(errors="replace")
    with redacted_logs():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args, args.rest = parser.parse_known_args(argv)
    if args.rest and args.call is not _serve:
        parser.error(f"unrecognized arguments: {' '.join(args.rest)}")
    try:
        with terminate_as_interrupt(), warnings.catch_warnings():
            # catch_warnings puts it back
            warnings.showwarning = _show_warning
            return args.call(args)
    except KitError as exc:
        _complain(str(exc))
        return 2
    except KeyboardInterrupt as exc:
        print("rloo-kit: interrupted", file=sys.stderr)
        return exit_code(exc)
    except Exception:
        print(redact(traceback.format_exc()), file=sys.stderr, end="")
        return 1


def _complain(text: str) -> None:
    print(f"rloo-kit: {redact(text)}", file=sys.stderr)


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
            command.add_argument("run_file", metavar="RUN.yaml", help="or the folder of a run")
        command.add_argument(
            "--resume",
            action="store_true",
            help="resume the newest run of output_dir, or the run in this folder, from its "
            "newest whole checkpoint; where there is none, start",
        )
        _add_set(command)
    text = "what this machine can run; or, of a run, what went wrong and what to change"
    doctor = _command(commands, "doctor", _doctor, text)
    doctor.add_argument("run", nargs="?", metavar="RUN", help="the folder of a run")
    for add in (_add_plan, _add_calibrate, _add_report, _add_eval, _add_judge):
        add(commands)
    for add in (_add_chat, _add_serve, _add_export):
        add(commands)
    rewards = commands.add_parser("rewards", help="the reward library")
    verbs = rewards.add_subparsers(required=True, metavar="VERB")
    verbs.add_parser("list", help="every reward with a short name, in one line").set_defaults(
        call=_rewards_list
    )
    show = verbs.add_parser("show", help="one reward: what it earns, its parameters, an example")
    show.add_argument("name", metavar="NAME")
    show.set_defaults(call=_rewards_show)
    _add_check(verbs)
    model = commands.add_parser("reward-model", help="a reward that is learnt from pairs")
    _add_reward_model(model.add_subparsers(required=True, metavar="VERB"))
    return parser


def _command(
    commands: Commands, name: str, call: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(call=call)
    return parser


def _add_plan(commands: Commands) -> None:
    text = "will it fit: the memory of a run on a card, part by part, and what to change"
    plan = _command(commands, "plan", _plan, text)
    plan.add_argument("run_file", metavar="RUN.yaml", help="or the folder of a run")
    plan.add_argument(
        "--gpu",
        default="this",
        metavar="GPU",
        help="memory of a card (12GB), or this machine's (default)",
    )
    _add_set(plan)


def _add_calibrate(commands: Commands) -> None:
    text = "sample every level before a run, and write a run file with the level that teaches"
    command = _command(commands, "calibrate", _calibrate, text)
    command.add_argument("run_file", metavar="RUN.yaml", help="or the folder of a run")
    command.add_argument(
        "--num-prompts", type=int, default=32, metavar="N", help="of each level (default 32)"
    )
    command.add_argument(
        "--num-generations", type=int, metavar="G", help="of each prompt; as in the run file"
    )
    command.add_argument(
        "--output", metavar="FILE.yaml", help="default: RUN-calibrated.yaml; nothing is overwritten"
    )
    command.add_argument(
        "--precision",
        action="store_true",
        help="load the model in bf16 and in float16 too, and write the better one",
    )
    _add_set(command)


def _add_eval(commands: Commands) -> None:
    text = "score models on the same held-out prompts: accuracy, pass@k, their intervals"
    command = _command(commands, "eval", _eval, text)
    command.add_argument(
        "models", nargs="+", metavar="RUN", help="a run, a checkpoint, an adapter or a model"
    )
    command.add_argument("--no-base", action="store_true", help="leave the base model out")
    command.add_argument(
        "--samples",
        type=int,
        default=4,
        metavar="K",
        help="sampled completions of each prompt (default 4); 0: greedy alone",
    )
    command.add_argument("--no-greedy", action="store_true", help="sampled completions alone")
    _add_asked(command, "eval.json")


def _add_judge(commands: Commands) -> None:
    text = "win rate: how often a judge prefers a model's completions to others"
    command = _command(commands, "judge", _judge, text)
    command.add_argument("model", metavar="RUN", help="a run, a checkpoint, an adapter or a model")
    command.add_argument(
        "--against", default="base", metavar="RUN", help="base (default) or another model"
    )
    command.add_argument(
        "--by",
        metavar="REWARD",
        help="who judges: a reward as in a run file, such as 'models/my-reward-model' or "
        "'{name: judge, model: NAME, mode: pairwise}'; default: the held-out judge",
    )
    command.add_argument(
        "--sampled", action="store_true", help="draw at the run's temperature, not greedily"
    )
    _add_asked(command, "judge.json")


def _add_asked(command: argparse.ArgumentParser, file: str) -> None:
    """Add what eval and judge ask their models, and where they write."""
    command.add_argument(
        "--prompts", metavar="SOURCE", help="a file, task or dataset; default: the held-out prompts"
    )
    command.add_argument("--num-prompts", type=int, metavar="N", help="at most so many")
    command.add_argument("--batch-size", type=int, metavar="B", help="completions at one time")
    command.add_argument(
        "--vllm", action="store_true", help="use vLLM (on a GPU the default, where it can run)"
    )
    command.add_argument(
        "--output", metavar="DIR", help=f"write {file} here instead of into the run's folder"
    )
    _add_set(command)


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    engine = ["trainer.generation=vllm"] if args.vllm else []
    options = _options(args, "prompts", "num_prompts", "batch_size", "output")
    return {"overrides": [*args.set, *engine], **options}


def _options(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def _add_chat(commands: Commands) -> None:
    text = "chat with a trained model in the terminal, and with its base if wanted"
    command = _command(commands, "chat", _chat, text)
    command.add_argument("model", metavar="RUN", help="a run, a checkpoint, an adapter or a model")
    command.add_argument("--base", action="store_true", help="let the base answer too")


def _add_serve(commands: Commands) -> None:
    text = "serve a trained model by vLLM's own OpenAI-compatible server"
    more = "; further options are vLLM's, such as --port 9000"
    command = commands.add_parser("serve", help=text, description=text + more, allow_abbrev=False)
    command.set_defaults(call=_serve)
    command.add_argument("model", metavar="RUN", help="a run, a checkpoint, an adapter or a model")


def _add_report(commands: Commands) -> None:
    text = "one page that says what a run did, why, and what to change; or compares several"
    report = _command(commands, "report", _report, text)
    report.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run")
    report.add_argument(
        "--output",
        metavar="FILE.html",
        help="report.html in the run's folder, comparison.html here for several, where not given",
    )


def _add_export(commands: Commands) -> None:
    text = "export a trained model: adapter, merged 16-bit weights, GGUF, the hub"
    export = _command(commands, "export", _export, text)
    export.add_argument("run", metavar="RUN", help="a run, a checkpoint, an adapter, or an export")
    export.add_argument("--to", required=True, metavar="KIND", help="adapter, merged, gguf or hub")
    export.add_argument("--output", metavar="DIR", help="default: export-KIND, next to the adapter")
    export.add_argument("--dtype", default="bf16", help="of a GGUF file: bf16, f16 or q8_0")
    export.add_argument(
        "--base",
        metavar="NAME",
        help="the 16-bit base to merge into, or dequantized: the run's 4-bit base written out; of "
        "an adapter, the name that it gives its base",
    )
    export.add_argument("--repo", metavar="OWNER/NAME", help="of the hub: where it is uploaded to")
    export.add_argument("--public", action="store_true", help="of the hub: else it is private")
    export.add_argument("--converter", metavar="DIR", help="llama.cpp, with convert_hf_to_gguf.py")
    export.add_argument("--no-check", action="store_true", help="do not load it back to compare")
    export.add_argument(
        "--prompts", type=int, default=16, metavar="N", help="that are compared (default 16)"
    )


def _add_check(verbs: Commands) -> None:
    text = "try the rewards of a run file on the model's own completions, before any training"
    check = _command(verbs, "check", _rewards_check, text)
    check.add_argument("run_file", metavar="RUN.yaml")
    check.add_argument("--completions", metavar="FILE.jsonl", help="score these; no model needed")
    check.add_argument("--prompts", type=int, default=16, metavar="N", help="prompts to sample")
    check.add_argument(
        "--generations", type=int, metavar="G", help="completions of each; as in the run file"
    )
    check.add_argument(
        "--output-dir", metavar="DIR", help="write the findings and the completions here"
    )
    _add_set(check)


def _add_reward_model(verbs: Commands) -> None:
    text = "train a reward model on pairs of a better and a worse text"
    train = _command(verbs, "train", _reward_model_train, text)
    train.add_argument("pairs", metavar="PAIRS.jsonl", help="rows with prompt, chosen, rejected")
    train.add_argument("--model", default="tiny-thinker", help="the base: a folder or a hub name")
    train.add_argument("--output-dir", default="runs/reward-model", metavar="DIR")
    settings = "an argument of train_reward_model or a field of TRL's RewardConfig, such as "
    _add_set(train, settings + "max_steps=100 or load_in_4bit=false")


def _add_set(
    command: argparse.ArgumentParser, help: str = "override a setting, such as trainer.beta=0.1"
) -> None:
    help += " (may be repeated)"
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=help)


def _train(args: argparse.Namespace) -> int:
    from rloo_kit.runs.train import train

    return _code_of(train(args.run_file, args.set, resume=args.resume))


def _code_of(result: Any) -> int:
    if result.interrupted:
        return exit_code(Terminated() if result.terminated else KeyboardInterrupt())
    return 0


def _doctor(args: argparse.Namespace) -> int:
    if args.run is not None:
        from rloo_kit.diagnosis.run_rules import diagnose

        return int(any(finding.level == "error" for finding in diagnose(args.run)))
    from rloo_kit.diagnosis.machine import examine

    lines, can_train = examine()
    print("\n".join(lines))
    return 0 if can_train else 1


def _report(args: argparse.Namespace) -> int:
    from rloo_kit.report.page import write_report

    print(write_report(args.runs, args.output, say=print))
    return 0


def _export(args: argparse.Namespace) -> int:
    from rloo_kit.export.exporter import export_model

    names = ("output", "dtype", "base", "converter", "repo", "public")
    options = {"check": not args.no_check, "num_prompts": args.prompts, **_options(args, *names)}
    export_model(args.run, args.to, **options)
    return 0


def _plan(args: argparse.Namespace) -> int:
    from rloo_kit.job import read_config
    from rloo_kit.planning.planner import make_plan

    config, base = read_config(args.run_file, args.set)
    plan = make_plan(config, args.gpu, base=base)
    print(plan)
    return 0 if plan.fits else 1


def _calibrate(args: argparse.Namespace) -> int:
    from rloo_kit.runs.calibrate import calibrate

    options = _options(args, "num_prompts", "num_generations", "output", "precision")
    calibrate(args.run_file, overrides=args.set, **options)
    return 0


def _eval(args: argparse.Namespace) -> int:
    from rloo_kit.evaluation.table import evaluate_models

    options = {"num_samples": args.samples, "greedy": not args.no_greedy, "base": not args.no_base}
    print(f"\n{evaluate_models(args.models, **options, **_asked(args))}")
    return 0


def _judge(args: argparse.Namespace) -> int:
    from rloo_kit.evaluation.win_rate import judge_models

    options = _options(args, "against", "by", "sampled")
    print(f"\n{judge_models(args.model, **options, **_asked(args))}")
    return 0


def _chat(args: argparse.Namespace) -> int:
    from rloo_kit.export.chat import chat

    chat(args.model, base=args.base)
    return 0


def _serve(args: argparse.Namespace) -> int:
    from rloo_kit.export.serve import serve

    serve(args.model, [word for word in args.rest if word != "--"])
    return 0


def _rewards_list(args: argparse.Namespace) -> int:
    from rloo_kit.scoring.catalogue import describe_rewards

    for entry in describe_rewards():
        print(f"{entry.name:<21} {entry.summary}")
    return 0


def _rewards_show(args: argparse.Namespace) -> int:
    from rloo_kit.scoring.catalogue import describe_reward, entry_text

    print(entry_text(describe_reward(args.name)))
    return 0


def _rewards_check(args: argparse.Namespace) -> int:
    from rloo_kit.reward_lab.lab import check_rewards

    found = check_rewards(
        args.run_file,
        overrides=args.set,
        completions=args.completions,
        num_prompts=args.prompts,
        num_generations=args.generations,
        output_dir=args.output_dir,
        say=redacting(print),
    )
    return 1 if found.has_errors else 0


def _reward_model_train(args: argparse.Namespace) -> int:
    from rloo_kit.config.run_file import read_settings
    from rloo_kit.reward_lab.training import train_reward_model

    settings = {"model": args.model, "output_dir": args.output_dir, **read_settings(args.set)}
    for name in {"pairs", "say"} & set(settings):
        raise ConfigError(f"--set {name!r} is no setting of a reward model: leave it out")
    train_reward_model(args.pairs, **settings)
    return 0


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, *_: object
) -> None:
    of_the_kit = issubclass(category, RuntimeWarning) and "rloo_kit" in filename
    if of_the_kit or issubclass(category, FutureWarning | UserWarning):
        print(f"note: {redact(str(message))}", file=sys.stderr)
