"""The commands of the pages, and how a test executes each of them.

``rloo-kit`` runs in this process, on the embedded model and for a step. What cannot run here is in
``ELSEWHERE``, and other tests run it.
"""

import contextlib
import functools
import io
import itertools
import json
import re
import shlex
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path

import yaml

from rloo_kit.cli import main
from rloo_kit.config.run_file import find_run_file, make_run_config, read_run_file

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
FEW = [
    "--set", "trainer.max_steps=1", "--set", "data.held_out=4", "--set", "data.num_prompts=16",
    "--set", "trainer.per_device_train_batch_size=8", "--set", "trainer.num_generations=4",
]  # fmt: skip
# Command -> additional arguments that make it quick
EXTRA = {
    "train": FEW,
    "quickstart": FEW,
    "rewards check": ["--prompts", "4"],
    "calibrate": ["--num-prompts", "8"],
    "warm-up": ["--steps", "1"],
    "reward-model train": ["--set", "max_steps=1", "--set", "held_out=4"],
    "eval": ["--samples", "2", "--num-prompts", "4"],
    "export": ["--prompts", "2"],
    "judge": ["--num-prompts", "4"],
}
# Rows of the files that commands name.
PAIR = {"chosen": "It, please.", "rejected": "It!"}
ROWS = {
    "pairs.jsonl": [{"prompt": f"Say {n}.", **PAIR} for n in range(16)],
    "prompts.jsonl": [{"prompt": f"{n} + 1 ="} for n in range(128)],
    "examples.jsonl": [{"prompt": "1 + 1 =", "completion": "2"}],
}
# Commands whose exit code is not 0.
CODES = {
    "rloo-kit plan qwen3-4b-thinking-24gb --gpu 8GB": 1,
    "rloo-kit export runs/mine --to hub --repo me/mine": 2,  # the hub is not asked in a test
}

# Beginnings of commands that start processes, servers or other programs, or need a GPU.
ELSEWHERE = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",  # tests/vllm
    *("CUDA_VISIBLE_DEVICES=1 VLLM_ALLOW", "rloo-kit serve"),
    "rloo-kit eval runs/quickstart --vllm",
    "rloo-kit export runs/mine --to gguf",  # tests/export, with llama.cpp's converter
    "rloo-kit judge runs/mine --by '{name: judge",  # tests/evaluation, with a small server
    *("lm_eval run", "pytest -m gpu"),
    *("torchrun", "accelerate launch"),  # tests/training/test_processes.py
)


def blocks(page):
    """Return the language and text of every fenced block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M)


def commands(page):
    """Return the commands of a page's bash blocks, without comments, continued lines joined."""
    text = "".join(text for language, text in blocks(page) if language == "bash")
    lines = re.sub(r" *\\\n\s*", " ", text).splitlines()
    return [line for line in (re.sub(r"(^| +)#.*", "", line).strip() for line in lines) if line]


@functools.cache
def trained_run():
    """Return the folder of a run of one step, which is made once per process; copy it to use it."""
    folder = tempfile.TemporaryDirectory()
    with contextlib.chdir(folder.name):
        assert main(["quickstart", *FEW]) == 0
    return folder, Path(folder.name) / "runs" / "quickstart"


def put_run(folder, *, trained):
    """Put a run into a folder: a trained one, or only metrics and settings."""
    if trained:
        shutil.copytree(trained_run()[1], folder)
        return
    folder.mkdir(parents=True)
    rows = ({"step": step, "reward": 0.1 * step, "kl": 0.0} for step in range(1, 9))
    write_lines(folder / "metrics.jsonl", rows)
    config = read_run_file("quickstart", [*FEW[1::2], f"output_dir={folder}"])
    (folder / "run.yaml").write_text(yaml.safe_dump(config.as_dict()))


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_files(folder, words):
    """Put the files that a command names into the folder it runs in."""
    for name in {"my_run.yaml", "mine.yaml", "my-run.yaml", "RUN.yaml"} & set(words):
        if "--tune" in words:
            continue  # it writes the file
        config = read_run_file("quickstart", [*FEW[1::2], "output_dir=runs/mine"]).as_dict()
        (folder / name).write_text(yaml.safe_dump(config))
        if "--resume" in words:
            put_run(folder / "runs" / "mine", trained=True)
    for before, word in itertools.pairwise(words):
        if re.fullmatch(r"runs/[\w-]+", word) and before not in ("--output-dir", "--output"):
            put_run(folder / word, trained=words[0] not in ("doctor", "report"))
        if word.startswith("model.name=runs/"):
            shutil.copytree(trained_run()[1] / "adapter", word.removeprefix("model.name="))
    for name in ROWS.keys() & set(words):
        write_lines(folder / name, ROWS[name])
    if "--completions" in words:
        rows = (
            {"prompt": f"What is {n}?", "completion": f"hm</think>{n + g % 2}", "answer": str(n)}
            for n in range(4)
            for g in range(4)
        )
        write_lines(folder / "checks" / "a" / "completions.jsonl", rows)


def execute(command, folder, monkeypatch):
    """Execute a command in a folder and check its exit code."""
    if command.startswith(ELSEWHERE):
        return
    monkeypatch.chdir(folder)
    words = shlex.split(re.sub(r"^until (.*?)( \|\| .*)?; do sleep \d+; done$", r"\1", command))
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 2 + 3?\n"))  # for chat
    RUNNERS[words[0]](words[1:], command)


def run_kit(arguments, command):
    arguments = [word.replace("Qwen/Qwen3-0.6B", "tiny-thinker") for word in arguments]
    if arguments[0] == "train" and find_run_file(arguments[1]).exists():
        content = yaml.safe_load(find_run_file(arguments[1]).read_text())
        make_run_config(content)
        if content["model"]["name"] != "tiny-thinker":
            return  # its model is not on this machine
    make_files(Path(), arguments)
    few = EXTRA.get(" ".join(arguments[:2]), EXTRA.get(arguments[0], []))
    if {"adapter", "hub", "--completions"} & set(arguments):  # nothing is sampled
        few = []
    if "--resume" in arguments:  # the run has finished; with more steps, one is trained
        few = ["--set", "trainer.max_steps=2"] if "max_steps" in command else []
    try:
        code = main([*arguments, *few])
    except SystemExit as ended:  # --help, --version
        code = ended.code
    assert code == CODES.get(command, 0)


def run_make(arguments, _):
    """Read the recipe only: `make test` runs this very test."""
    subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, check=True)


def run_pip(arguments, _):
    """Check that the extras exist: nothing is installed in a test."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"(?<!verl)\[(.*?)\]", " ".join(arguments)):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def run_python(arguments, _):
    """Check that a script compiles and has the options: it takes minutes, or downloads."""
    source = (ROOT / arguments[0]).read_text()
    compile(source, arguments[0], "exec")
    assert [word for word in arguments if word[:2] == "--" and f'"{word}"' not in source] == []


RUNNERS = {
    "rloo-kit": run_kit,
    "make": run_make,
    "pip": run_pip,
    "python": run_python,
    "bash": lambda words, _: subprocess.run(["bash", "-n", ROOT / words[0]], check=True),
    "source": lambda *_: None,
}
