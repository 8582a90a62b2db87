"""Bad input: one sentence with the remedy, exit code 2, nothing written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rloo_kit.cli import main
from rloo_kit.errors import ConfigError
from rloo_kit.machine.processes import check_launch

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GOOD = {
    "model": {"name": "tiny-thinker", "max_seq_length": 128},
    "data": {"prompts": "arithmetic", "num_prompts": 16, "held_out": 4},
    "rewards": ["accuracy"],
    "trainer": {"max_steps": 1, "max_completion_length": 32},
}


def run_file(folder: Path, **sections) -> str:
    content = {**GOOD, **sections}
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    return "run.yaml"


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
    left = [
        p for p in sorted(Path.cwd().rglob("*")) if p not in before and "__pycache__" not in str(p)
    ]
    assert left == []


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


CONFIG = {
    "unknown section": ({"modle": {}}, "did you mean 'model'"),
    "partial group": (
        {"trainer": {"num_generations": 3}},
        "set trainer.per_device_train_batch_size to 6 or 9",
    ),
    "training on the held-out prompts": (
        {"data": {**GOOD["data"], "split": "held_out"}},
        "data.split: held_out would train on the held-out prompts",
    ),
    "samples of no held-out prompts": (
        {"data": {"prompts": "arithmetic", "held_out": 0, "held_out_samples": 4}},
        "held_out_samples need held-out prompts: set data.held_out above 0",
    ),
}


@pytest.mark.parametrize("case", CONFIG)
def test_config(case, tmp_path, capsys):
    sections, remedy = CONFIG[case]
    refuse(capsys, remedy, run_file(tmp_path, **sections))


def test_missing_run_file(capsys):
    refuse(capsys, "give the path of a YAML file", "nothing.yaml")


def test_broken_yaml(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("model:\n  name: [tiny\nlora: 3\n")
    refuse(capsys, "in line 3", "run.yaml")


DATA = {
    "missing file": (None, "give the path of a .jsonl, .csv or .parquet file"),
    "bad JSON": ('{"prompt": "a"}\n{"prompt": \n', "line 2"),
    "empty prompt": ('{"prompt": ""}\n', "data.skip_empty: true"),
    "held out too many": ('{"prompt": "a"}\n' * 4, "lower it to at most 3"),
}


def test_a_file_has_no_splits(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 8)
    data = {"prompts": "prompts.jsonl", "held_out": 0, "split": "test"}
    path = run_file(tmp_path, data=data, rewards=["length"])
    refuse(capsys, "split has no effect on the prompts 'prompts.jsonl'", path)


@pytest.mark.parametrize("case", DATA)
def test_data(case, tmp_path, capsys):
    text, remedy = DATA[case]
    if text is not None:
        (tmp_path / "prompts.jsonl").write_text(text)
    data = {"prompts": "prompts.jsonl", "held_out": 4 if "held" in case else 0}
    refuse(capsys, remedy, run_file(tmp_path, data=data, rewards=["length"]))


@pytest.mark.long
def test_a_prompt_that_is_too_long(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "why " * 60}) + "\n")
    data = {"prompts": "prompts.jsonl", "held_out": 0}
    path = run_file(tmp_path, data=data, rewards=["length"])
    refuse(capsys, "(model.max_seq_length in a run file)", path)


def test_a_missing_file_is_looked_for_here_and_beside_the_run_file(tmp_path, capsys):
    folder = tmp_path / "runs of mine"
    (folder / "model").mkdir(parents=True)
    (folder / "prompts.jsonl").touch()
    there = f"does not exist in {tmp_path} or {folder}; did you mean 'prompts.jsonl'?"
    for name in ("promts.jsonl", "prompts.json1"):  # no dataset's name, so the hub is not asked
        run_file(folder, data={"prompts": name})
        refuse(capsys, there, "runs of mine/run.yaml")
    run_file(folder, model={**GOOD["model"], "name": "./modle"})
    there = f"does not exist in {tmp_path} or {folder}; did you mean 'model'?; give a model's"
    refuse(capsys, there, "runs of mine/run.yaml")


def test_the_shipped_run_file_without_its_model_names_the_script(capsys):
    refuse(capsys, "scripts/fetch_smollm2.py", "smollm2", "--set", f"model.name=../x/{SMOLLM2}")


def test_dataset_that_cannot_be_fetched(tmp_path, capsys):
    refuse(capsys, "check the name", run_file(tmp_path, data={"prompts": "someone/something"}))


ASKS = "def good(completions, gold): ..."
NOT_CALLED = {
    "unknown name": ("acuracy", None, "did you mean 'accuracy'"),
    "missing file": ("mine.py:good", None, "does not exist"),
    "missing function": ("mine.py:good", "def better(completions, **_): ...", "better"),
    "missing column": ("mine.py:good", ASKS, "add the column"),
    "column of a built-in": ("rouge", None, "needs the dataset column 'reference'"),
    "column of a route": (
        {"name": "length", "only_for": {"kind": "sum"}},
        None,
        "the dataset has no column 'kind'; add the column, or drop only_for",
    ),
    "column of a gate": ({"name": "length", "only_if": "mine.py:good"}, ASKS, "asks for 'gold'"),
}


@pytest.mark.parametrize("case", NOT_CALLED)
def test_reward_that_is_not_called(case, tmp_path, capsys):
    spec, source, remedy = NOT_CALLED[case]
    if source:
        (tmp_path / "mine.py").write_text(source)
    refuse(capsys, remedy, run_file(tmp_path, rewards=[spec]))


@pytest.mark.long
def test_reward_that_fails_in_the_first_step(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def good(completions, **_): return 1 / 0")
    refuse(capsys, "ZeroDivisionError", run_file(tmp_path, rewards=["mine.py:good"]))


MODELS = {
    "missing folder": ("./models/mine", "give a model's folder"),
    "folder without a model": ("empty", "holds no config.json, so it is not a model"),
    "cannot be fetched": ("someone/something-4B", "check the name and the network"),
    "damaged config": ("damaged", "download it again"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", MODELS)
def test_model(case, tmp_path, capsys):
    name, remedy = MODELS[case]
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text('{"model_type": "qwen3"')
    refuse(capsys, remedy, run_file(tmp_path, model={**GOOD["model"], "name": name}))


SETTINGS = {
    "trainer.deepspeed=ds.json": "examples/accelerate/zero3.yaml -m rloo_kit train RUN.yaml",
    "trainer.fsdp=true": "remove this setting, and start the training with `accelerate launch",
    "trainer.use_liger_kernel=true": "pip install liger-kernel",
    "trainer.sync_ref_model=true": "base model without the adapter: leave it out",
    "data.skip_empty=true": "skip_empty has no effect on the prompts 'arithmetic': drop it",
    "lora.target_modules=all": "must be a list of names such as [q_proj], or all-linear, or",
    "output_dir=run.yaml/run": "'run.yaml/run' cannot be written (Not a directory)",
    # the second start there: its folder would be /proc/self-2
    "output_dir=/proc/self": "'/proc/self-2' cannot be written",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_setting_that_cannot_act_here(setting, tmp_path, capsys):
    refuse(capsys, SETTINGS[setting], run_file(tmp_path), "--set", setting)


def test_deepspeed_under_a_launcher_needs_its_package(monkeypatch):
    with pytest.raises(ConfigError, match="start the training with `accelerate launch"):
        check_launch({"deepspeed": "ds.json"})
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="pip install deepspeed"):
        check_launch({"deepspeed": "ds.json"})
    check_launch({"fsdp": True, "deepspeed": None, "use_liger_kernel": False})


FROM_FILES = """
import sys
from rloo_kit.cli import main
for setting in (
    "data.prompts=none.csv", "output_dir=run.yaml/x", "rewards=[rouge]", "model.name=none.gguf",
    "trainer.deepspeed=x", "output_dir=/proc/self",
):
    assert main(["train", "run.yaml", "--set", setting]) == 2
assert not {"torch", "transformers"} & set(sys.modules), "loaded for nothing"
"""


def test_what_files_say_comes_before_torch_is_loaded(tmp_path):
    run_file(tmp_path)
    done = in_a_process(source=FROM_FILES)
    assert done.returncode == 0, done.stderr


def in_a_process(*, source: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **variables},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.mark.long
def test_backend_that_cannot_start(tmp_path):
    run_file(tmp_path, model={**GOOD["model"], "backend": "unsloth"})
    done = in_a_process(
        source="import sys; from rloo_kit.cli import main; sys.exit(main(['train', 'run.yaml']))",
        UNSLOTH_DISABLE_CPU_FALLBACK="1",
    )
    assert done.returncode == 2
    assert "so Unsloth does not run without a GPU" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_an_engine_that_is_missing_is_refused_before_the_model_is_looked_for(tmp_path, capsys):
    settings = {"model": {"name": "no/such-model"}, "trainer": {"generation": "vllm"}}
    refuse(capsys, "pip install vllm vllm-bnb-plugin", run_file(tmp_path, **settings))
