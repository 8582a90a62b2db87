"""Give rloo-kit bad input by the thousands: each must end in a right result or in one sentence.

python fuzz.py [--inputs N] [--seed S] [--only TARGET ...] [--atheris TARGET SECONDS]

Prints a table; failing inputs go to a folder, as pickles that --again FILE tries once more. The
exit code is 1 where anything failed. --atheris looks for new paths in the code instead, and needs
that package.
"""

import argparse
import faulthandler
import os
import pickle
import resource
import select
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fuzz"))
for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ[name] = "1"  # no thread of a library survives a fork
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "RLOO_KIT_LIVE": "off"}

import fuzz_targets
from fuzz_judge import FAILED, LIMIT, REFUSED, RIGHT, Verdict, judged
from fuzz_targets import TARGETS
from hypothesis import HealthCheck, given, seed, settings

MEMORY = 8 << 30
"""Bytes that an input may take beside what is loaded."""


def in_child(one, data):
    """Judge an input in a fork of this process, which it may end or fill."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(judged(one, data), pipe)
        os._exit(0)
    os.close(writer)
    start = time.monotonic()
    ready, _, _ = select.select([reader], [], [], 6 * LIMIT + 5)
    with os.fdopen(reader, "rb") as pipe:
        if not ready:
            os.kill(child, signal.SIGKILL)
        answer = pipe.read() if ready else b""
    _, status = os.waitpid(child, 0)
    seconds = time.monotonic() - start
    if answer:
        return pickle.loads(answer)
    return Verdict(FAILED, seconds, f"the process ended with status {status}" if ready else "hangs")


def tried(target, number, start, keep):
    """Try so many inputs; return a line of the table and the number of failures."""
    found, details, slowest, counted = [], Counter(), 0.0, Counter()
    call = in_child if target.isolated else judged

    @seed(start)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(target.inputs())
    def every(data):
        nonlocal slowest
        faulthandler.dump_traceback_later(10 * LIMIT, exit=True)
        verdict = call(target.one, data)
        faulthandler.cancel_dump_traceback_later()
        counted[verdict.outcome] += 1
        slowest = max(slowest, verdict.seconds)
        if verdict.outcome == FAILED:
            found.append((verdict.detail, data))
        elif verdict.outcome == REFUSED:
            details[verdict.detail[:180]] += 1

    every()
    for place, (detail, data) in enumerate(found):
        keep.mkdir(parents=True, exist_ok=True)
        stem = f"{target.name.replace(' ', '-')}-{place}"
        (keep / f"{stem}.pickle").write_bytes(pickle.dumps((target.name, data)))
        (keep / f"{stem}.txt").write_text(f"{detail}\n\n{data!r}\n"[:20_000], errors="replace")
    return counted, slowest, found, details


def kinds_of(found):
    """Last lines of the failures, each once."""
    return Counter((detail.strip().splitlines() or [""])[-1][:200] for detail, _ in found)


def load(chosen):
    """Import here what would count as an input's time, and what every fork would import again."""
    fuzz_targets.work()  # of this process, before it forks
    if any(target.heavy for target in chosen):
        from rloo_kit.machine.environment import setup

        setup("transformers")
    for target in chosen:
        if target.good is not None:
            first = judged(target.one, target.good())
            assert first.outcome == RIGHT or "more than" in first.detail, first.detail


def table(chosen, args):
    load(chosen)
    parts = sum(target.share for target in chosen)
    total = Counter()
    print(
        f"{'target':<16}{'inputs':>8}{'right':>8}{'refused':>8}{'failed':>8}{'slowest':>10}{'all':>9}"
    )
    for target in chosen:
        began = time.monotonic()
        number = min(target.most, max(1, round(args.inputs * target.share / parts)))
        counted, slowest, found, details = tried(target, number, args.seed, args.keep)
        total += counted
        row = "".join(f"{counted[outcome]:>8}" for outcome in (RIGHT, REFUSED, FAILED))
        spent = time.monotonic() - began
        print(
            f"{target.name:<16}{counted.total():>8}{row}{slowest:>8.2f} s{spent:>7.0f} s",
            flush=True,
        )
        said = kinds_of(found).most_common(12) + (
            details.most_common(args.show) if args.show else []
        )
        for text, times in said:
            print(f"    {times} x {text}")
    print(f"{total.total()} inputs, {total[FAILED]} failures", flush=True)
    return int(total[FAILED] > 0)


def again(file):
    name, data = pickle.loads(Path(file).read_bytes())
    target = next(target for target in TARGETS if target.name == name)
    load([target])
    print((in_child if target.isolated else judged)(target.one, data).detail or "no failure")
    return 0


def guided(name, seconds):
    """Let atheris look for inputs that reach new code; the first failure ends it."""
    try:
        import atheris
    except ImportError:
        print("atheris is not installed: skipped")
        return 0
    ours = ("rloo_kit", "yaml", "gguf", "fuzz_targets", "fuzz_judge")
    for module in [m for m in sys.modules if m.partition(".")[0] in ours]:
        del sys.modules[module]  # they are loaded again, with counters
    with atheris.instrument_imports(include=["rloo_kit", "yaml", "gguf"]):
        import fuzz_judge as judge
        import fuzz_targets as fresh

        target = next(target for target in fresh.TARGETS if target.name == name)
        seeds = fresh.work() / "seeds"
        seeds.mkdir()
        for place, content in enumerate(target.seeds()):
            (seeds / str(place)).write_bytes(content)
            judge.judged(target.one, content)

    def one(data):
        verdict = judge.judged(target.one, data)
        if verdict.outcome == FAILED:
            raise RuntimeError(verdict.detail)

    options = [f"-max_total_time={seconds}", "-max_len=20000", "-timeout=12", str(seeds)]
    atheris.Setup([sys.argv[0], *options], one)
    atheris.Fuzz()
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=20_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="TARGET", default=[])
    parser.add_argument("--keep", type=Path, default=Path("runs/fuzz"), help="for failing inputs")
    parser.add_argument("--show", type=int, metavar="N", help="so many refusals of each target")
    parser.add_argument("--again", metavar="FILE")
    parser.add_argument("--atheris", nargs=2, metavar=("TARGET", "SECONDS"))
    args = parser.parse_args()
    if args.again:
        return again(args.again)
    if args.atheris:
        return guided(args.atheris[0], int(args.atheris[1]))
    chosen = [target for target in TARGETS if not args.only or target.name in args.only]
    if unknown := set(args.only) - {target.name for target in TARGETS}:
        parser.error(f"no target {sorted(unknown)}: there are {[t.name for t in TARGETS]}")
    return table(chosen, args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        for holder in fuzz_targets.cleanup:
            holder.cleanup()
