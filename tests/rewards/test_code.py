"""Code: the score is the share of the tests that pass, and a program cannot forge it."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rloo_kit.rewards import Code
from rloo_kit.rewards._sandbox import Outcome, protections
from rloo_kit.rewards.code import fenced_code

from rloo_kit.errors import BackendError, RewardContractError

HELD = protections()
strong = pytest.mark.skipif(
    not (HELD["landlock"] and HELD["seccomp"]), reason="this machine cannot confine a program"
)
pytestmark = pytest.mark.usefixtures("workers")
ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]
ECHO = [{"input": "a b\n", "output": "a b"}]


def fenced(program, tag="python"):
    return f"Let me see.</think>This is it:\n```{tag}\n{program}\n```\nDone."


def score(program, tests, **parameters):
    return Code(**parameters)(completions=[fenced(program)], tests=[tests])[0]


# --- what is the program --------------------------------------------------------------------------


BLOCKS = {
    "```\nx\n```": "x\n",
    "```Python3\nx\n```": "x\n",
    "a\n  ```python\r\nx\r\n```": "x\r\n",
    "```python\na\n```\n```python\nb\n```": "b\n",
    "```bash\npip\n```": None,
    "```python\nx": None,
    "```python\n```": "",
    "``` python\nx\n```": "x\n",
    "```python\ns = '```'\n```": "s = '```'\n",
}


@pytest.mark.parametrize(("text", "program"), BLOCKS.items())
def test_the_last_closed_block_of_python_is_the_program(text, program):
    assert fenced_code(text) == program


@pytest.mark.long
@strong
def test_a_block_in_the_thought_does_not_count():
    thought = f"<think>```python\n{ADD}\n```"
    texts = [f"{thought}</think>I give up.", thought, f"{thought}</think>{fenced(ADD)}"]
    assert Code()(completions=texts, tests=[TESTS] * 3) == [0.0, 0.0, 1.0]
    row = {"completions": [f"```\n{ADD}\n```"], "prompts": ["Q <think>"], "tests": [TESTS]}
    assert Code()(**row) == [0.0]
    assert Code(require_closed_thought=False)(**row) == [1.0]


# --- what are the tests ---------------------------------------------------------------------------


IN_PYTHON = {
    "assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'": 1.0,
    '["assert add(1, 2) == 3", "assert add(1, 1) == 3"]': 0.5,
    "assert 3 == add(1, 2)\nassert 0": 0.5,
    "assert add(1, 1) != 3, 'message'\nassert add(1, 1) in (1, 2)": 1.0,
    "import math\nassert math.isclose(add(.1, .2), .3)": 1.0,
    "x = add(1, 2)\nassert x == 3\nx += 1\nassert x == 4": 1.0,
    "M = {}\ndef check(candidate):\n    'all'\n    assert candidate(1, 2) == 3\n"
    "    assert candidate(1, 1) == 3\ncheck(add)": 0.5,
    "def check(f):\n    for n in range(3):\n        assert f(n, 0) == n\ncheck(add)": 1.0,
    "assert add(1, 2) == nothing": 0.0,
    "assert add(add, 1)": 0.0,
}


@strong
@pytest.mark.parametrize(
    ("tests", "wanted"),
    [*IN_PYTHON.items(), (tuple(TESTS), 1.0), ([*TESTS, "assert add(1, 1) == 3"], 2 / 3)],
)
def test_tests_in_python(tests, wanted):
    assert score(ADD, tests) == pytest.approx(wanted)


OF_OUTPUT = {
    '[{"input": "a b", "output": "a b"}, {"input": "a", "output": "b"}]': 0.5,
    '{"inputs": ["a\\n", "b\\n"], "outputs": ["a\\n", "b\\n"]}': 1.0,
    '{"input": ["a"], "output": ["c"]}': 0.0,
    '{"inputs": ["a"], "output": ["a"]}': 1.0,
    '[{"input": ["1", "2"], "output": ["1  ", "2", ""], "id": 7}]': 1.0,
    '[{"input": "é\\n", "output": "é"}]': 1.0,
    '[{"input": " a", "output": "a"}, {"input": "a", "output": "\\na"}]': 0.0,
}


@pytest.mark.long
@strong
@pytest.mark.parametrize(("tests", "wanted"), [*OF_OUTPUT.items(), (ECHO, 1.0)])
def test_tests_of_input_and_output(tests, wanted):
    assert score("import sys\nprint(sys.stdin.read())", tests) == wanted


def test_without_tests_there_is_no_score():
    tests = [None, [], " ", "null", float("nan"), {"inputs": [], "outputs": []}]
    assert Code()(completions=["x"] * 6, tests=tests) == [None] * 6


@pytest.mark.parametrize(
    "tests",
    [
        '["assert 1", {}]',
        '[{"input": "a"}]',
        '{"a": 1}',
        '{"inputs": ["a"], "outputs": "b"}',
        '{"fn_name": "f", "inputs": [[1]], "outputs": [2]}',
        "7",
    ],
)
def test_what_is_no_test_is_named(tests):
    with pytest.raises(RewardContractError, match=r"'tests' holds .* give a list of asserts"):
        Code()(completions=["x"], tests=[tests])


@pytest.mark.long
@pytest.mark.parametrize(
    "test",
    [
        "",
        "import math",
        "def test_add():\n    assert add(1, 2) == 4",
        "def f(): 0\n'f'",
        "async def test_add():\n    assert add(1, 2) == 4",
        "def test_add():\n    assert add(1, 2) == 4\nif __name__ == '__main__':\n    test_add()",
        "def test_add():\n    assert add(1, 2) == 4\nif '__main__' == __name__:\n    test_add()",
        "async def test_add():\n    assert add(1, 2) == 4\ntest_add()",
    ],
)
def test_a_test_that_every_program_passes_is_refused(test):
    with pytest.raises(
        RewardContractError, match=r"every program passes; add an assert.*, outside of `if __n"
    ):
        Code()(completions=["x"], tests=[[test]])


OF_A_MODULE = {
    "if __name__ == 'program':\n    assert add(1, 2) == 4": 0.0,
    "if __name__ == '__main__':\n    pass\nelse:\n    assert add(1, 2) == 4": 0.0,
    "import asyncio\nasync def test():\n    assert add(1, 2) == 3\nasyncio.run(test())": 1.0,
    "assert add(1, 2) == 3\nassert add(1, 2) == 4\nif __name__ == '__main__':\n    f()": 0.5,
}


@strong
@pytest.mark.parametrize(("test", "wanted"), OF_A_MODULE.items())
def test_only_code_that_runs_as_a_script_is_left_out(test, wanted):
    assert score(ADD, [test]) == wanted


# --- a verdict cannot be had by other means -------------------------------------------------------

FORGED = {
    "sys.exit before the tests": "import sys; sys.exit(0)",
    "os._exit before the tests": "import os; os._exit(0)",
    "sys.exit in the tests": "def add(a, b): raise SystemExit(0)",
    "os._exit in the tests": "import os\ndef add(a, b): os._exit(0)",
    "a printed verdict": "print('0 passed\\n1 passed\\nOK')\nfor n in range(3, 20):\n  try:\n"
    "    import os; os.write(n, b'0 passed\\n1 passed\\n')\n  except OSError: pass",
    "equal to everything": "class Any:\n  def __eq__(s, o): return True\n  __hash__ = None\n"
    "def add(a, b): return Any()",
    "equal text": "class Any(str):\n  def __eq__(s, o): return True\n"
    "def add(a, b): return Any()",
    "a repr": "class Any:\n  def __repr__(s): return '3'\ndef add(a, b): return Any()",
    "json in its own hand": "import json\njson.dumps = lambda *a: 'passed'\n"
    "def add(a, b): return 0",
    "reports of other tests": "import sys\nreport = sys._getframe(1).f_locals['report']\n"
    "for n in range(2, 9): report(n, 'passed')",
    "broken reports": "import sys\nreport = sys._getframe(1).f_locals['report']\n"
    "report('\\n1\\n', '')",
    "pipes closed": "import os; os.closerange(3, 64)\ndef add(a, b): return 0",
    "a bad syntax": "def add(a, b) return",
    "no such name": "def sub(a, b): return a",
    "an error": "1 / 0",
    "nothing": "",
}  # fmt: skip


@strong
@pytest.mark.parametrize("program", FORGED.values(), ids=FORGED)
def test_a_verdict_cannot_be_forged(program):
    tests = ["assert add(1, 2) == 3", "assert add(271828, 271828 * 2) == 815484"]
    assert score(program, tests, timeout_seconds=2) == 0.0


@pytest.mark.long
@strong
@pytest.mark.parametrize("name", [name for name in FORGED if "equal" not in name])
def test_nor_that_of_a_test_judged_where_the_program_runs(name):
    tests = ["assert add(1, 2) in [3]", "for n in range(3):\n    assert add(n, 4) == n + 4"]
    assert score(FORGED[name], tests, timeout_seconds=2) == 0.0


SEARCH = """
import gc, sys
def add(a, b):
    frame, seen = sys._getframe(), repr(gc.get_objects())
    while frame: seen += repr(frame.f_locals); frame = frame.f_back
    return a + b if str(a + b) in seen else None
