"""Windows and macOS: the kit in a process that hides what only POSIX or Linux has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HIDES = ROOT / "tests/scripts/no_posix"

pytestmark = pytest.mark.long
PROGRAM = """
import importlib, json, os, signal, sys, threading, time
from pathlib import Path

assert sys.modules["fcntl"] is None and not hasattr(os, "killpg")
root, facts, lines = Path(sys.argv[1]), {}, []

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.machine.cleanup import take_peak
from rloo_kit.runs.child import call_in_child

facts["child"] = call_in_child(print, ("caf\\u00e9 \\u2588",), lines.append), lines[:]

def interrupt():
    for _ in range(3):
        time.sleep(0.7)
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
threading.Thread(target=interrupt).start()
try:
    call_in_child(time.sleep, (120,), print)
except KeyboardInterrupt:
    facts["killed"] = True

rk.setup("transformers")
for path in sorted((root / "rloo_kit").rglob("*.py")) + sorted((root / "rewards").glob("*.py")):
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    if path.stem != "__main__":
        importlib.import_module(name if name.startswith("rloo_kit") else f"rloo_kit.{name}")

assert main(["plan", "quickstart"]) == 0
rows = [{"prompt": "1+1", "completion": f"hm</think>{n}", "answer": "2"} for n in (2, 3)]
check = rk.check_rewards(rewards=["math", "accuracy"], completions=rows, say=lines.append)
facts["scores"] = [sample["rewards"] for sample in check.samples]

short = [
    "model.backend=transformers", "data.num_prompts=16", "data.held_out=16",
    "trainer.per_device_train_batch_size=16", "trainer.save_steps=1",
]
first = rk.train("quickstart", [*short, "trainer.max_steps=1"], lines.append)
run = rk.train("quickstart", [*short, "trainer.max_steps=2"], lines.append, resume=True)
facts["run"] = [first.steps, run.steps, sorted(os.listdir(run.folder)), str(run.folder)]
facts["peak"], facts["released"] = take_peak(), run.released.freed_resident

from rloo_kit.machine.hardware import why_not_vllm
from rloo_kit.rewards import Code
sys.platform, os.name = "win32", "nt"
refused = [why_not_vllm()]
for allow_weak in (False, True):
    try:
        Code(allow_weak=allow_weak)
    except rk.KitError as exc:
        refused.append(str(exc))
sys.platform, os.name = "linux", "posix"
print(json.dumps(facts | {"refused": refused}))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """The results of the program, which runs in a process of its own."""
    env = os.environ | {
        "PYTHONPATH": f"{HIDES}{os.pathsep}{ROOT}",
        "PYTHONWARNDEFAULTENCODING": "1",
        "PYTHONIOENCODING": "cp1252",  # as on Windows if output is redirected
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT)],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env=env, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_trains_resumes_reports_and_releases(facts):
    first, steps, files, folder = facts["run"]
    assert (first, steps, folder) == (1, 2, str(Path("runs/quickstart")))
    assert {"adapter", "metrics.jsonl", "report.html"} <= {*files}
    assert "run.lock" not in files
    assert facts["peak"] > 0


def test_rewards_are_checked(facts):
    assert facts["scores"] == [{"math": score, "accuracy": score} for score in (1.0, 0.0)]


def test_a_subprocess_answers_and_can_be_killed(facts):
    assert facts["child"] == [None, ["caf\u00e9 \u2588"]]
    assert facts["killed"]


def test_vllm_and_the_sandbox_say_that_they_need_linux(facts):
    vllm, *sandbox = facts["refused"]
    assert vllm == "vLLM needs Linux or WSL, and this is win32"
    sentence = "the code sandbox needs Linux, and this is win32; use WSL or a container"
    assert sandbox == [sentence, sentence]
