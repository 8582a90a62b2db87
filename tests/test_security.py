"""What a stranger's file cannot do: run code unnamed, write elsewhere."""

import ast
import functools
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest
from fresh_python import run_python

import rloo_kit as rk
from rloo_kit.errors import RewardLoadError
from rloo_kit.report.page import write_report
from rloo_kit.scoring.specs import load_rewards

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("audit", ROOT / "scripts" / "audit.py")
audit = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(audit)


@pytest.fixture
def ran(tmp_path):
    """A file that is there once code ran that should not."""
    return tmp_path / "ran"


# --- a run file ----------------------------------------------------------------------------------


def test_a_tag_of_yaml_makes_no_object(tmp_path, ran):
    tag = "!!python/object/apply:builtins.open"
    (tmp_path / "run.yaml").write_text(f"output_dir: {tag} [{str(ran)!r}, w]\n")
    with pytest.raises(rk.ConfigError, match="not valid YAML"):
        rk.read_run_file(tmp_path / "run.yaml")
    config = rk.read_run_file("quickstart", [f"output_dir={tag} [{str(ran)!r}, w]"])
    assert config.output_dir.startswith("!!python")  # a text like any other
    assert not ran.exists()


def test_trusted_code_is_off_by_default():
    assert rk.RunConfig().model.trust_remote_code is False


# --- code that a run file names ------------------------------------------------------------------


@pytest.fixture
def rewards(tmp_path, ran, monkeypatch):
    """A folder with a reward file that leaves ``ran`` behind."""
    monkeypatch.chdir(tmp_path)
    code = f"open({str(ran)!r}, 'w').close()\ndef good(completions, **_): return [1.0] * 2\n"
    Path("mine.py").write_text(code)
    yield
    for name in [n for n in sys.modules if n.startswith("_rloo_kit_reward_mine")]:
        del sys.modules[name]


def loaded_lines(spec, ran):
    said = []

    def say(line):
        assert not ran.exists(), "it ran before it was named"
        said.append(line)

    load_rewards([spec], base_dir=".", say=say)
    return said


SPECS = [
    "mine.py:good",
    "mine.py:good:0.5",
    {"name": "mine.py:good", "weight": {0: 1.0, 1: 0.0}},
    {"name": "length", "only_if": "mine.py:good"},
    {"name": "length", "only_if": {"name": "mine.py:good", "at_least": 0.5}},
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_reward_file_is_named_before_it_runs(spec, ran, rewards):
    assert loaded_lines(spec, ran) == ["running code of mine.py (good)"]
    assert ran.exists()


def test_installed_packages_are_named_and_ours_are_not(ran):
    said = loaded_lines("os.path:basename", ran)
    assert said == ["running code of the installed module os.path (basename)"]
    assert loaded_lines("length", ran) == []
    assert loaded_lines({"name": "thinking", "only_if": "thinking_format"}, ran) == []


@pytest.mark.parametrize("key", ["rewards", "tools", "environment"])
def test_train_and_rewards_check_name_code_first(key, ran, rewards):
    spec = {key: "mine.py:lost" if key == "environment" else ["mine.py:lost"]}
    Path("run.yaml").write_text(json.dumps(spec))
    runs = [
        lambda say: rk.train("run.yaml", say=say),
        lambda say: rk.check_rewards("run.yaml", say=say),
        lambda say: rk.check_rewards("run.yaml", completions=[{"prompt": "a"}], say=say),
    ]
    for run in runs if key == "rewards" else runs[:2]:  # a file needs no tools
        said = []
        with pytest.raises(RewardLoadError, match="its file or module has no object named 'lost'"):
            run(said.append)
        assert said == ["running code of mine.py (lost)"]


def test_train_announces_trusted_code_first(rewards):
    settings = {"model": {"name": "./nowhere", "trust_remote_code": True}}
    Path("run.yaml").write_text(json.dumps(settings))
    said = []
    with pytest.raises(rk.ModelError, match="does not exist"):
        rk.train("run.yaml", say=said.append)
    assert len([line for line in said if "model.trust_remote_code" in line]) == 1


def test_file_name_cannot_add_a_line(ran, rewards):
    Path("mine\nall is well.py").write_text("def good(completions): return []\n")
    said = loaded_lines("mine\nall is well.py:good", ran)
    assert said == ["running code of mine\\nall is well.py (good)"]


# --- the folder of a run -------------------------------------------------------------------------


def test_report_writes_one_file_and_follows_no_link(tmp_path):
    outside = tmp_path / "outside"
    run = tmp_path / "run"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "large").write_bytes(b"x" * 5000)
    (outside / "page.html").write_text("mine")
    run.mkdir()
    (run / "elsewhere").symlink_to(outside)
    (run / "report.html").symlink_to(outside / "page.html")
    name = "../../outside/<script>/reward"
    rows = [{"step": n, "reward": 0.5, f"rewards/{name}/mean": 0.5} for n in range(1, 9)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    completion = {"step": 1, "group": 0, "prompt": "../../x", "completion": "/etc/x"}
    completion |= {"rewards": {name: 0.5}, "advantage": 0.1, "score": 0.5}
    (run / "completions.jsonl").write_text(json.dumps(completion) + "\n")
    before = sorted(tmp_path.rglob("*"))
    write_report(run)
    assert sorted(tmp_path.rglob("*")) == before
    assert (outside / "page.html").read_text() == "mine"
    assert not (run / "report.html").is_symlink()


# --- the source ----------------------------------------------------------------------------------

OURS = sorted([*(ROOT / "rloo_kit").rglob("*.py"), *(ROOT / "rewards").glob("*.py")])
MAY_RUN = {
    "child: pickle.loads",  # to a process of its own and back, by a folder of this user's alone
    "run_file: yaml.load",  # with a safe loader: see the tags above
    *(f"{room}: {call}" for room in ("_code_harness", "_confinement") for call in ("exec", "eval")),
}
"""The last are the sandbox."""
RUNS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "torch.load", "numpy.load", "np.load"}
RUNS |= {"pickle.load", "pickle.loads", "joblib.load", "pandas.read_pickle", "os.system"}


