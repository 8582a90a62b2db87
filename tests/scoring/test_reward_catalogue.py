"""What `rewards list` and `rewards show` say, of built-in rewards and of an installed package's."""

import os
import subprocess
import sys
import zipfile

import pytest
from rloo_kit.rewards import BUILTIN

from rloo_kit.cli import main
from rloo_kit.errors import RewardLoadError
from rloo_kit.scoring.catalogue import describe_reward, describe_rewards, entry_text
from rloo_kit.scoring.loading import load_reward

PACKAGE = {
    "pyproject.toml": """
        [build-system]
        requires = ["setuptools"]
        build-backend = "setuptools.build_meta"
        [project]
        name = "polite-rewards"
        version = "1.2"
        [project.entry-points."rloo_kit.rewards"]
        polite = "polite_rewards:Polite"
        shouting = "polite_rewards:shouting"
        whisper = "polite_rewards:WHISPER"
        length = "polite_rewards:shouting"
        broken = "polite_rewards:missing"
        absent = "no_such_module:Reward"
    """,
    "polite_rewards.py": '''
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Polite:
    """Reward a completion that says please."""

    __name__: ClassVar[str] = "polite"
    bonus: float = 1.0
    """Score of a polite one."""

    def __call__(self, completions, **_):
        return [self.bonus * ("please" in text) for text in completions]


def shouting(completions, mark="!"):
    """Reward an exclamation mark."""
    return [float(mark in text) for text in completions]


WHISPER = Polite(bonus=0.5)
''',
}


@pytest.fixture(scope="module")
def plug_in(tmp_path_factory):
    """The folder of a package that was built into a wheel and unpacked, as an install does."""
    source = tmp_path_factory.mktemp("source")
    for name, text in PACKAGE.items():
        lines = text.splitlines()
        indent = 8 if name.endswith(".toml") else 0
        (source / name).write_text("\n".join(line[indent:] for line in lines))
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."],
        cwd=source, check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("site")
    (wheel,) = (source / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(plug_in, *arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(plug_in)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


SCORES = """
from rloo_kit.scoring.loading import load_rewards
texts = ["yes please", "no!"]
specs = ["polite", "polite:0.5", {"name": "polite", "bonus": 3}, "shouting",
         {"name": "shouting", "mark": "no"}, "whisper", {"name": "whisper", "bonus": 2}]
for reward in load_rewards(specs):
    print(reward.name, reward.weight, reward.func(completions=texts))
"""


@pytest.mark.long
def test_a_plug_in_is_named_like_a_built_in_reward(plug_in):
    done = run(plug_in, "-c", SCORES)
    assert done.stdout.splitlines() == [
        "polite 1.0 [1.0, 0.0]",
        "polite_2 0.5 [1.0, 0.0]",
        "polite_3 1.0 [3.0, 0.0]",
        "shouting 1.0 [0.0, 1.0]",
        "shouting_2 1.0 [0.0, 1.0]",
        "polite_4 1.0 [0.5, 0.0]",
        "polite_5 1.0 [2.0, 0.0]",
    ], done.stderr


@pytest.mark.long
def test_the_list_survives_a_broken_plug_in(plug_in):
    done = run(plug_in, "-m", "rloo_kit", "rewards", "list")
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert set(lines) == {*BUILTIN, "polite", "shouting", "whisper", "broken", "absent"}
    assert lines["polite"].endswith("says please. (from polite-rewards)")
    assert "cannot be used" in lines["broken"]
    assert "No module named 'no_such_module'" in lines["absent"]


@pytest.mark.long
def test_a_plug_in_is_shown_with_its_parameters(plug_in):
    shown = run(plug_in, "-m", "rloo_kit", "rewards", "show", "polite").stdout
    assert "polite (from polite-rewards)" in shown
    assert "bonus = 1.0\n      Score of a polite one." in shown
    assert "bonus = 0.5" in run(plug_in, "-m", "rloo_kit", "rewards", "show", "whisper").stdout
    assert "mark = '!'" in run(plug_in, "-m", "rloo_kit", "rewards", "show", "shouting").stdout


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_every_built_in_reward_is_described_in_full(name):
    entry = describe_reward(name)
    assert entry.origin == "built in"
    assert entry.summary.endswith(".")
    assert len(entry.summary) > 20
    assert ">>>" in entry.text, "no example"
    assert [p.name for p in entry.parameters if not p.text] == []
    assert f"- {{name: {name}, weight: 0.5" in entry_text(entry)


def test_the_list_has_every_built_in_reward(capsys):
    assert main(["rewards", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} >= set(BUILTIN)
    assert [entry.name for entry in describe_rewards() if "cannot be used" in entry.summary] == []


def test_an_unknown_name_offers_the_nearest(capsys):
    assert main(["rewards", "show", "thinkign"]) == 2
    assert "did you mean 'thinking'" in capsys.readouterr().err
    with pytest.raises(RewardLoadError, match="did you mean 'accuracy'"):
        load_reward("acuracy")
