"""A program in the sandbox does its work, reaches nothing, and leaves nothing."""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from rloo_kit.rewards import _confinement
from rloo_kit.rewards._sandbox import Limits, Outcome, protections, run_python

HELD = protections()
strong = pytest.mark.skipif(
    not (HELD["landlock"] and HELD["seccomp"]), reason="this machine cannot confine a program"
)


pytestmark = pytest.mark.usefixtures("workers")


# --- what a program can do ------------------------------------------------------------------------


@strong
def test_a_program_reads_its_input_and_prints():
    outcome = run_python("print(int(input()) + 1)\nprint('é')", stdin="41\n")
    assert outcome == Outcome(True, "", "42\né\n", outcome.layers)
    assert set(outcome.layers) == {name for name, holds in HELD.items() if holds}


@pytest.mark.long
@strong
def test_it_has_the_standard_library_threads_and_event_loops_and_nothing_else():
    program = """
import asyncio, bisect, dataclasses, decimal, heapq, json, random, re, sqlite3, threading, zoneinfo
threading.Thread(target=print, args=("thread",)).start()
async def answer(): return 7
print(asyncio.run(answer()), __name__, bool(dataclasses.make_dataclass("A", ["x"])(1)))
try: import pytest
except ImportError: print("no pytest")
"""
    outcome = run_python(program)
    assert outcome.stdout.split() == ["thread", "7", "__main__", "True", "no", "pytest"]


@pytest.mark.long
@strong
def test_its_folder_is_empty_its_own_and_small():
    program = """
import os
print(os.listdir("."), set(os.environ) <= {"LC_CTYPE"})
open("a", "w").write("b"); os.rename("a", "c"); print(open("c").read(), os.listdir("."))
written = 0
try:
    for n in range(20):
        with open(str(n), "wb") as file: file.write(bytes(1 << 20))
        written += 1
except OSError: print("full")
print(written < 5)
"""
    outcome = run_python(program, limits=Limits(disk_mib=4))
    if HELD["tmpfs"]:
        assert outcome.stdout.splitlines() == ["[] True", "b ['c']", "full", "True"]
    else:
        assert not outcome.ok


REASONS = {
    "import sys; sys.exit(0)": "",
    "import sys; sys.exit(3)": "exit",
    "1/0": "exit",
    "a\0": "exit",
    "'\ud800'": "exit",
    "'x' * 10**11": "exit",
    "import ctypes; ctypes.string_at(0)": "signal",
    "while True: print('x' * 1000)": "output",
    "import os\nos.close(1)\nwhile True: pass": "timeout",
}


@pytest.mark.long
@strong
@pytest.mark.parametrize(("program", "reason"), REASONS.items())
def test_the_reason_says_how_it_ended(program, reason):
    began = time.monotonic()
    outcome = run_python(program, limits=Limits(timeout_seconds=0.5, output_kib=64))
    assert (outcome.ok, outcome.reason) == (not reason, reason)
    assert len(outcome.stdout) <= 64 << 10
    assert time.monotonic() - began < 10


# --- what it cannot reach -------------------------------------------------------------------------

FORBIDDEN = [
    "os.fork()",
    "os.execv('/bin/true', ['true'])",
    "subprocess.run(['true'])",
    "os.posix_spawn('/bin/true', ['true'], {})",
    "multiprocessing.get_context('spawn').Process(target=print).start()",
    "os.kill(os.getppid(), 0)",
    "os.pidfd_open(os.getppid())",  # kill by a pidfd
    "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (64, 64))",  # kill by a limit
    "fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",  # kill by SIGIO
    "os.sched_setaffinity(os.getppid(), {0})",  # slow down
    "socket.socket()",
    "socket.socket(socket.AF_UNIX)",
    "open('/etc/passwd').read()",
    "os.listdir('/')",
    "open(f'/proc/{os.getppid()}/environ', 'rb').read()",  # environment
    "open('/tmp/rloo-kit-written', 'w').write('x')",
    "os.chmod('/tmp', 0o777)",
    "os.truncate('/tmp', 0)",
    "os.utime('/tmp')",
    "open(os.__file__, 'a')",  # library
    "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",  # library without asking to write
    "os.setsid()",  # leave the session
    "os.memfd_create('x')",  # memory outside of the limit
    "call(451, 0, 0, 0, 0) == 0 or failed()",  # a new syscall
    "ctypes.CDLL(None, use_errno=True).prctl(1, 0, 0, 0, 0) == 0 or failed()",  # outlive the parent
]


@strong
def test_nothing_outside_can_be_reached():
    tries = "\n".join(
        f"try: {code}\nexcept OSError: pass\nelse: print({code!r})" for code in FORBIDDEN
    )
    program = f"""
import ctypes, fcntl, multiprocessing, os, resource, socket, subprocess
call = ctypes.CDLL(None, use_errno=True).syscall
def failed(): raise OSError(ctypes.get_errno())
{tries}
print("end")
"""
    outcome = run_python(program)
    assert outcome.stdout == "end\n"


