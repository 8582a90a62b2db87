"""Generate the parts of the docs that describe the code: commands, rewards, settings, names.

.venv/bin/python scripts/update_docs.py

Each generated part is between a pair of markers in a page. tests/docs/test_docs.py fails if a part
is out of date. The script does not import torch or other large libraries.
"""

import argparse
import ast
import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import yaml
from pages import with_part

import rloo_kit
from rloo_kit.cli import PARSER
from rloo_kit.config.other_names import MOVED, REFUSED, RENAMED
from rloo_kit.config.run_file import (
    DataSection,
    LoraSection,
    ModelSection,
    RunConfig,
    ThinkingSection,
)
from rloo_kit.config.settings import (
    BY_DEVICE,
    OF_KIT_STEP,
    OF_TRL_STEP,
    RULES,
    TRL_DEFAULTS,
    KitSettings,
    Rule,
    on_resume,
)
from rloo_kit.machine.hardware import TESTED
from rloo_kit.scoring.catalogue import Parameter, describe_rewards

ROOT = Path(__file__).resolve().parents[1]
# Command -> pages about it
MORE = {
    "train": "explanation/trainer how-to/resume how-to/watch",
    "doctor": "how-to/doctor how-to/troubleshooting",
    "plan": "how-to/plan",
    "calibrate": "how-to/prompts",
    "warm-up": "how-to/warm_up",
    "report": "how-to/watch",
    "rewards": "how-to/rewards reference/rewards",
    "rewards check": "how-to/reward_lab",
    "reward-model train": "how-to/reward_model",
    "eval": "how-to/eval",
    "judge": "how-to/eval",
    "chat": "how-to/export",
    "serve": "how-to/export",
    "export": "how-to/export",
    "hand-over": "how-to/more_than_one_card",
    "legacy": "how-to/from_trl_and_unsloth",
}
# Command -> (command with the same options, these options)
SAME_AS = {
    "quickstart": ("train", ("--resume",)),
    "judge": ("eval", ["--prompts", "--num-prompts", "--batch-size", "--vllm", "--output"]),
}
# Help texts that the page has only once, at its top
SAID_ONCE = (
    "a run file, or the folder of a run",
    "a run, a checkpoint, an adapter or a model",
    "a run file",
    "the folder of a run",
    "the name of the reward",
)
# Parameters that the page explains once
COMMON = ("thought_opened", "start_token_id", "end_token_id", "require_closed_thought")
# Number of sentences that are taken from a reward's docstring, after its first line
SENTENCES = 1

# Type -> its name in the documentation of run files
WORDS = {
    bool: "bool",
    dict: "table",
    float: "float",
    int: "int",
    list: "list",
    list[float]: "list of float",
    list[int]: "list of int",
    list[str]: "list of str",
    str: "str",
    tuple[float, float]: "list of 2 float",
    type(None): "null",
}


def commands() -> str:
    """Return the documentation of all commands, with their arguments and options."""
    return "\n".join(_commands(PARSER, 2))