@functools.cache
def calls_in(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_no_module_opens_a_pickle_or_evaluates_text():
    found = {(path.stem, ast.unparse(call.func)) for path in OURS for call in calls_in(path)}
    assert {f"{room}: {name}" for room, name in found if name in RUNS} <= MAY_RUN


def test_every_from_pretrained_passes_trust_remote_code():
    seen = 0
    for path in OURS:
        for call in calls_in(path):
            name = ast.unparse(call.func)
            if not name.endswith(".from_pretrained") or name.startswith(("Peft", "Lora")):
                continue  # they read weights or a JSON file and run no code of a model
            given = {word.arg: word.value for word in call.keywords}  # **kwargs is None here
            assert {"trust_remote_code", None} & set(given), (path.name, call.lineno)
            value = given.get("trust_remote_code")
            if isinstance(value, ast.Constant):
                assert value.value is False
            seen += 1
    assert seen >= 8


# --- the audit -----------------------------------------------------------------------------------


def test_only_an_advisory_with_a_fix_fails_the_audit():
    fixable, open_one = (
        {
            "name": "odd",
            "version": "1.0",
            "vulns": [{"id": "CVE-1", "fix_versions": versions, "aliases": []}],
        }
        for versions in (["1.1"], [])
    )
    lines, code = audit.verdict({"dependencies": [fixable, open_one]})
    assert code == 1
    assert "CVE-1, fixed in 1.1" in lines[0]
    assert audit.verdict({"dependencies": [open_one]})[1] == 0


# --- promises of SECURITY.md ---------------------------------------------------------------------


def test_promised_variables_are_set():
    code = """
import os
from rloo_kit.machine import environment
environment.installed_version = lambda name: "0.31"  # vLLM too
environment.set_variables()
print(*(name for name, value in os.environ.items() if value == "1"))
"""
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    promised = set(re.findall(r"`([A-Z_]+)=1`", page)) - {"HF_HUB_OFFLINE"}  # the user's to set
    assert len(promised) == 4
    unset = {name: value for name, value in os.environ.items() if name not in promised}
    assert promised <= {*run_python(code, env=unset).split()}
