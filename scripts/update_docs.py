"""Write what the pages of docs/ say of the code: commands, rewards, settings, public names.

.venv/bin/python scripts/update_docs.py

Each part is between a pair of markers; tests/docs/test_docs.py fails if one is stale. Nothing
heavy is imported: settings and their texts are read from the syntax trees.
"""

import argparse
import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import rloo_kit
from rloo_kit.cli import _parser
from rloo_kit.config.run_file import NUMBERS, RENAMED
from rloo_kit.scoring.catalogue import describe_rewards, entry_text

ROOT = Path(__file__).resolve().parents[1]
MORE = {
    "train": "explanation/trainer how-to/resume how-to/processes how-to/watch",
    "doctor": "how-to/doctor how-to/troubleshooting",
    "plan": "how-to/plan",
    "report": "how-to/watch",
    "rewards": "how-to/rewards reference/rewards",
    "rewards check": "how-to/reward_lab",
    "reward-model train": "how-to/reward_model",
    "eval": "how-to/eval",
    "judge": "how-to/eval",
    "chat": "how-to/export",
    "serve": "how-to/export",
    "export": "how-to/export",
    "legacy": "how-to/legacy",
}
"""Command -> pages that say more of it."""


def commands() -> str:
    """Return what every command says of itself after ``--help``."""
    os.environ["COLUMNS"] = "100"  # argparse wraps to the terminal
    return "\n".join(_commands(_parser(), 2))


def _commands(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        for command in action.choices.values():
            words = command.prog.removeprefix("rloo-kit ")
            yield f"{'#' * level} {command.prog}\n"
            yield f"```text\n{command.format_help().rstrip()}\n```\n"
            pages = MORE.get(words, "").split()
            if pages:
                yield "More: " + ", ".join(f"[{p.split('/')[1]}](../{p}.md)" for p in pages) + ".\n"
            yield from _commands(command, level + 1)


def rewards() -> str:
    """Return what ``rloo-kit rewards show`` prints of every built-in reward."""
    built_in = (entry for entry in describe_rewards() if entry.origin == "built in")
    return "\n".join(f"## {e.name}\n\n````text\n{entry_text(e)}\n````\n" for e in built_in)


def settings() -> str:
    """Return the tables of the settings that the kit itself defines."""
    parts = []
    for heading, file, name, prefix in (
        ("Top level", "config/run_file", "RunConfig", ""),
        ("model", "config/run_file", "ModelSection", "model."),
        ("lora", "config/run_file", "LoraSection", "lora."),
        ("data", "config/run_file", "DataSection", "data."),
        ("trainer: the kit's own", "training/trainer", "LeaveOneOutConfig", "trainer."),
    ):
        rows = [
            f"| `{prefix}{field}` | {kind} | `{default}` | {text} |"
            for field, kind, default, text in _fields(file, name)
        ]
        head = f"## {heading}\n\n| setting | is | default | |\n|---|---|---|---|\n"
        parts.append(head + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _fields(file: str, name: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and text of each field of a dataclass, from its source."""
    tree = ast.parse((ROOT / f"rloo_kit/{file}.py").read_text())
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    for node, after in zip(found.body, [*found.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or node.value is None:
            continue
        kind = ast.unparse(node.annotation)
        if kind.endswith("Section"):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = " ".join(after.value.value.split()).replace("``", "`")
        low_high = NUMBERS.get(node.target.id) if name == "LeaveOneOutConfig" else None
        if low_high:
            low, high = low_high[1:]
            text += f" From {low:g} to {high:g}." if high < 1e6 else f" At least {low:g}."
        kind = kind.replace(" | None", " or null").replace(" | ", " or ")
        yield node.target.id, kind, _yaml(node.value), text


def _yaml(default: ast.expr) -> str:
    """Return a default as a run file has it."""
    if isinstance(default, ast.Call):  # field(default_factory=...)
        default = default.keywords[0].value
        if isinstance(default, ast.Name):
            return {"list": "[]", "dict": "{}"}[default.id]
        default = default.body  # of a lambda
        if isinstance(default, ast.Call):  # list(NAME)
            default = ast.Constant([*getattr(rloo_kit.config.run_file, default.args[0].id)])
    text = ast.unparse(default).replace("'", "")
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)


def older_names() -> str:
    """Return the table of the older TRL's names."""
    rows = (f"| `{old}` | `{new}` |" for old, new in sorted(RENAMED.items()))
    return (
        "| older | now |\n|---|---|\n" + "\n".join(rows) + "\n| `total_episodes` | `max_steps` |\n"
    )


def public_names() -> str:
    """Return the public names as mkdocstrings takes them."""
    homes = rloo_kit._HOMES
    errors = sorted(name for name in homes if name.endswith("Error"))
    classes = sorted(name for name in homes if name[0].isupper() and name not in errors)
    functions = sorted(name for name in homes if name[0].islower())
    groups = {"Functions": functions, "Classes": classes, "Errors": errors}
    return "\n".join(
        f"## {heading}\n\n" + "\n".join(f"::: rloo_kit.{homes[n]}.{n}\n" for n in names)
        for heading, names in groups.items()
    )


PARTS = {
    "commands": commands,
    "reward_reference": rewards,
    "run_file": settings,
    "older_names": older_names,
    "api": public_names,
}
"""Marker -> what stands between its pair."""
HOLDS = {"older_names": "run_file", "reward_reference": "rewards"}
"""Marker -> page, where it has another name."""


def page_of(name: str) -> Path:
    """Return the page that holds a part."""
    return ROOT / f"docs/reference/{HOLDS.get(name, name)}.md"


def written(page: str, name: str, text: str) -> str:
    """Return the text of a page with one generated part put in.

    Raises:
        ValueError: The page does not have exactly one such pair of markers.
    """
    marks = re.compile(rf"(<!-- {name}: .*?-->\n).*?(<!-- /{name} -->)", re.S)
    content, count = marks.subn(lambda m: f"{m[1]}\n{text}\n{m[2]}", page)
    if count != 1:
        raise ValueError(f"there is no one pair of markers for {name}")
    return content


def main() -> None:
    """Write every part into its page."""
    for name, make in PARTS.items():
        path = page_of(name)
        path.write_text(written(path.read_text(), name, make()))


if __name__ == "__main__":
    main()
