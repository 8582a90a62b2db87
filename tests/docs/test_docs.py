"""The pages: every command in them is executed, every program compiles, nothing in them is stale.

What builds the site, and holds its links and anchors, is ``make docs``.
"""

import ast
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

import rloo_kit as rk
from rloo_kit.cli import _parser
from rloo_kit.config.run_file import read_run_file
from rloo_kit.diagnosis.run_rules import KINDS

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from page_commands import (
    ELSEWHERE,
    OTHERS,
    PAGES,
    README,
    ROOT,
    RUNNERS,
    blocks,
    commands,
    execute,
    inline_commands,
    put_run,
    source_of_test,
)

ALL = dict.fromkeys(command for page in PAGES for command in commands(page))
"""The commands of all pages, each once, in the order of the pages."""
COMMANDS = [command for command in ALL if command not in commands(README)]
"""Those of the README are executed in test_readme.py."""


def page_id(page):
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


def load(script):
    spec = importlib.util.spec_from_file_location(script, ROOT / f"scripts/{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, tmp_path, monkeypatch):
    execute(command, tmp_path, monkeypatch)


def test_no_command_is_excused_that_no_page_has():
    assert set(ELSEWHERE) <= set(ALL)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_no_command_hides_in_another_block(page):
    """Where a block is to be typed, it says bash: what is in those is executed."""
    others = "".join(text for language, text in blocks(page) if language in ("", "text", "sh"))
    assert re.findall(r"^(?:rloo-kit [a-z-]+ |pip install |python \S+\.py).*", others, re.M) == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_within_the_text_are_commands(page):
    for command in inline_commands(page):
        words = shlex.split(command)
        other = [name for name in OTHERS if command.startswith(name)]
        if words[0] == "rloo-kit":
            parse(words[1:])
        elif other:
            source_of_test(OTHERS[other[0]])
        elif words[1] == "-m":
            assert words[2:] == ["rloo_kit"]
        else:
            RUNNERS[words[0]](words[1:], command)


def parse(words):
    """Parse a command whose arguments may be left out: it stands for itself in a sentence."""
    commands_of = _parser()
    given = list(words)
    while given and (known := subcommands(commands_of)):
        assert given[0] in known or given[0].startswith("--"), words
        if given[0] not in known:
            break
        commands_of = known[given.pop(0)]
    if given and "--help" not in given:
        _parser().parse_args([re.sub("^[A-Z]$", "1", word) for word in words])


def subcommands(parser):
    return next((dict(a.choices) for a in parser._actions if a.nargs == "A..."), {})


# --- programs and run files ----------------------------------------------------------------------

PYTHON = [
    pytest.param(page, number, id=f"{page_id(page)}-{number}")
    for page in PAGES
    for number, text in enumerate(text for kind, text in blocks(page) if kind == "python")
]


def python_block(page, number):
    return [text for kind, text in blocks(page) if kind == "python"][number]


@pytest.mark.parametrize(("page", "number"), PYTHON)
def test_a_program_compiles_and_names_what_there_is(page, number):
    tree = ast.parse(python_block(page, number))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "rk":
            assert node.attr in rk.__all__
        if isinstance(node, ast.ImportFrom) and node.module.startswith("rloo_kit"):
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


RUN = [
    "how-to/code_sandbox-0",
    "how-to/doctor-0",
    "explanation/how_it_works-0",
    "how-to/plan-0",
    "how-to/prompts-0",
    "how-to/rewards-1",
    "how-to/secrets-0",
    "how-to/watch-0",
]
"""Programs that are whole, and run in a second."""


@pytest.mark.parametrize(
    ("page", "number"), [pytest.param(*p.values, id=p.id) for p in PYTHON if p.id in RUN]
)
def test_a_whole_program_runs(page, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "first", "second"):
        put_run(tmp_path / "runs" / name, trained=False)
    exec(compile(python_block(page, number), page.name, "exec"), {"__name__": "page"})


def test_the_programs_that_run_are_there():
    assert {param.id for param in PYTHON} >= set(RUN)


YAML = [
    pytest.param(text, id=f"{page_id(page)}-{number}")
    for page in PAGES
    for number, (kind, text) in enumerate(blocks(page))
    if kind == "yaml" and re.match(r"(model|lora|data|rewards|trainer|output_dir|seed):", text)
]


@pytest.mark.parametrize("text", YAML)
def test_a_part_of_a_run_file_is_taken(text, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    read_run_file(tmp_path / "run.yaml")


# --- what is written of the code -----------------------------------------------------------------


def test_no_generated_part_is_stale():
    script = load("update_docs")
    for name, make in script.PARTS.items():
        page = script.page_of(name).read_text()
        assert script.written(page, name, make()) == page, "run scripts/update_docs.py"


def test_every_public_name_is_on_the_page_of_the_api():
    page = (ROOT / "docs/reference/api.md").read_text()
    names = re.findall(r"^::: rloo_kit\.[\w.]+\.(\w+)$", page, re.M)
    assert sorted([*names, "__version__"]) == rk.__all__


def test_every_page_is_in_the_site():
    def leaves(node):
        if isinstance(node, str):
            return [node]
        return [leaf for part in (node.values() if isinstance(node, dict) else node)
                for leaf in leaves(part)]  # fmt: skip

    nav = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    docs = ROOT / "docs"
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    assert sorted(nav) == sorted({"index.md", "changelog.md", "security.md", *pages})


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_what_a_page_links_to_is_there(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


# --- troubleshooting -----------------------------------------------------------------------------

TROUBLE = (ROOT / "docs/how-to/troubleshooting.md").read_text()


def test_every_finding_of_the_doctor_has_its_row():
    assert [kind for kind in KINDS if f"`{kind}`" not in TROUBLE] == []


def test_the_lines_that_change_something_are_settings():
    settings = re.findall(r"`((?:model|lora|data|trainer)\.\w+=[^`]+)`", TROUBLE)
    assert len(settings) > 30
    for setting in settings:
        read_run_file("quickstart", [setting])


def test_the_sentences_are_those_of_the_code():
    said = "\n".join(
        node.value
        for room in (ROOT / "rloo_kit").rglob("*.py")
        for node in ast.walk(ast.parse(room.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    table = TROUBLE.partition("## It does not start")[2].partition("## Memory runs out")[0]
    sentences = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    assert len(sentences) > 6
    assert [sentence for sentence in sentences if sentence not in said] == []
