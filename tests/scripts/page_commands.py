"""The commands that the pages tell a reader to type, and how a test executes each of them.

``rloo-kit`` runs in this process, on the embedded model and for a step. What cannot be run here is
in ``ELSEWHERE``, with the reason and the test that runs the same.
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
EXTRA = {
    "train": FEW,
    "quickstart": FEW,
    "rewards check": ["--prompts", "4"],
    "reward-model train": ["--set", "max_steps=1", "--set", "held_out=4"],
    "eval": ["--samples", "2", "--num-prompts", "4"],
    "export": ["--prompts", "2"],
    "judge": ["--num-prompts", "4"],
    "chat": ["--max-tokens", "8"],
    "legacy": ["--dry"],  # the translation; tests/config/test_legacy.py trains what comes out
}
"""Command -> arguments that make it small."""
SMALLER = {"Qwen/Qwen3-0.6B": "tiny-thinker"}
"""Argument that names what is not here -> what stands in for it."""
ON_A_CPU = ("smollm2",)
"""Run files of other models that are trained all the same, on the embedded one."""
CODES = {"rloo-kit plan qwen3-8b-16gb --gpu 8GB": 1}
"""Commands whose exit code is to be another one than 0."""
ELSEWHERE = {
    "rloo-kit train mine.yaml --processes 2": (
        "starts processes, which this one cannot be",
        "processes/test_lost_process.py::test_the_command_starts_them_and_names_the_one_that_was_killed",
    ),
    "rloo-kit train mine.yaml --processes 4 --resume": (
        "the same, from a checkpoint",
        "processes/test_lost_process.py::test_a_killed_process_ends_the_run_and_any_number_goes_on",
    ),
    "accelerate launch --multi_gpu --num_processes 2 -m rloo_kit train mine.yaml": (
        "starts processes; there with a file of settings for a CPU in place of --multi_gpu",
        "processes/test_launchers.py::test_a_launcher_trains",
    ),
    "torchrun --nproc_per_node 2 -m rloo_kit train mine.yaml": (
        "starts processes",
        "processes/test_launchers.py::test_a_launcher_trains",
    ),
    "accelerate launch --config_file examples/accelerate/fsdp2.yaml sharded_steps.py 2": (
        "starts processes, minutes long",
        "test_scale.py::test_weights_that_fsdp_divides_train_as_the_page_says",
    ),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 python -m vllm.entrypoints.openai.api_server --model MODEL "
    "--enable-lora --max-lora-rank 16 --max-loras 2 --logprobs-mode processed_logprobs": (
        "a server, in vLLM's own environment",
        "vllm/test_server.py::test_it_waits_for_the_server_and_trains_through_it",
    ),
    "rloo-kit eval runs/quickstart --vllm --samples 16": (
        "needs vLLM, in its own environment",
        "vllm/test_evaluating.py::test_the_command_tells_who_sampled",
    ),
    "rloo-kit export runs/mine --to gguf --dtype q8_0": (
        "needs llama.cpp's converter, and a tokenizer that it knows",
        "test_export.py::test_smollm2_goes_to_gguf_and_ollama_and_back",
    ),
    "rloo-kit export runs/mine --to ollama": (
        "the same",
        "test_export.py::test_smollm2_goes_to_gguf_and_ollama_and_back",
    ),
    "rloo-kit serve runs/quickstart": (
        "a server, in vLLM's own environment",
        "vllm/test_server.py::test_rloo_kit_serve_answers_as_the_adapter_and_as_the_base",
    ),
    "rloo-kit judge runs/mine --by '{name: judge, mode: pairwise, model: qwen3-32b, "
    'base_url: "http://127.0.0.1:8000/v1", rubric: "which summary is better"}\'': (
        "needs a server that judges; there it is a small one",
        "test_evaluating.py::test_a_model_behind_a_server_is_asked_in_both_orders",
    ),
    "lm_eval run --model hf --model_args pretrained=BASE,peft=runs/mine/adapter "
    "--tasks gsm8k,ifeval --limit 200": (
        "another program, whose tasks come from the hub; what it reads is what this writes",
        "test_export.py::test_an_adapter_is_copied_with_its_base_named",
    ),
    "pytest -m gpu tests/gpu -rs": (
        "needs a card; `make test` collects those files, and this holds them to be in the suite",
        "test_gpu_acceptance.py::test_every_test_on_a_card_belongs_to_a_part",
    ),
}
"""Command -> why it cannot run here, and the test that runs it."""
OTHERS = {
    "vllm serve": "vllm/test_server.py::test_it_waits_for_the_server_and_trains_through_it",
    "llama-server": "rewards/test_judge.py::test_a_number_on_the_scale_is_mapped_to_0_1",
    "ollama": "rewards/test_judge.py::test_a_number_on_the_scale_is_mapped_to_0_1",
    "trackio show": "test_report_to.py::test_trackio_holds_every_metric_and_the_completions",
    "tensorboard": "test_report_to.py::test_tensorboard_holds_every_metric_under_train",
    "wandb sync": "test_report_to.py::test_wandb_holds_every_metric_and_the_completions",
    "accelerate launch": "processes/test_launchers.py::test_a_launcher_trains",
    "torchrun": "processes/test_launchers.py::test_a_launcher_trains",
}
"""Other programs that pages name: servers, and views of what a run wrote. What they serve to a run,
or read from it, is what the test of each serves and reads."""


def blocks(page):
    """Return the language and text of every fenced block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M)


