"""The GPU acceptance suite: everything that only a card can show, in about ten minutes.

    bash benchmarks/gpu_acceptance.sh                    # all of it, at most ten minutes
    bash benchmarks/gpu_acceptance.sh --minutes 20       # with more time, more of it
    bash benchmarks/gpu_acceptance.sh --parts tests planner
    bash benchmarks/gpu_acceptance.sh --toy              # tries the suite itself, also on a CPU

Every part is a process of its own with a time limit, so one that fails or hangs costs no other.
What is missing here (a GPU, a package, memory, time) is skipped by its name. The results are
written after every part: gpu_acceptance_CARD.json, and the same as Markdown. The exit code is 0
when every part passed or was skipped, 1 otherwise. Nothing is downloaded: weights are random and
made here.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from gpu_report import markdown

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GIB = 2**30
# Without these the kit trains nothing
KIT = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "dotenv", "yaml", "rich")
# A part is not begun with less time left
LEAST_SECONDS = 20
# Times the seconds of a part, where a CPU of any kind computes it
TOY_PATIENCE = 6
NO_GPU = "no GPU here (torch.cuda.is_available() is false)"


@dataclass(frozen=True)
class Part:
    """One process of the suite."""

    name: str
    family: str
    box: int
    """Seconds it may take."""
    arguments: tuple[str, ...]
    """Of gpu_parts.py; of pytest where the family is ``tests``."""
    needs: tuple[str, ...] = KIT
    gib: float = 0.0
    """Memory of the smallest card it runs on."""
    beside: bool = False
    """Whether it may run at the same time as others: no times, no memory are measured."""
    on_cpu: bool = False
    """Whether it says something without a GPU."""
    only_gpu: bool = False
    """Whether not even ``--toy`` tries it without one."""

    @property
    def title(self) -> str:
        """What it is called in the results."""
        return f"{self.family}: {self.name}"


def _tests(name: str, *arguments: str, box: int = 120, **others) -> Part:
    return Part(name, "tests", box, arguments, beside=others.pop("beside", True), **others)


def _engine(kind: str) -> tuple[str, str, str]:
    return ("tests/gpu/test_vllm_engine.py", "-k", kind)


def _planner(geometry: str, card: int, box: int = 120) -> Part:
    arguments = ("planner", "--geometry", geometry, "--card", str(card))
    return Part(f"{geometry} on {card} GB", "planner", box, arguments, gib=0.96 * card)


def _card(
    geometry: str, card: int, bits: int, name: str, *words: str, backend: str = "unsloth"
) -> Part:
    """Train with vLLM on a card made small; several of them run at the same time."""
    arguments = ("card", "--geometry", geometry, "--card", str(card), "--bits", str(bits))
    needs = VLLM if backend == "transformers" else (*VLLM, "unsloth")
    title = f"{geometry} in {bits} bit on {card} GB, {name}"
    arguments += ("--backend", backend, *words)
    return Part(title, "cards", 540, arguments, needs, gib=2.0 * card, beside=True, only_gpu=True)


VLLM = (*KIT, "bitsandbytes", "vllm")
PARTS = (
    Part("environment", "environment", 300, ("environment",), needs=("torch",), on_cpu=True),
    _tests("tensors", "tests/gpu/test_tensors.py", box=60, needs=("torch",)),
    _tests("4-bit weights", "tests/gpu/test_four_bit.py", box=150),
    _tests("trainer", "tests/gpu/test_trainer.py", box=300),
    _tests("reward model", "tests/rewards/test_reward_model.py", box=90, only_gpu=True),
    _tests("vLLM in 16 bit", *_engine("bf16"), box=300),
    _tests("vLLM in 4 bit", *_engine("4-bit"), box=300),
    _tests("vLLM with shared weights", *_engine("shared"), box=300),
    _tests("vLLM with shared weights, merged", *_engine("merged"), box=300),
    _tests("quickstart", "tests/gpu/test_quickstart.py", box=400),
    _tests("evaluation and export", "tests/gpu/test_taking_away.py", box=240),
    _tests("release", "tests/gpu/test_release.py", box=240, beside=False),
    _planner("qwen3-0.6b", 8),
    _planner("qwen3-4b", 12),
    _planner("qwen3-4b", 16),
    _planner("qwen3-8b", 24, box=150),
    _card("toy", 8, 4, "shared weights"),
    _card("toy", 8, 16, "shared weights"),
    _card("toy", 8, 16, "own copy", backend="transformers"),
    _card("qwen3-4b", 12, 4, "shared weights"),
    _card("qwen3-0.6b", 8, 16, "shared weights"),
    _card("qwen3-8b", 24, 4, "shared weights"),
    _card("qwen3-1.7b", 12, 16, "own copy", backend="transformers"),
    _card("qwen3-4b", 16, 4, "own copy", backend="transformers"),
    Part("Qwen3-4B", "speed", 150, ("speed",), gib=7.5),
    Part(
        "against stock TRL", "learn-step", 120, ("learn-step", "--backend", "transformers"), gib=6
    ),
    Part(
        "against Unsloth's TRL",
        "learn-step",
        120,
        ("learn-step", "--backend", "unsloth"),
        (*KIT, "unsloth"),
        gib=6,
    ),
    Part("vLLM against transformers", "generation", 150, ("generation",), VLLM, gib=6),
    Part("Qwen3-4B sampled by vLLM", "generation", 180, ("vllm-speed",), VLLM, gib=11),
)
FAMILIES = tuple(dict.fromkeys(part.family for part in PARTS))
ON_CPU = "RLOO_KIT_GPU_TESTS_ON_CPU"


@dataclass
class Suite:
    """What all parts share."""

    options: argparse.Namespace
    machine: dict
    scratch: Path
    variables: dict[str, str]
    started: float = field(default_factory=time.monotonic)
    rows: dict[str, dict] = field(default_factory=dict)
    children: set = field(default_factory=set)
    earlier: dict[str, dict] = field(default_factory=dict)
    """Rows of an earlier result that ``--add`` extends."""

    @property
    def left(self) -> float:
        """Seconds until the time is over."""
        return self.options.minutes * 60 - (time.monotonic() - self.started)

    def end(self) -> None:
        """End every part that still runs."""
        for process in list(self.children):
            _end(process)


def machine_here(variables: dict[str, str], folder: Path) -> dict:
    """Return what a fresh process sees: torch's version and the card; empty without torch."""
    source = (
        "import json, torch\n"
        "cuda = torch.cuda.is_available()\n"
        "card = torch.cuda.get_device_properties(0) if cuda else None\n"
        "print(json.dumps({'torch': torch.__version__, 'card': card.name if cuda else None,"
        " 'memory': card.total_memory if cuda else 0}))\n"
    )
    if importlib.util.find_spec("torch") is None:
        return {}
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True, text=True, env=variables, cwd=folder, timeout=300, check=False,
    )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not found:
        return {"fault": f"torch cannot be imported: {_last_line(done.stderr)}"}
    return json.loads(found[-1])


