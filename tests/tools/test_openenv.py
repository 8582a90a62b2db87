"""Environments on a real OpenEnv server: sessions, rewards, and the same training as without."""

import contextlib
import datetime
import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

import rloo_kit as rk
from rloo_kit.errors import DataError
from rloo_kit.scoring.contract import OverdueError, within
from rloo_kit.tools.calculator import calculator
from rloo_kit.tools.environments import Environments

pytest.importorskip("openenv", reason="make setup-openenv")
pytestmark = pytest.mark.long

SERVER = '''
import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from rloo_kit.tools.calculator import calculator


class Compute(Action):
    expression: str


class Result(Observation):
    result: str


class Calculator(Environment):
    """An episode of two computations; each costs 0.1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, answer="", **others):
        self.left = 2
        self.answer = answer
        return Result(result="")

    def step(self, action, timeout_s=None, **others):
        if action.expression == "slow":
            time.sleep(2)
        value = calculator(action.expression.replace("slow", "99"))
        self.left -= 1
        return Result(result=value, reward=-0.1, done=not self.left)

    @property
    def state(self):
        return State()


app = create_fastapi_app(Calculator, Compute, Result, max_concurrent_envs=16)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
'''


@pytest.fixture(scope="module")
def url():
    """A server with room for 16 sessions."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = subprocess.Popen([sys.executable, "-c", SERVER, str(port)])
    try:
        for _ in range(240):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            assert running.poll() is None
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        running.kill()
        running.wait()


def played_at(address):
    class Remote(rk.OpenEnv):
        url = address

        def calculator(self, expression: str) -> str:
            """Compute an arithmetic expression exactly.

            Args:
                expression: Whole numbers, + - * / and brackets.
            """
            return self._step(expression=expression)

    return Remote


class Local:
    """The calculator as a class."""

    def reset(self, **row):
        pass

    def calculator(self, expression: str) -> str:
        """Compute an arithmetic expression exactly.

        Args:
            expression: Whole numbers, + - * / and brackets.
        """
        return calculator(expression)


def test_an_episode_has_observations_rewards_and_an_end(url):
    one, other = played_at(url)(), played_at(url)()
    row = {"prompt": [{"role": "user", "content": "1 + 1"}], "answer": "2"}
    assert one.reset(**row) == other.reset(**row) == ""
    assert one.get_reward() == 0.0
    assert one.calculator("1 + 1") == "2"
    assert other.calculator("2 * 3") == "6"
    assert one.get_reward() == pytest.approx(-0.1)
    with pytest.raises(RuntimeError, match="not an expression"):
        one.calculator("one")
    assert one.calculator("3 + 4") == "7"
    assert one.calculator("3 + 4") == "The episode has ended."
    assert one.get_reward() == pytest.approx(-0.2)
    assert one.reset(**row) == ""
    assert one.get_reward() == 0.0


def test_an_open_session_does_not_keep_a_program_from_ending(url):
    program = (
        "import sys\nimport rloo_kit as rk\n\n"
        "class Remote(rk.OpenEnv):\n    url = sys.argv[1]\n\n"
        "one = Remote()\none.again = one\none.reset()\nprint('done')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, url], timeout=120, check=True, capture_output=True
    )
    assert (ran.stdout, ran.stderr) == (b"done\n", b"")


def test_a_late_answer_is_never_read(url):
    one = played_at(url)()
    row = {"prompt": [], "day": datetime.date(2026, 11, 26)}  # a value that is no JSON
    one.reset(**row)
    with pytest.raises(OverdueError):
        within(0.3, lambda: one.calculator("slow"))
    with pytest.raises(ConnectionError, match="the session was lost"):
        one.calculator("1 + 1")
    assert one.reset(**row) == ""
    assert one.calculator("1 + 1") == "2"
    assert one.get_reward() == pytest.approx(-0.1)


def test_a_lost_connection_is_opened_again_by_reset(url):
    one = played_at(url)()
    one.reset()
    client = one._client
    client._run(client._async._ws.close())
    assert one.reset() == ""
    assert one.calculator("1 + 1") == "2"


def test_a_server_that_is_gone_is_named():
    with pytest.raises(DataError, match=r"Remote\.reset raised .*127\.0\.0\.1:9"):
        Environments(played_at("http://127.0.0.1:9")).begin([{"prompt": []}])


def test_function_class_and_server_train_alike_bit_for_bit(tmp_path, url, trainer_of):
    found = []
    reward = ["accuracy", {"name": "tool_use", "called": 0, "cost": 0.1}]
    remote = played_at(url)
    remote.get_reward = lambda self: None  # the same rewards in all
    at_server = {"environment_factory": remote}
    ways = ({"tools": [calculator]}, {"environment_factory": Local}, at_server)
    for how in (*ways, at_server):  # again: a release ends all 16 sessions
        seen = []

        class Take(TrainerCallback):
            def on_completions(self, args, state, control, rollout, seen=seen, **_):
                tokens = rollout.sampled.tokens
                seen.append((tokens.completion_ids, tokens.is_sampled))

        trainer = trainer_of(tmp_path, reward_funcs=[*reward], callbacks=[Take()], **how)
        trainer.train()
        weights = {n: p.detach().clone() for n, p in trainer.trained_parameters().items()}
        found.append((seen, weights))
        rk.release(trainer)
    (ids, weights), *others = found
    assert any(not all(mask) for _, masks in ids for mask in masks)
    for other_ids, other_weights in others:
        assert other_ids == ids
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_a_run_file_names_a_class_with_a_server(tmp_path, url):
    (tmp_path / "game.py").write_text(
        "import rloo_kit as rk\n\n\nclass Game(rk.OpenEnv):\n"
        f"    url = {url!r}\n\n"
        "    def calculator(self, expression: str) -> str:\n"
        '        """Compute.\n\n        Args:\n            expression: What.\n        """\n'
        "        return self._step(expression=expression)\n"
    )
    # 8 of the training, and 8 of the 16 held-out prompts at a time
    (tmp_path / "run.yaml").write_text(
        "model: {name: tiny-caller, max_seq_length: 512}\n"
        "data: {prompts: sums, num_prompts: 64, held_out: 16}\n"
        "environment: game.py:Game\n"
        "rewards: [accuracy]\n"
        "trainer: {max_steps: 2, per_device_train_batch_size: 8, num_generations: 4,\n"
        "  max_completion_length: 192}\n"
        f"output_dir: {tmp_path}/out\n"
    )
    result = rk.train(tmp_path / "run.yaml")
    assert result.before.rewards["Game"] == pytest.approx(-0.02, abs=0.02)
    lines = Path(result.folder, "completions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    calls = [len(row["completion"]) // 2 for row in rows]
    assert any(calls)
    assert [row["rewards"]["Game"] for row in rows] == pytest.approx([-0.1 * one for one in calls])