def commands(page):
    """Return the commands of a page's bash blocks, without comments, whole over several lines."""
    text = "".join(text for language, text in blocks(page) if language == "bash")
    lines = re.sub(r" *\\\n\s*", " ", text).splitlines()
    return [line for line in (re.sub(r"(^| +)#.*", "", line).strip() for line in lines) if line]


def inline_commands(page):
    """Return the commands that stand within the text of a page."""
    text = re.sub(r"^(```+).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    found = re.findall(rf"`((?:{'|'.join((*RUNNERS, *OTHERS))}) [^`]+)`", text)
    return [re.split(r" \\?\||\.\.\.", command)[0].strip() for command in found]


@functools.cache
def trained_run():
    """Return the folder of a run of one step, made once in a process; copy it."""
    folder = tempfile.TemporaryDirectory()
    with contextlib.chdir(folder.name):
        assert main(["quickstart", *FEW]) == 0
    return folder, Path(folder.name) / "runs" / "quickstart"


def put_run(folder, *, trained):
    """Put a run into a folder: a real one, or rows and settings alone where no weights are read."""
    if trained:
        shutil.copytree(trained_run()[1], folder)
        return
    folder.mkdir(parents=True)
    rows = ({"step": step, "reward": 0.1 * step, "kl": 0.0} for step in range(1, 9))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = read_run_file("quickstart", [*FEW[1::2], f"output_dir={folder}"])
    (folder / "run.yaml").write_text(yaml.safe_dump(config.as_dict()))


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def furnish(folder, words):
    """Put the files that a command names into the folder it runs in."""
    if "--tune" not in words:
        (folder / "my_run.yaml").write_text(
            next(text for kind, text in blocks(README) if kind == "yaml" and "runs/mine" in text)
        )
    for name in {"mine.yaml", "my-run.yaml", "RUN.yaml"} & set(words):
        config = read_run_file("quickstart", [*FEW[1::2], "output_dir=runs/mine"]).as_dict()
        (folder / name).write_text(yaml.safe_dump(config))
        if "--resume" in words:
            put_run(folder / "runs" / "mine", trained=True)
    for before, word in itertools.pairwise(words):
        if re.fullmatch(r"runs/[\w-]+", word) and before not in ("--output-dir", "--output"):
            put_run(folder / word, trained=words[0] not in ("doctor", "report"))
    if "pairs.jsonl" in words:
        rows = (
            {"prompt": f"Say {n}.", "chosen": f"{n}, if you please.", "rejected": f"{n}!"}
            for n in range(16)
        )
        write_lines(folder / "pairs.jsonl", rows)
    if "prompts.jsonl" in words:
        write_lines(folder / "prompts.jsonl", ({"prompt": f"{n} + 1 ="} for n in range(128)))
    if "--completions" in words:
        rows = (
            {"prompt": f"What is {n}?", "completion": f"hm</think>{n + g % 2}", "answer": str(n)}
            for n in range(4)
            for g in range(4)
        )
        write_lines(folder / "checks" / "a" / "completions.jsonl", rows)


def execute(command, folder, monkeypatch):
    """Execute a command in a folder, and hold its exit code against what it is to be."""
    if command in ELSEWHERE:
        check_elsewhere(command)
        return
    monkeypatch.chdir(folder)
    plain = re.sub(r"^until (.*); do sleep \d+; done$", r"\1", command)
    words = shlex.split(plain)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 2 + 3?\n"))  # to chat with
    RUNNERS[words[0]](words[1:], command)


def run_kit(arguments, command):
    arguments = [SMALLER.get(word, word) for word in arguments]
    if arguments[0] == "train" and is_elsewhere(arguments[1]):
        make_run_config(yaml.safe_load(find_run_file(arguments[1]).read_text()))
        if arguments[1] not in ON_A_CPU:
            return  # its settings are those of a card
        arguments += ["--set", "model.name=tiny-thinker", "--set", "model.max_seq_length=512"]
    furnish(Path(), arguments)
    few = EXTRA.get(" ".join(arguments[:2]), EXTRA.get(arguments[0], []))
    if "--resume" in arguments:  # of a run that has ended; with more steps it goes on for one
        few = ["--set", "trainer.max_steps=2"] if "max_steps" in command else []
    try:
        code = main([*arguments, *few])
    except SystemExit as ended:  # --help, --version
        code = ended.code
    assert code == CODES.get(command, 0)


def is_elsewhere(name):
    """Whether a run file's model is not here."""
    file = find_run_file(name)
    return file.exists() and yaml.safe_load(file.read_text())["model"]["name"] != "tiny-thinker"


def run_make(arguments, _):
    """Read the recipe: `make test` runs this very test, and .ci/run runs every target."""
    done = subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def run_pip(arguments, _):
    """Nothing is installed in a test: the extras that are asked for are those of pyproject.toml."""
    assert arguments[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"\[(.*?)\]", " ".join(arguments)):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def run_python(arguments, _):
    """See that a script compiles and has the options: it takes minutes, or downloads."""
    source = (ROOT / arguments[0]).read_text()
    compile(source, arguments[0], "exec")
    options = [word for word in arguments if word.startswith("--")]
    assert [option for option in options if f'"{option}"' not in source] == []


def run_bash(arguments, _):
    """Only its help, which its Python prints."""
    done = subprocess.run(
        ["bash", ROOT / arguments[0], *arguments[1:], "--help"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


RUNNERS = {
    "rloo-kit": run_kit,
    "make": run_make,
    "pip": run_pip,
    "python": run_python,
    "bash": run_bash,
}


def source_of_test(place):
    """Return the file of a test that must be there."""
    file, _, name = place.partition("::")
    source = (ROOT / "tests" / file).read_text()
    assert f"def {name}(" in source
    return source


NOT_THERE = ("--multi_gpu", "--resume", "--by")
"""Options that the other test gives in another form."""


def check_elsewhere(command):
    """See that the test that runs a command is there, and names the command's options."""
    source = source_of_test(ELSEWHERE[command][1])
    if command.startswith(("lm_eval", "accelerate launch --config_file")):
        return  # the options of another program; the test takes the page's own line
    options = [o for o in re.findall(r"--\w[\w-]+", command) if o not in NOT_THERE]
    assert [o for o in options if o not in source] == []
