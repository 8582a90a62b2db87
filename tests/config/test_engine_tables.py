"""``unsloth:`` and ``vllm:`` of a run file: obeyed, or one sentence."""

import inspect
from dataclasses import replace
from unittest import mock

import pytest
import torch

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.config.engine_tables import SET_ELSEWHERE
from rloo_kit.config.run_file import make_run_config
from rloo_kit.errors import ConfigError, ModelError
from rloo_kit.job import PreparedJob, read_config
from rloo_kit.models.notes import notes_of
from rloo_kit.models.shared_engine import EngineSettings, load_shared
from rloo_kit.runs.folder import check_same_settings, write_run_file
from rloo_kit.sampling.choice import _check_vllm_table
from rloo_kit.sampling.engine import Choice


@pytest.mark.parametrize("table", SET_ELSEWHERE)
def test_the_key_that_is_named_instead_exists(table):
    for key, place in SET_ELSEWHERE[table].items():
        says = f"^{table}.{key} cannot be set in a run file: use {place} instead"
        with pytest.raises(ConfigError, match=says):
            make_run_config({table: {key: 1}})
        section, _, name = place.partition(".")
        if name and section != "trainer":
            assert name in make_run_config({}).as_dict()[section]


def test_arguments_of_load_model_are_refused():
    allowed = {"kwargs", "num_sequences"}
    for name in inspect.signature(rk.load_model).parameters.keys() - allowed:
        with pytest.raises(ConfigError, match=f"^unsloth.{name} (cannot be|is) set "):
            make_run_config({"unsloth": {name: 1}})


def arguments_of_loading(job, monkeypatch):
    load = mock.Mock(side_effect=ModelError("stop"))
    monkeypatch.setattr("rloo_kit.job.load_model", load)
    job.environment = mock.Mock(backend="unsloth")
    with pytest.raises(ModelError, match="stop"):
        _ = job.policy
    return load.call_args.kwargs


def test_the_number_of_sequences_is_that_of_the_run_file(monkeypatch):
    monkeypatch.setattr("rloo_kit.job._engine_arguments", lambda _: {"num_sequences": 64})
    rk.setup()  # the job imports TRL
    job = PreparedJob(make_run_config({"unsloth": {"num_sequences": 8}}))
    assert arguments_of_loading(job, monkeypatch)["num_sequences"] == 8


def test_a_run_resumes_on_the_weights_that_it_began_with(monkeypatch, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "a/copy"}')
    job = PreparedJob(make_run_config({"model": {"name": "a/base"}}), checkpoint=tmp_path)
    job.splits = [{"prompt": "1 + 1"}], None
    found = arguments_of_loading(job, monkeypatch)
    assert (found["name"], found["use_exact_model_name"]) == ("a/copy", True)
    assert job.config.model.name == "a/base"  # as run.yaml has it


def test_what_the_kit_sets_itself_is_refused():
    with pytest.raises(ConfigError, match=r"^vllm.enable_lora is set by rloo-kit itself: leave it"):
        make_run_config({"vllm": {"enable_lora": False}})
    for content in ({"vllm": 3}, {"unsloth": ["a"]}):
        with pytest.raises(ConfigError, match="must be a valid dictionary"):
            make_run_config(content)


def test_the_shared_engine_refuses_settings_of_another():
    engine = EngineSettings(128, True, 16, 8, not_shared=("swap_space",))
    with pytest.raises(ConfigError, match=r"vllm\.swap_space .*or set model\.backend"):
        load_shared(None, "tiny-thinker", engine, False)


@pytest.mark.long
def test_a_table_reaches_unsloth(monkeypatch):
    from unsloth import FastLanguageModel

    load = mock.Mock(wraps=FastLanguageModel.from_pretrained)
    monkeypatch.setattr(FastLanguageModel, "from_pretrained", load)
    rk.load_model("tiny-thinker", max_seq_length=128, unsloth_tiled_mlp=True)
    assert load.call_args.kwargs["unsloth_tiled_mlp"] is True


# --- what a machine cannot obey -------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("vllm.enforce_eager=true", "applies only to vLLM in this process, but transformers"),
        ("unsloth.conservativeness=0.5", "is for weights that Unsloth shares with vLLM"),
    ],
)
def test_an_engine_that_does_not_sample_takes_no_settings(tmp_path, capsys, setting, says):
    assert main(["quickstart", "--set", f"output_dir={tmp_path}/run", "--set", setting]) == 2
    assert f"{setting.partition('=')[0]} {says}" in capsys.readouterr().err


def test_vllm_that_samples_obeys():
    model = torch.nn.Linear(1, 1)
    notes_of(model).vllm = {"enforce_eager": True}
    with pytest.raises(ConfigError, match=r"vllm.enforce_eager .* transformers samples"):
        _check_vllm_table(model, Choice("transformers"))
    with pytest.raises(ConfigError, match=r"vllm.enforce_eager .* vLLM's server samples"):
        _check_vllm_table(model, Choice("server"))


# --- run.yaml -------------------------------------------------------------------------------------


def test_tables_are_kept_for_a_resume_and_hide_secrets(tmp_path):
    secret = "hf_" + "aBcD1234" * 4
    table = {"offload_embedding": False, "token": secret}
    write_run_file(tmp_path, make_run_config({"unsloth": table}))
    assert secret not in (tmp_path / "run.yaml").read_text()
    kept, _ = read_config(tmp_path, [])
    assert kept.unsloth == {"offload_embedding": False}
    check_same_settings(tmp_path, kept)
    with pytest.raises(ConfigError, match=r"^unsloth is .* set it back"):
        check_same_settings(tmp_path, replace(kept, unsloth={"offload_embedding": True}))