def _commands(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        for command in action.choices.values():
            words = command.prog.removeprefix("rloo-kit ")
            about = f"{_sentence(command.description or '')} {_links(words)}".strip()
            options = "\n".join(_options(command))
            yield (
                "\n\n".join(filter(None, [f"{'#' * level} {command.prog}", about, options])) + "\n"
            )
            yield from _commands(command, level + 1)


def _options(command: argparse.ArgumentParser) -> Iterator[str]:
    same = SAME_AS.get(command.prog.removeprefix("rloo-kit "))
    for action in command._actions:
        if same and {*action.option_strings} & {*same[1]}:
            continue
        if "--set" in action.option_strings and "trainer." in (action.help or ""):
            continue  # the page says once which commands take it
        if action.help in SAID_ONCE:
            continue
        if action.dest == "help" or isinstance(action, argparse._SubParsersAction):
            continue
        value = "" if action.nargs == 0 else action.metavar or action.dest
        value = value if isinstance(value, str) else " ".join(value)
        if action.choices:
            value = "{" + ",".join(map(str, action.choices)) + "}"
        name = " ".join(filter(None, (", ".join(action.option_strings), value)))
        text = (action.help or "") % {"default": action.default, "prog": command.prog}
        yield f"- `{name}`: {text}" if text else f"- `{name}`"
    if same:
        yield f"- {', '.join(f'`{name}`' for name in same[1])}: as `{same[0]}`"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def _links(words: str) -> str:
    pages = MORE.get(words, "").split()
    return (
        "See " + ", ".join(f"[{p.split('/')[1]}](../{p}.md)" for p in pages) + "." if pages else ""
    )


def rewards() -> str:
    """Return the documentation of all built-in rewards: a summary and the parameters of each."""
    parts = []
    for entry in describe_rewards():
        about = _markdown(re.split(r"\n\n|\n>>>", entry.text.partition("\n\n")[2])[0])
        about = " ".join(re.split(r"(?<=[.)]) (?=[A-Z`])", about)[:SENTENCES])
        about = about.replace(", higher is better", "")  # this is so for all rewards
        rows = [_parameter(p) for p in entry.parameters if p.name not in COMMON]
        parts.append("\n".join([f"## {entry.name}\n", f"{entry.summary} {about}\n", *rows, ""]))
    return "\n".join(parts)


def _parameter(one: Parameter) -> str:
    default = f"`{one.default}`" if one.default else "required"
    return f"- `{one.name}` ({default}): {_markdown(one.text)}"


def _markdown(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


OTHER_LORA = (
    "Every other field of PEFT's `LoraConfig` goes under `lora:` too, such as `use_rslora`, "
    "`use_dora`, `modules_to_save`, `rank_pattern`, or `target_parameters: "
    "[mlp.experts.gate_up_proj, mlp.experts.down_proj]` for the experts of a mixture. Refused are "
    "`bias`, starts that change the base (`init_lora_weights: pissa`), and with `generation: vllm` "
    "what vLLM cannot load.\n"
)


def settings() -> str:
    """Return the documentation of all settings, by section of the run file."""
    parts = []
    for heading, section, prefix in (
        ("Top level", RunConfig, ""),
        ("model", ModelSection, "model."),
        ("lora", LoraSection, "lora."),
        ("thinking", ThinkingSection, "thinking."),
        ("data", DataSection, "data."),
        ("trainer: settings that TRL does not have", KitSettings, ""),
    ):
        parts.append(f"## {heading}\n\n" + "\n".join(_rows(section, prefix)) + "\n")
        if section is LoraSection:
            parts.append(OTHER_LORA)
    return "\n".join([*parts, _trl_settings()])


def _rows(section: type, prefix: str) -> Iterator[str]:
    """Yield a line for each setting of a section: name, type, default, range, text."""
    hints = typing.get_type_hints(section)
    for one in dataclasses.fields(section):
        if rule := one.metadata.get("rule"):
            is_made = one.default is dataclasses.MISSING
            default = _yaml(one.default_factory() if is_made else one.default)
            kind = _describe(hints[one.name])
            about = "" if rule.help == f"{kind}." else f": {rule.help}"
            facts = ", ".join(filter(None, [kind, f"`{default}`", _describe_range(rule)]))
            yield f"- `{prefix}{one.name}` ({facts}){about}"


def _describe(hint: object) -> str:
    """Return the description of a type, such as ``float or null``."""
    words: list[str] = []
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    for option in sorted(options, key=lambda option: option is type(None)):
        if typing.get_origin(option) is typing.Literal:
            words += typing.get_args(option)
        else:
            words.append(WORDS.get(option) or WORDS[typing.get_origin(option)])
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _describe_range(rule: Rule) -> str:
    """Return the bounds of a rule as text, such as ``1 to 10``, or "" if it has no bounds."""
    if rule.minimum is not None and rule.maximum is not None:
        return f"{_number(rule.minimum)} to {_number(rule.maximum)}"
    bounds = {"≥": rule.minimum, ">": rule.above, "≤": rule.maximum, "<": rule.below}
    given = [f"{sign} {_number(bound)}" for sign, bound in bounds.items() if bound is not None]
    return ", ".join(given)


def _number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _trl_settings() -> str:
    defaults = (f"`{name}` {_yaml(value)}" for name, value in TRL_DEFAULTS.items())
    return "\n".join(
        [
            "## trainer: settings of TRL\n",
            "Every field of TRL's `RLOOConfig`, and so of transformers' `TrainingArguments`, goes "
            "under `trainer:` with TRL's name and meaning. The kit's defaults: "
            f"{', '.join(defaults)}. By the device: {_names(BY_DEVICE)}.\n",
            f"Only the kit's own step obeys {_names(OF_KIT_STEP)}; only TRL's obeys "
            f"{_names(OF_TRL_STEP)}. What has no effect on RLOO here is refused with what to write "
            f"instead: {_names(name for name, rule in RULES.items() if rule.instead)}.\n",
            "A resume refuses other values of the settings that decide what is sampled and "
            f"learned, except {_names(on_resume('may'))}, whose new values are used and "
            "reported. Settings of saving, logging, stopping and memory may change.\n",
        ]
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _class(name: str, roots: Iterable[Path]) -> ast.ClassDef | None:
    """Return the syntax tree of a class whose source is below one of some folders, else None.

    The class is not imported, since this would load torch.
    """
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            if f"class {name}" in source:
                for node in ast.parse(source).body:
                    if isinstance(node, ast.ClassDef) and node.name == name:
                        return node
    return None


def _yaml(default: object) -> str:
    """Return a default value as YAML on one line."""
    return yaml.safe_dump(default, default_flow_style=True, width=1000).split("\n")[0]


def packages() -> str:
    """Return a list of all packages, each with the first line of its docstring.

    The order is that of ``LAYERS`` in tests/test_layers.py.
    """
    source = (ROOT / "tests/test_layers.py").read_text()
    layers = ast.literal_eval(re.search(r"^LAYERS = (\[.*?^\])", source, re.S | re.M)[1])
    lines = []
    for layer in layers:
        for name in sorted(layer):
            file = ROOT / ("rewards" if name == "rewards" else f"rloo_kit/{name}") / "__init__.py"
            if file.exists():
                text = ast.get_docstring(ast.parse(file.read_text())).splitlines()[0]
                lines.append(f"- `{name}`: {text}")
    return "\n".join(lines) + "\n"


def overrides() -> str:
    """Return a sentence that lists the methods of TRL and transformers that the trainer overrides.

    The methods are found in the sources.
    """
    libraries = [Path(find_spec(name).origin).parent for name in ("trl", "transformers")]
    inherited = _methods("RLOOTrainer", [libraries[0] / "trainer", libraries[1]])
    own = _methods("LeaveOneOutTrainer", [ROOT / "rloo_kit"])
    names = sorted(own & inherited - {"__init__"})
    listed = ", ".join(f"`{name}`" for name in names)
    return f"{len(names)} methods of TRL and transformers are overridden: {listed}.\n"


def _methods(name: str, roots: list[Path]) -> set[str]:
    """Return the names of the methods of a class and its base classes.

    A class whose source is not below one of the folders is left out.
    """
    node = _class(name, roots)
    if node is None:
        return set()
    bases = (ast.unparse(base).rpartition(".")[2] for base in node.bases)
    return {n.name for n in node.body if isinstance(n, ast.FunctionDef)}.union(
        *(_methods(base, roots) for base in bases)
    )


def other_names() -> str:
    """Return the settings of other trainers, each with the name of the setting in this kit."""
    lines = [
        f"- `{name}`: `{key}`, in Python {in_python}" for name, (key, in_python) in MOVED.items()
    ]
    renamed = ", ".join(f"`{name}` is `{new}`" for name, new in RENAMED.items())
    lines += ["", f"Under `trainer:` and in Python: {renamed}."]
    lines += [
        "",
        "Other settings without use here are left out with a warning that says why.",
        "",
        f"Refused with what to write instead: {_names(REFUSED)}.",
    ]
    return "\n".join(lines) + "\n"


def public_names() -> str:
    """Return the public names by kind, as directives of mkdocstrings."""
    homes = rloo_kit._HOMES
    errors = sorted(name for name in homes if name.endswith("Error"))
    classes = sorted(name for name in homes if name[0].isupper() and name not in errors)
    functions = sorted(name for name in homes if name[0].islower())
    groups = {"Functions": functions, "Classes": classes, "Errors": errors}
    return "\n".join(
        f"## {heading}\n\n" + "\n".join(f"::: rloo_kit.{homes[n]}.{n}\n" for n in names)
        for heading, names in groups.items()
    )


# Test file of tests/faults -> heading
SECTIONS = {
    "test_reward_faults": "Rewards",
    "test_server_faults": "Servers",
    "test_memory_faults": "Memory and NaN/Inf",
    "test_disk_faults": "A full disk",
    "test_checkpoint_faults": "Checkpoints",
    "test_data_faults": "Prompts",
    "test_signal_faults": "Signals, two runs in one folder",
}


# End of a promise that the page has once for all faults
SAVED = "; the last finished step is saved"


def faults() -> str:
    """Return a list of the faults that tests/faults simulates, each with the promised outcome."""
    parts = []
    for file, heading in SECTIONS.items():
        tree = ast.parse((ROOT / f"tests/faults/{file}.py").read_text())
        marks = [
            [ast.literal_eval(argument) for argument in decorator.args]
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            for decorator in node.decorator_list
            if isinstance(decorator, ast.Call)
            and ast.unparse(decorator.func) == "pytest.mark.fault"
        ]
        rows = "\n".join(f"- {name}: {promise.removesuffix(SAVED)}." for name, promise in marks)
        parts.append(f"## {heading}\n\n{rows}\n")
    return "\n".join(parts)


def kills() -> str:
    """Return a sentence with the totals of the recorded run of tests/scripts/kill_and_resume.py."""
    rows = json.loads((ROOT / "benchmarks/results/kills.json").read_text())
    names = ("kills", "while_loading", "while_writing", "while_ending", "lost")
    killed, loading, writing, ending, lost = (sum(row[name] for row in rows) for name in names)
    turns = sum(row.get("while_in_turns", 0) for row in rows)
    different = sum(len(row["different"]) - row["lost"] for row in rows)
    return (
        f"{killed} kills of runs with {len(rows)} settings: {loading} while loading, {writing} "
        f"while a checkpoint was half written, {ending} after the adapter was written, {turns} "
        f"between the turns of tools, the others between. {lost} runs lost, {different} different "
        "(`benchmarks/results/kills.json`).\n"
    )


def tested() -> str:
    """Return a list of the library versions in the lock files."""
    return ", ".join(f"{name} {version}" for name, version in TESTED.items()) + ".\n"


# Name of a marker -> function that returns the text between the two markers
PARTS = {
    "commands": commands,
    "reward_reference": rewards,
    "run_file": settings,
    "other_names": other_names,
    "api": public_names,
    "packages": packages,
    "overrides": overrides,
    "tested": tested,
    "faults": faults,
    "kills": kills,
}
# Name of a marker -> its page, unless that is reference/MARKER
HOLDS = {
    "reward_reference": "reference/rewards",
    "faults": "reference/reliability",
    "kills": "reference/reliability",
    "other_names": "how-to/from_trl_and_unsloth",
    "packages": "../CONTRIBUTING",
    "overrides": "explanation/architecture",
    "tested": "how-to/install",
}


def page_of(name: str) -> Path:
    """Return the path of the page that has a generated part."""
    return ROOT / f"docs/{HOLDS.get(name, f'reference/{name}')}.md"


def written(page: str, name: str, text: str) -> str:
    """Return the text of a page with the generated part ``name`` replaced by ``text``."""
    return with_part(page, name, f"\n{text}")


def main() -> None:
    """Write every generated part into its page."""
    for name, make in PARTS.items():
        path = page_of(name)
        path.write_text(written(path.read_text(), name, make()))


if __name__ == "__main__":
    main()
