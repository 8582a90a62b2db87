"""Bad input: one sentence with the remedy, exit code 2, nothing written."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from fresh_python import run_python

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.config.run_file import RunConfig, make_run_config, read_run_file
from rloo_kit.errors import ConfigError
from rloo_kit.job import read_config, read_prompts, with_whole_paths
from rloo_kit.machine.processes import check_launch


def refuse(capsys, remedy: str, *arguments: str) -> None:
    """Run ``rloo-kit train`` here and check the sentence, the code, and that nothing is left."""
    before = sorted(Path.cwd().rglob("*"))
    code = main(["train", *arguments])
    printed = capsys.readouterr().err
    complaint = [line for line in printed.splitlines() if line.startswith("rloo-kit: ")]
    assert code == 2
    assert len(complaint) == 1, printed
    assert remedy in complaint[0]
    assert "Traceback" not in printed
    left = [path for path in Path.cwd().rglob("*") if "__pycache__" not in str(path)]
    assert sorted(left) == before


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


SETTINGS = {
    "data.split=held_out": "data.split: held_out would train on the held-out prompts",
    "data={prompts: arithmetic, held_out: 0, held_out_samples: 4}": (
        "held_out_samples need held-out prompts: set data.held_out above 0"
    ),
    "data.skip_empty=true": "skip_empty has no effect on the prompts 'arithmetic': drop it",
    "rewards=[rouge]": "asks for 'reference', which the dataset lacks; add",
    "rewards=[{name: length, only_if: rouge}]": "reward 'rouge' asks for 'reference'",
    "rewards=[{name: accuracy, only_for: {knd: sum}}]": "no column 'knd'; add the column, or drop",
    "rewards=['mine.py:asks']": "add the column",
    "trainer.deepspeed=ds.json": (
        "start the training with `accelerate launch "
        "--config_file examples/accelerate/zero3.yaml -m rloo_kit train RUN.yaml"
    ),
    "trainer.fsdp=true": "remove this setting, and start the training with `accelerate launch",
    "trainer.use_liger_kernel=true": "pip install liger-kernel",
    "trainer.sync_ref_model=true": "base model without the adapter: leave it out",
    "lora.target_modules=all": "must be a list of names such as [q_proj], or all-linear, or",
    "output_dir=mine.py/run": "'mine.py/run' cannot be written (Not a directory)",
    "output_dir=.": "output_dir is '.', must be the name of a new folder",
    # the second start there: its folder would be /proc/self-2
    "output_dir=/proc/self": "'/proc/self-2' cannot be written",
}
WITH_LIBRARIES = {
    "rewards=['mine.py:fails']": "ZeroDivisionError",
    "data={prompts: long.jsonl, held_out: 0}": "(model.max_seq_length in a run file)",
    "model.name=empty": "holds no config.json, so it is not a model",
    "model.name=damaged": "download it again",
}
LONG = [pytest.param(*row, marks=pytest.mark.long) for row in WITH_LIBRARIES.items()]


@pytest.mark.parametrize(("setting", "remedy"), [*SETTINGS.items(), *LONG])
def test_a_setting_that_cannot_act_here_is_refused(setting, remedy, capsys):
    Path("mine.py").write_text(
        "def asks(completions, gold): ...\ndef fails(completions, **_): return 1 / 0\n"
    )
    Path("long.jsonl").write_text(json.dumps({"prompt": "why " * 900, "answer": "1"}))
    Path("empty").mkdir()
    Path("damaged").mkdir()
    Path("damaged/config.json").write_text('{"model_type": "qwen3"')
    refuse(capsys, remedy, "quickstart", "--set", setting)


def test_a_missing_file_is_looked_for_here_and_beside_the_run_file(tmp_path, capsys):
    folder = tmp_path / "runs of mine"
    (folder / "model").mkdir(parents=True)
    (folder / "prompts.jsonl").touch()
    there = f"does not exist in {tmp_path} or {folder}; did you mean"
    for content, meant in {
        "data: {prompts: promts.jsonl}": "'prompts.jsonl'?",
        "data: {prompts: prompts.json1}": "'prompts.jsonl'?",  # no dataset's name: not on the hub
        "model: {name: ./modle}": "'model'?; give a model's",
    }.items():
        (folder / "run.yaml").write_text(content)
        refuse(capsys, f"{there} {meant}", "runs of mine/run.yaml")


def test_a_file_beside_the_run_file_comes_before_one_in_the_working_folder(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    folder.mkdir()
    for place in (tmp_path, folder):
        (place / "p.jsonl").write_text(json.dumps({"prompt": place.name}))
    (folder / "run.yaml").write_text("data: {prompts: p.jsonl, held_out: 0}")
    config, base = read_config("project/run.yaml", ())
    assert read_prompts(config, base)[0]["prompt"][0][0]["content"] == "project"
    assert with_whole_paths(config, base, base).data.prompts == str(folder / "p.jsonl")
    monkeypatch.setattr("rloo_kit.job.EXAMPLES", base)  # what the user has comes first
    assert with_whole_paths(config, base, base).data.prompts == str(tmp_path / "p.jsonl")


def test_a_path_is_whole_and_a_linked_file_keeps_its_name(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "hub").mkdir()
    for name in ("tiny.gguf", "p.jsonl", "own.py"):  # as in the hub's cache
        (tmp_path / "blobs" / name[:1]).touch()
        (tmp_path / "hub" / name).symlink_to(f"../blobs/{name[:1]}")
    (tmp_path / "link").symlink_to("hub")
    content = {
        "model": {"name": "link/tiny.gguf"},
        "data": {"prompts": "link/p.jsonl"},
        "rewards": ["link/own.py:own"],
        "tools": ["link/own.py"],
    }
    config = make_run_config(content)
    whole = with_whole_paths(config, Path(), Path())
    assert whole.model.name == str(tmp_path / "hub" / "tiny.gguf")
    assert whole.data.prompts == str(tmp_path / "hub" / "p.jsonl")
    assert whole.rewards == [f"{tmp_path}/hub/own.py:own"]
    assert whole.tools == [f"{tmp_path}/hub/own.py"]


def test_only_paths_become_whole(tmp_path):
    (tmp_path / "org/judge").mkdir(parents=True)
    judge = {"name": "judge:0.5", "model": "org/judge", "rubric": "right and/or short " * 400}
    rewards = ["length", judge, {"name": "reward_model", "model": "org/judge"}]
    whole = with_whole_paths(make_run_config({"rewards": rewards}), Path(), Path()).rewards
    assert whole[:2] == rewards[:2]
    assert whole[2]["model"] == str(tmp_path / "org/judge")


COMMANDS = {
    "reward-model train pairs.jsonl --set max_steps=0": "max_steps is 0: set it to 1 or more",
    "reward-model train pairs.jsonl --output-dir a --set output_dir=b": "output_dir is given twice",
    "reward-model train pairs.jsonl --set say=1": "'say' is not a setting of a reward model",
    "rewards check quickstart --completions c.jsonl --prompts 3": "num_prompts has no effect",
    "rewards check quickstart --completions c.jsonl --generations 3": "num_generations has no",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_an_option_without_effect_is_refused(words, capsys):
    assert main(words.split()) == 2
    assert COMMANDS[words] in capsys.readouterr().err


QUICKSTART = read_run_file("quickstart")
WRONG = {
    "data.held_out is -3": replace(QUICKSTART, data=replace(QUICKSTART.data, held_out=-3)),
    "lora.r is 'x'": replace(QUICKSTART, lora=replace(QUICKSTART.lora, r="x")),
    "model: must have": RunConfig(model="tiny-thinker"),
    "a reward as 'file.py:function'": replace(QUICKSTART, rewards=[print]),
    "a path as str": replace(QUICKSTART, output_dir=Path("x")),
    "cannot be read from a dict": {"trainer": {"max_steps": 1}},
}


@pytest.mark.parametrize("says", WRONG)
def test_settings_of_python_are_checked_like_those_of_a_file(says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        rk.train(WRONG[says])


def test_a_single_override_of_python_may_be_a_text():
    with pytest.raises(ConfigError, match=r"trainer.max_steps is 'x'"):
        rk.train("quickstart", "trainer.max_steps=x")


def test_the_shipped_run_file_without_its_model_names_the_script(capsys):
    missing = "model.name=../x/SmolLM2-135M-Instruct.Q4_1.gguf"
    refuse(capsys, "scripts/fetch_smollm2.py", "smollm2", "--set", missing)


@pytest.mark.long
def test_an_engine_that_is_missing_is_refused_before_the_model_is_looked_for(capsys):
    sets = ["--set", "model.name=no/such-model", "--set", "trainer.generation=vllm"]
    refuse(capsys, "pip install vllm vllm-bnb-plugin", "quickstart", *sets)


def test_deepspeed_under_a_launcher_needs_its_package(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="pip install deepspeed"):
        check_launch({"deepspeed": "ds.json"})
    check_launch({"fsdp": True, "deepspeed": None, "use_liger_kernel": False})


FROM_FILES = """
import sys
from rloo_kit.cli import main
for setting in (
    "data.prompts=none.csv", "output_dir=/proc/self", "rewards=[rouge]", "model.name=none.gguf",
    "trainer.deepspeed=x",
):
    assert main(["train", "quickstart", "--set", setting]) == 2
assert not {"torch", "transformers"} & set(sys.modules), "loaded for nothing"
"""


def test_what_files_say_comes_before_torch_is_loaded():
    run_python(FROM_FILES)


BY_UNSLOTH = """
import sys
sys.stderr = sys.stdout
from rloo_kit.cli import main
assert main(["train", "quickstart", "--set", "model.backend=unsloth"]) == 2
"""


@pytest.mark.long
def test_backend_that_cannot_start(tmp_path):
    said = run_python(BY_UNSLOTH, env={**os.environ, "UNSLOTH_DISABLE_CPU_FALLBACK": "1"})
    assert "so Unsloth does not run without a GPU" in said
    assert not (tmp_path / "runs").exists()