@pytest.mark.long
@strong
def test_a_program_ends_with_its_parent(workers):
    code = (
        "from rloo_kit.rewards._sandbox import Limits, run_python\n"
        "run_python('import time; time.sleep(60)', limits=Limits(timeout_seconds=60))"
    )
    place = tempfile.gettempdir()
    environment = {**os.environ, "TMPDIR": place}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as parent:
        wait_for(lambda: [*workers()] != [])
        parent.kill()
        parent.wait()
    wait_for(lambda: [*workers()] == [])
    for folder in Path(place).iterdir():  # the parent was killed before it could
        folder.rmdir()


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- a machine that lacks a protection ------------------------------------------------------------

WITHOUT = """
import ctypes, struct, sys
from rloo_kit.rewards import _sandbox
libc, number, argument = ctypes.CDLL(None), int(sys.argv[1]), int(sys.argv[2])
lines = [(0x20, 0, 0, 0), (0x15, 1, 0, number), (0x06, 0, 0, 0x7FFF0000)]
if argument >= 0:
    lines += [(0x20, 0, 0, 16), (0x15, 1, 0, argument), (0x06, 0, 0, 0x7FFF0000)]
lines += [(0x06, 0, 0, 0x50026)]
code = b"".join(struct.pack("<HBBI", *line) for line in lines)
buffer = ctypes.create_string_buffer(code, len(code))
libc.prctl(38, 1, 0, 0, 0)
program = struct.pack("@HP", len(lines), ctypes.addressof(buffer))
assert libc.prctl(22, 2, program, 0, 0) == 0
try: print(_sandbox.run_python("print('ran')").stdout, end="")
except _sandbox.BackendError as error: print(error)
print(_sandbox.run_python("print('ran')", limits=_sandbox.Limits(allow_weak=True)).stdout, end="")
print([name for name, holds in _sandbox.protections().items() if not holds])
"""
"""Program that runs the sandbox as if the kernel lacked one system call.

Its arguments are the number of the call, and the first argument for which it is missing (-1: any).
"""


@pytest.mark.long
@strong
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
@pytest.mark.parametrize(
    ("number", "argument", "layer", "says"),
    [
        ("444", "-1", "landlock", "lacks landlock on this machine.*allow_weak=True"),
        ("157", "22", "seccomp", "lacks seccomp on this machine.*allow_weak=True"),
        ("272", "-1", "namespaces", "^ran$"),
    ],
)
def test_a_machine_without_a_layer(number, argument, layer, says):
    command = [sys.executable, "-c", WITHOUT, number, argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, weak, missing = done.stdout.splitlines()
    assert re.search(says, first)
    assert weak == "ran"
    assert layer in missing


# --- the filter of system calls -------------------------------------------------------------------

ALLOWED = 0x7FFF0000
DENIED = 0x50001
MISSING = 0x50026
KILLED = 0x80000000
X86_64 = 0xC000003E
AARCH64 = 0xC00000B7


def verdict(lines, architecture, number, *arguments):
    """Return the kernel's verdict; only the BPF operations that the filter uses are known."""
    data = {0: number, 4: architecture}
    data |= {16 + 8 * i: argument for i, argument in enumerate(arguments)}
    at = value = 0
    while True:
        operation, if_true, if_false, operand = lines[at]
        at += 1
        if operation == 0x20:
            value = data.get(operand, 0)
        elif operation == 0x54:
            value &= operand
        elif operation == 0x06:
            return operand
        else:
            holds = value == operand if operation == 0x15 else value > operand
            at += if_true if holds else if_false


AARCH64_CALLS = {
    (63,): ALLOWED,  # read
    (198,): DENIED,  # socket
    (221,): DENIED,  # execve
    (129,): DENIED,  # kill
    (117,): DENIED,  # ptrace
    (194,): DENIED,  # shmget
    (220, 0x3D0F00): ALLOWED,  # clone, with the flags of a thread
    (220, 0x1200011): DENIED,  # clone, with the flags of fork
    (261, 0): ALLOWED,  # prlimit64 of its own
    (261, 1): DENIED,
    (56, 0, 0, os.O_RDONLY): ALLOWED,  # openat
    (56, 0, 0, os.O_RDONLY | os.O_TRUNC): DENIED,
}


@pytest.mark.parametrize(("call", "wanted"), AARCH64_CALLS.items())
def test_the_filter_on_another_architecture_than_this(call, wanted):
    """For x86_64, the tests above ask the kernel itself."""
    assert verdict(_confinement.system_call_filter("aarch64"), AARCH64, *call) == wanted


@pytest.mark.parametrize(("machine", "own"), [("x86_64", X86_64), ("aarch64", AARCH64)])
def test_the_filter_knows_no_other_numbers(machine, own):
    lines = _confinement.system_call_filter(machine)
    assert verdict(lines, own, 435) == verdict(lines, own, 451) == MISSING
    assert verdict(lines, own, 0x40000000 | 41) == MISSING  # the x32 numbers
    assert verdict(lines, 0x40000003, 4) == KILLED  # 32 bit
