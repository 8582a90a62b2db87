"""``unsloth:`` and ``vllm:`` of a run file, FP8 and the LM head: obeyed, or one sentence."""

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.config.engine_tables import SET_ELSEWHERE
from rloo_kit.config.run_file import make_run_config, read_run_file
from rloo_kit.errors import ConfigError
from rloo_kit.models.shared_engine import (
    FP32_HEAD,
    STANDBY,
    EngineSettings,
    engine_variables,
    load_shared,
    notes_of,
)
from rloo_kit.planning.memory import planned_engine
from rloo_kit.planning.planner import make_plan
from rloo_kit.runs.folder import check_same_settings
from rloo_kit.sampling.choice import _check_vllm_table
from rloo_kit.sampling.engine import Choice
from rloo_kit.training.preparation import read_config


def refused(tmp_path, capsys, content, *flags, command="train"):
    """The one sentence with which a command refuses a run file."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "run"), **content}))
    assert main([command, str(path), *flags]) == 2
    text = capsys.readouterr().err.strip()
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize("table", list(SET_ELSEWHERE))
def test_a_key_of_the_run_file_is_refused_under_its_other_name(table):
    for key, place in SET_ELSEWHERE[table].items():
        with pytest.raises(ConfigError, match=f"^{table}.{key} is {place} in a run file: write it"):
            make_run_config({table: {key: 1}})
        section, _, name = place.partition(".")
        if name and section != "trainer":
            assert name in make_run_config({}).as_dict()[section]


def test_what_the_kit_sets_itself_is_refused():
    with pytest.raises(ConfigError, match=r"^vllm.enable_lora is set by rloo-kit itself: leave it"):
        make_run_config({"vllm": {"enable_lora": False}})
    for content in ({"vllm": 3}, {"unsloth": ["a"]}):
        with pytest.raises(ConfigError, match="holds `key: value` lines"):
            make_run_config(content)


def test_the_fp32_head_is_the_variable_that_unsloth_reads(monkeypatch):
    monkeypatch.delenv(FP32_HEAD, raising=False)
    with engine_variables(EngineSettings(128, True, 16, 8, fp32_head=True, sleeps=False)):
        assert (os.environ[FP32_HEAD], os.environ[STANDBY]) == ("1", "0")
    assert FP32_HEAD not in os.environ
    source = Path(find_spec("unsloth_zoo").origin).with_name("vllm_utils.py").read_text()
    assert f'os.environ.get("{FP32_HEAD}", "0")' in source


def test_the_shared_engine_refuses_settings_of_another():
    engine = EngineSettings(128, True, 16, 8, not_shared=("swap_space",))
    with pytest.raises(ConfigError, match=r"vllm\.swap_space .*or set model\.backend"):
        load_shared(None, "tiny-thinker", engine, False)


@pytest.mark.long
def test_a_table_reaches_unsloth(tmp_path, monkeypatch):
    from unsloth import FastLanguageModel

    seen, load = {}, FastLanguageModel.from_pretrained
    monkeypatch.setattr(
        FastLanguageModel,
        "from_pretrained",
        staticmethod(lambda *args, **given: (seen.update(given), load(*args, **given))[1]),
    )
    rk.load_model("tiny-thinker", max_seq_length=128, unsloth_tiled_mlp=True)
    assert seen["unsloth_tiled_mlp"] is True


# --- what a machine cannot obey -------------------------------------------------------------------

FP8 = {"name": "tiny-thinker", "load_in_fp8": True, "load_in_4bit": False}
QUICK = {"max_steps": 1, "max_completion_length": 16, "per_device_train_batch_size": 8}


@pytest.mark.long
def test_fp8_on_a_cpu_is_one_sentence(tmp_path, capsys):
    text = refused(tmp_path, capsys, {"model": FP8, "trainer": QUICK})
    assert text.endswith(
        "model.load_in_fp8 needs a GPU of compute capability 9.0 or more, and there is none here: "
        "set it to false"
    )
    text = refused(tmp_path, capsys, {"model": {"fp8_kv_cache": True}, "trainer": QUICK})
    assert "model.fp8_kv_cache needs a GPU of compute capability 8.0 or more" in text


def test_fp8_and_4_bit_contradict_each_other(tmp_path, capsys):
    text = refused(tmp_path, capsys, {"model": {"load_in_fp8": True}})
    assert "model.load_in_fp8 and model.load_in_4bit are both true: set model.load_in_4bit" in text
    with pytest.raises(ConfigError, match="set load_in_4bit to false"):
        rk.load_model("tiny-thinker", load_in_fp8=True)


@pytest.mark.long
def test_an_engine_that_does_not_sample_takes_no_settings(tmp_path, capsys):
    text = refused(tmp_path, capsys, {"vllm": {"enforce_eager": True}, "trainer": QUICK})
    assert "vllm.enforce_eager is for vLLM in this process, and transformers samples" in text
    text = refused(tmp_path, capsys, {"unsloth": {"conservativeness": 0.5}, "trainer": QUICK})
    assert "unsloth.conservativeness is for weights that Unsloth shares with vLLM" in text
    text = refused(tmp_path, capsys, {"model": {"fp32_lm_head": True}, "trainer": QUICK})
    assert "model.fp32_lm_head is for vLLM in this process" in text


def test_vllm_that_samples_obeys():
    model = torch.nn.Linear(1, 1)
    notes_of(model).vllm = {"enforce_eager": True}
    _check_vllm_table(model, Choice("vllm"))
    with pytest.raises(ConfigError, match=r"vllm.enforce_eager .* the vLLM server samples"):
        _check_vllm_table(model, Choice("server"))
    args = rk.LeaveOneOutConfig("out", use_vllm=True, vllm_mode="server")
    with pytest.raises(ConfigError, match=r"vllm.enforce_eager .* TRL's own client samples"):
        rk.start_engine(model, args)


# --- the plan -------------------------------------------------------------------------------------

LARGE = ["model.name=Qwen/Qwen3-8B", "model.load_in_4bit=false"]


def planned(*settings, gpu="24GB"):
    return make_plan(read_run_file("qwen3-8b-16gb", [*LARGE, *settings]), gpu)


def test_a_plan_counts_one_byte_for_a_weight_in_fp8():
    plain, packed = planned(), planned("model.load_in_fp8=true")
    sizes = [dict(made.memory.at(made.memory.phase)) for made in (plain, packed)]
    linear = sum(one.size * one.count for one in plain.facts.shape.linears)
    saved = sizes[0]["weights"] - sizes[1]["weights"]
    assert 0.99 * linear < saved < linear


def test_a_plan_counts_one_byte_for_a_key_in_fp8(monkeypatch):
    monkeypatch.setattr("rloo_kit.planning.job.installed_version", lambda name: "0.31.0")
    assert (planned().job.cache_bytes, planned("model.fp8_kv_cache=true").job.cache_bytes) == (2, 1)
    sizes = [
        planned_engine(planned("model.load_in_fp8=true", *more, gpu="80GB").job).size
        for more in ([], ["model.fp8_kv_cache=true"], ["unsloth.max_num_batched_tokens=8192"])
    ]
    assert sizes[0].full_cache == 2 * sizes[1].full_cache
    assert sizes[2].working > 1.5 * sizes[0].working


@pytest.mark.parametrize(
    ("capability", "setting", "text"),
    [
        ((8, 6), "load_in_fp8", "model.load_in_fp8 needs a GPU of compute capability 8.9 or more"),
        ((7, 5), "fp8_kv_cache", "capability 8.0 or more, and this one has 7.5: set it to false"),
        (None, "fp8_kv_cache", "there is none here"),
    ],
)
def test_a_plan_refuses_fp8_on_a_card_without_it(
    capability, setting, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("rloo_kit.planning.planner.compute_capability", lambda: capability)
    content = {"model": {"load_in_4bit": False, "name": "Qwen/Qwen3-8B", setting: True}}
    assert text in refused(tmp_path, capsys, content, command="plan")


def test_a_smaller_plan_never_asks_for_fp8_and_4_bit():
    made = planned("model.load_in_fp8=true", gpu="8GB")
    lines = [line for change in made.changes for line in change.lines]
    assert ("model.load_in_4bit=true" in lines) == ("model.load_in_fp8=false" in lines)


# --- run.yaml -------------------------------------------------------------------------------------


@pytest.mark.long
def test_tables_are_kept_for_a_resume_and_hide_secrets(tmp_path):
    secret = "hf_" + "aBcD1234" * 4
    content = {
        "output_dir": str(tmp_path / "run"),
        "unsloth": {"offload_embedding": False, "token": secret},
        "trainer": {**QUICK, "save_strategy": "no"},
        "data": {"num_prompts": 8, "held_out": 0},
    }
    rk.train(make_run_config(content))
    text = (tmp_path / "run" / "run.yaml").read_text()
    assert secret not in text
    kept, _ = read_config(tmp_path / "run", [])
    assert kept.unsloth == {"offload_embedding": False}
    check_same_settings(tmp_path / "run", kept)
    with pytest.raises(ConfigError, match=r"^unsloth is .* set it back"):
        check_same_settings(tmp_path / "run", replace(kept, unsloth={"offload_embedding": True}))