"""


SEARCH_FILES = """
import os
def add(a, b):
    for number in range(64):
        try: seen = os.pread(number, 1 << 20, 0)
        except OSError: continue
        if str(a + b).encode() in seen: return a + b
"""


@strong
def test_the_expected_value_is_in_no_file_of_the_program():
    assert score(SEARCH_FILES, ["assert add(271828, 543656) == 815484"]) == 0.0


@pytest.mark.long
@strong
def test_the_expected_value_is_not_in_the_memory_of_the_program():
    assert score(SEARCH, ["assert add(271828, 543656) == 815484"]) == 0.0
    # This protects only equations: any other test runs inside the program, which can search it
    assert score(SEARCH, ["assert add(271828, 543656) in [815484]"]) == 1.0


# --- what a program does costs its own sample the reward, and nothing else ------------------------

ATTACKS = [
    # Fork bomb
    "import os\nwhile True: os.fork()",
    # Bomb of threads
    "import threading, time\nwhile True:\n"
    "  try: threading.Thread(target=time.sleep, args=(9,)).start()\n"
    "  except RuntimeError: pass",
    # Endless print
    "while True: print('x' * 1000)",
    # Endless print to stderr
    "import sys\nwhile True: sys.stderr.write('x' * 1000)",
    # Busy
    "while True: pass",
    # Asleep
    "import time; time.sleep(100)",
    # Asleep for good
    "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
    "while True: signal.pause()",
    # One big text
    "'x' * 10**11",
    # A growing list
    "a = []\nwhile True: a.append(bytes(1 << 22))",
    # Deep recursion
    "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    # Deep recursion in C
    "a = []\nfor n in range(10**6): a = [a]\nrepr(a); exec('(' * 10**6)",
    # Many files
    "n = 0\nwhile True: open(str(n), 'w').write('x' * 1000); n += 1",
    # A deep folder
    "import os\nwhile True: os.mkdir('a'); os.chdir('a')",
    # A large file
    "f = open('a', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    # A segmentation fault
    "import ctypes; ctypes.string_at(0)",
    # Kill the parent
    "import os\nos.kill(os.getppid(), 9); print('done')",
    # A server
    "import socket\nsocket.create_server(('127.0.0.1', 0)); print('done')",
    # The parent's environment
    "import os\nprint('=' in open(f'/proc/{os.getppid()}/environ').read() and 'done')",
]


@pytest.mark.long
@strong
def test_attacks_in_one_batch_cost_their_own_rewards_and_nothing_else(tmp_path, monkeypatch):
    """The test of each attack expects the result that the attack tries to reach."""
    monkeypatch.chdir(tmp_path)
    programs = [*ATTACKS, *[f"{ADD}\n{attack}" for attack in ATTACKS]]  # with asserts too
    expected = [[{"input": "", "output": "done"}]] * len(ATTACKS)
    tests = [*expected, *[TESTS] * len(ATTACKS)]
    for row in range(0, 2 * len(ATTACKS) + 9, 9):  # good programs among them
        programs.insert(row, f"{ADD}\nprint('a b')")
        tests.insert(row, [TESTS, ECHO][row % 2])
    reward = Code(timeout_seconds=1, max_workers=16, memory_mib=256)
    began = time.monotonic()
    scores = reward(completions=[*map(fenced, programs)], tests=tests)
    assert time.monotonic() - began < 60
    rows = zip(programs, scores, strict=True)
    assert [program for program, given in rows if given != ("print('a b')" in program)] == []


# --- values as text -------------------------------------------------------------------------------


IMPORTS = (
    "from collections import Counter\nfrom decimal import Decimal\nfrom fractions import Fraction"
)
EQUAL = [
    "1 == True",
    "1 == 1 + 0j",
    "{1, 2} == frozenset({2, 1.0})",
    "b'a' == bytearray(b'a')",
    "{1: 'a', 2: 'b'} == {2: 'b', 1: 'a'}",
    "[1, (2,)] == [1, (2.0,)]",
    "10**5000 == 10**5000",
    "0.0 == -0.0",
    "Fraction(1, 2) == 0.5",
    "Decimal('0.5') == 0.5",
    "Counter('aa') == {'a': 2}",
]
DIFFERENT = [
    "1 == '1'",
    "[1] == (1,)",
    "0.1 + 0.2 == 0.3",
    "{1} == [1]",
    "b'a' == 'a'",
    "{} == set()",
    "['list', 1] == [[1]]",
    "1j == 1",
    "float('inf') == float('-inf')",
    "int == float",
    "{1: 2} == {1: 3}",
    r"'\ud800' == '\ud801'",
    "'null' == None",
    "Decimal('0.1') == 0.1",
]


@strong
@pytest.mark.parametrize(("equations", "share"), [(EQUAL, 1.0), (DIFFERENT, 0.0)])
def test_values_are_compared_outside_the_program_as_python_does(equations, share):
    assert score(IMPORTS, [f"assert {equation}" for equation in equations]) == share


CHECK = (
    "def check(candidate):\n    assert candidate(1) == 11\n    assert candidate(2) == 22\n"
    "    assert True, 'reached'\n\ncheck(f)"
)


@pytest.mark.long
@strong
@pytest.mark.parametrize(
    ("program", "test", "share"),
    [
        ("def f(x): return 11 * x", CHECK, 1.0),
        (
            "def f(x):\n    known = globals()['check'].__code__.co_consts\n"
            "    return known[known.index(x) + 1]",
            CHECK,
            0.0,
        ),
        ("def f(x): return 5", "wanted = 5\nassert f(2) == wanted", 1.0),
        ("f = lambda x: x + 1", "def ref(x): return x + 1\nassert f(3) == ref(3)", 1.0),
    ],
)
def test_a_check_function_as_in_humaneval_is_taken_apart(program, test, share):
    assert score(program, [test]) == share


OF_A_CLASS = {
    "import enum\nclass Color(enum.Enum):\n    RED = 1\nassert f() == Color.RED": "Color.RED",
    "import dataclasses\n@dataclasses.dataclass\nclass Point:\n    x: int\n"
    "assert f() == Point(1)": "Point(1)",
    "class Box:\n    def __init__(self, x): self.x = x\n"
    "    def __eq__(self, other): return self.x == other.x\nassert f() == Box(1)": "Box(1)",
}


@strong
@pytest.mark.parametrize(("test", "value"), OF_A_CLASS.items())
def test_an_expected_value_may_be_of_a_class_of_the_test(test, value):
    assert score(f"def f(): return {value}", [test]) == 1.0
    assert score("def f(): return 1", [test]) == 0.0


def test_ctrl_c_ends_what_has_not_begun(monkeypatch):
    class Interrupted(ThreadPoolExecutor):
        def submit(self, *arguments):
            if self._work_queue.qsize() > 20:
                raise KeyboardInterrupt
            return super().submit(*arguments)

    runs = []

    def run(program, **_):
        time.sleep(0.1)
        runs.append(program)
        return Outcome(ok=True, reason="", stdout="", layers=())

    monkeypatch.setattr("rloo_kit.rewards.code.run_python", run)
    monkeypatch.setattr("rloo_kit.rewards.code.ThreadPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        Code(max_workers=1)(completions=[fenced(ADD)] * 40, tests=[TESTS] * 40)
    assert len(runs) < 5


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux and BSD have it")
def test_no_more_programs_run_than_the_process_may_use_cores(monkeypatch):
    numbers = []

    def pool(number, name):
        numbers.append(number)
        return ThreadPoolExecutor(number, name)

    monkeypatch.setattr("rloo_kit.rewards.code.ThreadPoolExecutor", pool)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    for reward in (Code(), Code(max_workers=7)):
        reward(completions=["x"], tests=[None])
    assert numbers == [3, 7]


# --- an error in one row --------------------------------------------------------------------------


def test_an_error_waits_only_for_the_programs_that_run(monkeypatch):
    begun = threading.Event()
    runs = []

    def run(program, **_):
        if program == "bad\n":
            begun.wait(10)
            raise BackendError("the sandbox failed")
        runs.append(program)
        begun.set()
        time.sleep(0.1)
        return Outcome(ok=True, reason="", stdout="a b", layers=())

    monkeypatch.setattr("rloo_kit.rewards.code.run_python", run)
    texts = [fenced("bad"), fenced("slow")]
    with pytest.raises(BackendError, match="the sandbox failed"):
        Code(max_workers=2)(completions=texts, tests=[ECHO, ECHO * 20])
    assert len(runs) < 5
