"""``rloo-kit serve``: vLLM's own server answers with the adapter and without."""

import os
import socket
import subprocess
import sys
import time

import httpx
import pytest

import rloo_kit as rk

pytestmark = pytest.mark.vllm


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(folder, port, log):
    """Serve an adapter; return the process. Its own environment keeps the engine in a child."""
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-m", "rloo_kit", "serve", str(folder), "--port", str(port)]
    command += ["--max-model-len", "128", "--dtype", "bfloat16", "--enforce-eager"]
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
def served(tmp_path_factory, adapted_model):
    """An adapter that changes what is said; greedy answers with it, and without."""
    folder = tmp_path_factory.mktemp("served") / "polite"
    with rk.session():
        model, tokenizer = adapted_model()
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
    with (tmp_path_factory.mktemp("server") / "log").open("w") as log:
        process = start(served[0], port, log)
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
