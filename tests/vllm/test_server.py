"""A real vLLM server process on loopback: the adapter reaches it, and the canary watches it."""

import os
import socket
import subprocess
import sys
import time

import httpx
import pytest
import torch

import rloo_kit as rk
from rloo_kit.models.loading import TINY_THINKER
from rloo_kit.sampling.engine import Sampling
from rloo_kit.sampling.vllm_server import VllmServer

pytestmark = pytest.mark.vllm


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(port, log, *arguments, served=None):
    """Start a server; return its process. Its own environment keeps the engine in a child."""
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if served is not None:
        command = [sys.executable, "-m", "rloo_kit", "serve", str(served), "--port", str(port)]
    else:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(TINY_THINKER), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--enable-lora", "--max-lora-rank", "16"]
    command += ["--max-loras", "2", "--max-model-len", "128", "--dtype", "bfloat16", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def end(process):
    os.killpg(process.pid, 15)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """An adapter that changes what is said; greedy answers with it, and without."""
    folder = tmp_path_factory.mktemp("served") / "polite"
    with rk.session():
        model, tokenizer = rk.load_model("tiny-thinker", load_in_4bit=False, max_seq_length=128)
        model = rk.attach_lora(model, r=16)
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        rk.save_adapter(model, tokenizer, folder)
        prompts = rk.load_prompts("arithmetic", split="held_out", num_prompts=8)
        settings = {"max_completion_length": 48, "temperature": 0.0}
        ours = rk.evaluate(model, tokenizer, prompts, [], **settings)
        with model.disable_adapter():
            base = rk.evaluate(model, tokenizer, prompts, [], **settings)
    return folder, ours.samples, base.samples


@pytest.fixture(scope="module")
def server(tmp_path_factory, served):
    port = free_port()
    more = ["--logprobs-mode", "processed_logprobs", "--enforce-eager"]
    with (tmp_path_factory.mktemp("server") / "log").open("w") as log:
        process = start(port, log, *more, served=served[0])
        yield f"http://127.0.0.1:{port}"
        end(process)


def test_serve_answers_as_adapter_and_base(server, served):
    client = httpx.Client(base_url=server, timeout=60)
    deadline = time.monotonic() + 240
    while True:
        try:
            if client.get("/health").status_code == 200:
                break
        except httpx.HTTPError:
            assert time.monotonic() < deadline
        time.sleep(0.5)
    for name, samples in (("polite", served[1]), ("base", served[2])):
        texts = []
        for sample in samples:
            asked = {
                "model": name, "messages": sample["prompt"], "temperature": 0, "max_tokens": 48
            }  # fmt: skip
            answer = client.post("/v1/chat/completions", json=asked)
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["message"]["content"])
        wanted = [sample["completion"] for sample in samples]
        same = sum(a.split() == b.split() for a, b in zip(texts, wanted, strict=True))
        assert same >= len(wanted) - 1, list(zip(texts, wanted, strict=True))  # bf16 may turn one
    assert [s["completion"] for s in served[1]] != [s["completion"] for s in served[2]]


def test_it_waits_for_the_server_and_trains_through_it(server, policy, make_trainer):
    model, tokenizer, _ = policy
    trainer = make_trainer(
        model,
        tokenizer,
        generation="server",
        vllm_server_base_url=server,
        vllm_server_timeout=300,
        max_steps=3,
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "sampling/sync_seconds" in log]
    assert len(logs) == 3
    assert all(log["sampling/logp_difference_mean"] < 0.005 for log in logs)
    assert all(log["sampling/sync_seconds"] < 2 for log in logs)
    root = trainer.engine._folders.root
    rk.release(trainer)
    assert not root.exists()


def test_with_the_adapter_switched_off_the_base_answers(server, policy):
    model, tokenizer, prompts = policy
    client = VllmServer(server, model, max_length=128, timeout=60)
    sampling = Sampling(16, tuple(model.generation_config.eos_token_id), temperature=0.0)
    client.sync(model)
    adapted = client.generate(prompts, sampling, 0).completion_ids
    with model.disable_adapter():
        client.sync(model)
        base = client.generate(prompts, sampling, 0).completion_ids
        settings = {"temperature": 0.0, "max_completion_length": 16}
        rows = rk.load_prompts("arithmetic", num_prompts=64)
        ours = rk.evaluate(model, tokenizer, rows, [], **settings).samples
    client.close()
    texts = tokenizer.batch_decode(base, skip_special_tokens=True)
    same = sum(a == b["completion"] for a, b in zip(texts, ours, strict=True))
    assert same >= 0.8 * len(texts)
    assert sum(map(list.__eq__, base, adapted)) < 0.5 * len(texts)


def test_a_server_with_other_weights_is_noticed(server, make_trainer):
    with rk.session():
        model, tokenizer = rk.load_model("tiny-thinker", load_in_4bit=False, max_seq_length=128)
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data *= 1 + 0.2 * noise.to(parameter.dtype)
        trainer = make_trainer(
            rk.attach_lora(model, r=16),
            tokenizer,
            generation="server",
            vllm_server_base_url=server,
        )
        with pytest.raises(rk.StalePolicyError, match="or its base weights are others"):
            trainer.train()


def test_a_server_that_dies_ends_the_run_in_one_sentence(policy, make_trainer, tmp_path):
    model, tokenizer, _ = policy
    port = free_port()
    with (tmp_path / "log").open("w") as log:
        process = start(port, log, "--enforce-eager")

        def kill_it(completions, **_):
            end(process)
            return [float(len(str(c)) % 3) for c in completions]

        try:
            trainer = make_trainer(
                model,
                tokenizer,
                rewards=[kill_it],
                generation="server",
                vllm_server_base_url=f"http://127.0.0.1:{port}",
                vllm_server_timeout=300,
            )
            started = time.monotonic()
            with pytest.raises(rk.GenerationError, match=r"is away .*: start it again"):
                trainer.train()
            assert trainer.state.global_step == 1
            assert time.monotonic() - started < 120
        finally:
            if process.poll() is None:
                end(process)
        rk.release(trainer)
