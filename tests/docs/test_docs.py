"""The pages: commands and code run, links resolve, generated parts are fresh."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
from page_commands import PAGES, README, ROOT, blocks, commands, execute, put_run

import rloo_kit as rk
from rloo_kit.config.run_file import read_run_file

COMMANDS = dict.fromkeys(command for page in PAGES for command in commands(page))


def page_id(page):
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


def blocks_of(language):
    return [
        pytest.param(text, id=f"{page_id(page)}-{number}")
        for page in PAGES
        for number, text in enumerate(text for kind, text in blocks(page) if kind == language)
    ]


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command, tmp_path, monkeypatch):
    execute(command, tmp_path, monkeypatch)


@pytest.mark.parametrize("text", blocks_of("python"))
def test_python_compiles_and_uses_public_names(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "rk":
            assert node.attr in rk.__all__
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("rk."):
            takes = inspect.signature(getattr(rk, node.func.attr)).parameters
            open_ended = any(one.kind is one.VAR_KEYWORD for one in takes.values())
            assert open_ended or {word.arg for word in node.keywords} <= set(takes)


# Python blocks that are whole programs
RUN = [
    "how-to/change_the_step-0",
    "how-to/code_sandbox-0",
    "how-to/doctor-0",
    "how-to/plan-0",
    "how-to/prompts-0",
    "how-to/rewards-1",
    "how-to/secrets-0",
    "how-to/watch-0",
]


@pytest.mark.long
@pytest.mark.parametrize("name", RUN)
def test_whole_program_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("mine", "first", "second"):
        put_run(tmp_path / "runs" / run, trained=False)
    (text,) = (param.values[0] for param in blocks_of("python") if param.id == name)
    exec(compile(text, name, "exec"), {"__name__": "page"})


def test_yaml_blocks_are_run_files(tmp_path):
    sections = ("model:", "lora:", "data:", "rewards:", "trainer:", "output_dir:", "seed:")
    for param in blocks_of("yaml"):
        if param.values[0].startswith(sections):
            (tmp_path / "run.yaml").write_text(param.values[0])
            read_run_file(tmp_path / "run.yaml")


def test_settings_in_troubleshooting_are_valid():
    pages = [ROOT / f"docs/how-to/{name}.md" for name in ("doctor", "troubleshooting")]
    text = "".join(page.read_text() for page in pages)
    settings = re.findall(r"`((?:model|lora|data|trainer)\.\w+=[^`]+)`", text)
    assert len(settings) > 15
    for setting in settings:
        read_run_file("quickstart", [setting])


@pytest.mark.parametrize("name", ["how_it_works", "the_method"])
def test_the_site_includes_the_file_that_a_page_shows(name):
    page = (ROOT / f"docs/explanation/{name}.md").read_text()
    (name,) = re.findall(r"^--8<--\n(.+)\n--8<--$", page, re.M)  # else the site shows these
    assert (ROOT / name).exists()


def test_generated_parts_are_fresh():
    script = importlib.import_module("update_docs")
    for name, make in script.PARTS.items():
        page = script.page_of(name).read_text()
        assert script.written(page, name, make()) == page, f"run scripts/update_docs.py ({name})"


def test_links_resolve_and_every_page_is_in_the_site():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert "://" in link or (page.parent / link).exists(), (page.name, link)
    nav = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    docs = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert nav == {"index.md", "changelog.md", "contributing.md", "security.md", *docs}


# --- the README ----------------------------------------------------------------------------------


def block_of(page, language, containing):
    (found,) = [text for kind, text in blocks(page) if kind == language and containing in text]
    return found


@pytest.mark.long
def test_readme_program_runs(tmp_path, monkeypatch, capsys):
    """notebooks/01_quickstart.ipynb runs the same program in a process of its own."""
    monkeypatch.chdir(tmp_path)
    source = block_of(README, "python", "rk.LeaveOneOutTrainer")
    few = '**{**run.trainer, "max_steps": 2, "per_device_train_batch_size": 16}'
    exec(source.replace("**run.trainer", few), {"__name__": "page"})
    assert "step 2/2" in capsys.readouterr().out
    assert Path("runs/first/adapter/adapter_model.safetensors").exists()


def test_reward_of_the_page_works(tmp_path):
    page = ROOT / "docs/how-to/rewards.md"
    (tmp_path / "my_rewards.py").write_text(block_of(page, "python", "def polite"))
    (reward,) = rk.load_rewards(["my_rewards.py:polite:0.5"], base_dir=tmp_path)
    completions = ["hm</think>Thank you", [{"role": "assistant", "content": "thanks</think>no"}]]
    assert reward.func(completions=completions, prompts=["", ""]) == [1.0, 0.0]


# --- versions ------------------------------------------------------------------------------------


def test_locks_hold_the_tested_versions():
    from rloo_kit.machine.hardware import TESTED

    locks = {
        f: (ROOT / f).read_text()
        for f in ("requirements/requirements.lock", "requirements/gpu.lock")
    }
    for name, version in TESTED.items():
        pin = f"\n{name.replace('_', '-')}=={version} "
        assert pin in locks["requirements/gpu.lock"]
        assert pin in locks["requirements/requirements.lock"] or name == "vllm"
    pins = [set(re.findall(r"^([\w.-]+==[^ ]+)", lock, re.M)) for lock in locks.values()]
    different = {pin.split("==")[0] for pin in pins[0] - pins[1]}
    assert different == {"cuda-bindings", "fastapi", "llguidance", "numpy", "setuptools"}