def child_variables(scratch: Path) -> dict[str, str]:
    """Return the environment of every part: offline, unbuffered, and the kit of this folder."""
    variables = dict(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    if not _installed():
        paths.insert(0, str(_overlay(scratch / "kit")))
    variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return variables


def _installed() -> bool:
    try:
        return importlib.util.find_spec("rloo_kit.rewards") is not None
    except ImportError:
        return False


def _overlay(folder: Path) -> Path:
    """Lay the packages out as an installation would, where the kit is not installed."""
    package = folder / "rloo_kit"
    package.mkdir(parents=True, exist_ok=True)
    sources = [*(ROOT / "rloo_kit").iterdir(), ROOT / "rewards", ROOT / "examples"]
    for source in sources:
        place = package / source.name
        if source.name != "__pycache__" and not place.exists():
            place.symlink_to(source)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    facts = folder / f"rloo_kit-{version}.dist-info"
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rloo-kit\nVersion: {version}\n")
    return folder


# --- which parts, and why not --------------------------------------------------------------------


def why_not(part: Part, suite: Suite) -> str | None:
    """Return why a part cannot run here, or None."""
    if suite.machine.get("fault"):
        return suite.machine["fault"]
    missing = [name for name in part.needs if not _has(name)]
    if missing:
        return " and ".join(f"{name} is not installed" for name in missing)
    toy = suite.options.toy
    if not suite.machine.get("card") and not part.on_cpu and (part.only_gpu or not toy):
        return NO_GPU
    memory = suite.machine.get("memory", 0)
    if memory < part.gib * GIB and not toy:
        return f"the card has {memory / GIB:.1f} GiB, and this takes {part.gib:.1f}"
    return None


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def chosen(names: Sequence[str]) -> list[Part]:
    """Return the parts whose family or name was given; all of them for none."""
    if not names:
        return list(PARTS)
    known = {*FAMILIES, *(part.name for part in PARTS)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(
            f"--parts {unknown[0]!r} is no part: give some of {', '.join(sorted(known))}"
        )
    return [part for part in PARTS if part.family in names or part.name in names]


# --- running them --------------------------------------------------------------------------------


def command_of(part: Part, suite: Suite, files: Path) -> list[str]:
    """Return what is started for a part; its answer goes to files in ``files``."""
    if part.family != "tests":
        words = [
            str(HERE / "gpu_parts.py"),
            *part.arguments,
            "--answer",
            str(files / "answer.json"),
        ]
        words += ["--scratch", str(suite.scratch)]
        return [sys.executable, *words, *(["--toy"] if suite.options.toy else [])]
    file, *others = part.arguments
    path = ROOT / file
    return [
        sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "gpu_pytest",
        "-p", "no:cacheprovider", "-p", "no:logging", "--tb=short",
        "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--confcutdir",
        str(path.parent), "--basetemp", str(files / "tmp"), str(path), *others,
    ]  # fmt: skip


def run_part(part: Part, suite: Suite) -> dict:
    """Run one part and return its row; nothing it does raises here."""
    row = {"name": part.name, "family": part.family, "status": "skipped", "seconds": 0.0}
    reason = why_not(part, suite)
    if reason is None and suite.left < LEAST_SECONDS:
        reason = f"not begun: {suite.options.minutes:g} minutes are over (--minutes allows more)"
    if reason:
        return row | {"reason": reason}
    files = Path(tempfile.mkdtemp(prefix="part-", dir=suite.scratch))
    full = part.box * (TOY_PATIENCE if suite.options.toy else 1)
    box = min(full, suite.left)
    started = time.monotonic()
    code, log = _started(part, suite, files, box)
    row["seconds"] = round(time.monotonic() - started, 1)
    short = box < full
    ended = None if code is not None else f"stopped after {box:.0f} s"
    if ended and short:
        ended += f", when {suite.options.minutes:g} minutes were over (--minutes allows more)"
    judge = _judge_tests if part.family == "tests" else _judge_worker
    row |= judge(files, code, ended, _last_line(log.read_text(errors="replace")))
    if ended and short and row["status"] == "failed":
        row["status"] = "skipped"
    if row["status"] == "failed":
        row["log"] = log.read_text(errors="replace")[-6000:]
    shutil.rmtree(files, ignore_errors=True)
    return row


def _started(part: Part, suite: Suite, files: Path, box: float) -> tuple[int | None, Path]:
    """Run a part's process; return its exit code, None where the time limit ended it, and its log.

    The process leads a group of its own, which is ended with it.
    """
    log = files / "log.txt"
    own = files if part.beside else suite.scratch
    variables = suite.variables | {
        "RLOO_KIT_TEST_LINES": str(files / "tests.jsonl"),
        # two processes that write the same compiled files at once read each other's halves
        "UNSLOTH_COMPILE_LOCATION": str(own / "unsloth_compiled_cache"),
        "XDG_CACHE_HOME": str(suite.scratch / "cache"),
    }
    if "tests/gpu/test_vllm_engine.py" in part.arguments:
        variables["RLOO_KIT_GPU_CARD"] = "12"  # else vLLM sees what the others take and free
    if suite.options.toy and not suite.machine.get("card"):
        variables |= {ON_CPU: "1", "RLOO_KIT_GPU_TEST_STEPS": "2"}
    with log.open("w") as out:
        process = subprocess.Popen(
            command_of(part, suite, files),
            stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=variables, cwd=files, start_new_session=True,
        )  # fmt: skip
        suite.children.add(process)
        try:
            code = process.wait(timeout=box)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
            suite.children.discard(process)
    return code, log


def _end(process: subprocess.Popen) -> None:
    """End what is left of a process that this suite started, and of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _judge_worker(files: Path, code: int | None, ended: str | None, last: str) -> dict:
    answer = _read_json(files / "answer.json")
    row = {"data": {k: v for k, v in answer.items() if k not in ("skipped", "failed")}}
    if ended:
        return row | {"status": "failed", "reason": ended}
    if code or answer.get("failed"):
        return row | {"status": "failed", "reason": answer.get("failed") or f"{last} (code {code})"}
    if answer.get("skipped"):
        return row | {"status": "skipped", "reason": answer["skipped"]}
    return row | {"status": "passed"}


def _judge_tests(files: Path, code: int | None, ended: str | None, last: str) -> dict:
    """Return the row of a pytest process, from the lines it wrote while it ran."""
    path = files / "tests.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    tests: dict[str, dict] = {}
    for line in lines:
        tests[line["name"]] = line
    for test in tests.values():
        if test["status"] == "begun":
            test["status"] = "failed"
            test["reason"] = ended or f"the process ended in it, with code {code}: {last}"
    row = {"tests": list(tests.values())}
    failed = [test for test in tests.values() if test["status"] == "failed"]
    if failed:
        return row | {"status": "failed", "reason": f"{len(failed)} of {len(tests)} tests failed"}
    if ended or (code not in (0, 5)) or not tests:
        return row | {"status": "failed", "reason": ended or f"no test ran: {last} (code {code})"}
    reasons = {test["reason"] for test in tests.values() if test["status"] == "skipped"}
    if all(test["status"] == "skipped" for test in tests.values()):
        return row | {"status": "skipped", "reason": "; ".join(sorted(reasons))}
    return row | {"status": "passed"}


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


# --- the whole -----------------------------------------------------------------------------------


def note(part: Part, row: dict, suite: Suite) -> None:
    """Keep a row, write the files and say how it went."""
    suite.rows[part.title] = row
    write(suite)
    passed = time.monotonic() - suite.started
    print(f"[{passed:4.0f} s] {part.title}: {_said(row)}", flush=True)
    for test in row.get("tests", ()):
        print(f"           {test['name']}: {_said(test)}", flush=True)


def _said(row: dict) -> str:
    if row["status"] == "passed":
        return f"passed in {row.get('seconds', 0):.0f} s"
    return f"{row['status']}: {row.get('reason')}"


def result_path(suite: Suite) -> Path:
    """Return where the JSON of this card goes."""
    slug = re.sub(r"[^a-z0-9]+", "-", (suite.machine.get("card") or "cpu").lower()).strip("-")
    return suite.options.output / f"gpu_acceptance_{slug}{'_toy' if suite.options.toy else ''}.json"


def write(suite: Suite) -> Path:
    """Write the JSON and the Markdown of what there is so far; return the JSON."""
    path = result_path(suite)
    path.parent.mkdir(parents=True, exist_ok=True)
    order = {part.title: place for place, part in enumerate(PARTS)}
    rows = {**suite.earlier, **suite.rows}
    content = {
        "suite": "rloo-kit GPU acceptance, 1",
        "card": suite.machine.get("card"),
        "torch": suite.machine.get("torch"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": _command(suite.options),
        "toy": suite.options.toy,
        "seconds": round(time.monotonic() - suite.started, 1),
        "parts": [rows[name] for name in sorted(rows, key=lambda name: order.get(name, 99))],
    }
    _replace(path, json.dumps(content, indent=1) + "\n")
    _replace(path.with_suffix(".md"), markdown(content))
    return path


def _replace(file: Path, text: str) -> None:
    partial = file.with_suffix(f"{file.suffix}.partial")
    partial.write_text(text)
    partial.replace(file)


def _command(options: argparse.Namespace) -> str:
    """Return how the suite was called, without the folders of whose machine it was."""
    words = ["bash benchmarks/gpu_acceptance.sh", f"--minutes {options.minutes:g}"]
    words += ["--toy"] if options.toy else []
    words += ["--parts", *options.parts] if options.parts else []
    return " ".join(words)


def run_all(suite: Suite, parts: Sequence[Part]) -> None:
    """Run the parts; those that measure nothing beside each other, where the card has the room."""
    memory, cores = suite.machine.get("memory", 0), os.cpu_count() or 1
    jobs = min(5, int(memory // (12 * GIB)), cores // 3) or 1
    beside = [part for part in parts if part.beside and jobs > 1]
    first = [part for part in parts if part.family == "environment"]
    for part in first:
        note(part, run_part(part, suite), suite)
    pool = ThreadPoolExecutor(jobs)
    try:
        futures = {pool.submit(run_part, part, suite): part for part in beside}
        for future in as_completed(futures):
            note(futures[future], future.result(), suite)
    finally:
        suite.end()
        pool.shutdown(cancel_futures=True)
    for part in parts:
        if part not in beside and part not in first:
            note(part, run_part(part, suite), suite)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    families = ", ".join(FAMILIES)
    add("--parts", nargs="*", default=[], metavar="PART", help=f"some of {families}; or by name")
    add("--minutes", type=float, default=10.0, help="that all parts may take")
    add("--output", type=Path, default=HERE / "results", help="folder for the two files")
    add("--scratch", type=Path, help="folder for models made on the way, up to 12 GB")
    add("--toy", action="store_true", help="tiny models, to try the suite itself; on a CPU too")
    add("--add", action="store_true", help="keep an earlier result's parts that are not run again")
    options = parser.parse_args(arguments)
    options.output = options.output.resolve()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; return its exit code."""
    options = parse(arguments)
    parts = chosen(options.parts)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also then nothing is left running
    scratch = Path(tempfile.mkdtemp(prefix="rloo-kit-acceptance-", dir=options.scratch))
    try:
        variables = child_variables(scratch)
        suite = Suite(options, machine_here(variables, scratch), scratch, variables)
        if options.add:
            rows = _read_json(result_path(suite)).get("parts", [])
            suite.earlier = {f"{row['family']}: {row['name']}": row for row in rows}
        card = suite.machine.get("card") or "no GPU"
        print(f"{card}, torch {suite.machine.get('torch')}; at most {options.minutes:g} minutes")
        try:
            run_all(suite, parts)
        finally:
            suite.end()
            path = write(suite)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    statuses = [row["status"] for row in suite.rows.values()]
    counts = ", ".join(f"{statuses.count(name)} {name}" for name in ("passed", "skipped", "failed"))
    seconds = time.monotonic() - suite.started
    print(f"{counts} in {seconds:.0f} s; send back {path} and {path.with_suffix('.md').name}")
    return 1 if "failed" in statuses else 0


if __name__ == "__main__":
    sys.exit(main())
