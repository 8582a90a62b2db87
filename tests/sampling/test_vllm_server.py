"""The client against servers that are right, slow, broken, away, or something else."""

import contextlib
import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from rloo_kit.errors import GenerationError
from rloo_kit.sampling.engine import SHARED_MEMORY, Sampling, adapter_tensors
from rloo_kit.sampling.vllm_server import START, VllmServer

STOP = 1
SAMPLING = Sampling(4, (STOP,), temperature=0.5)
PROMPTS = [[5, 6], [5, 6], [7], [5, 6]]


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch, tmp_path):
    """No proxy within one machine, no key that was not asked for, no certificates to load."""
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    yield
    assert own_folders() == []


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj"]))


class FakeVllm:
    """The few endpoints of vLLM's server; a completion is the prompt's sum and the stop token.

    Each value of ``answers`` stands in for one path: (status, text), or a function of the request's
    content that returns one.
    """

    def __init__(self, answers):
        self.answers = answers
        self.adapters = {}
        self.requests = []
        self.keys = set()
        self.fails_first = 0
        self.most_at_once = self._at_once = 0

    def answer(self, path, content):
        self.requests.append((path, content))
        given = self.answers.get(path)
        if given is not None:
            return given(content) if callable(given) else given
        own = getattr(self, path.rpartition("/")[2], None)
        if own is None:
            return 404, '{"detail":"Not Found"}'
        found = own(content)
        return found if isinstance(found, tuple) else (200, json.dumps(found))

    def health(self, _):
        if self.fails_first:
            self.fails_first -= 1
            return 503, ""
        return 200, ""

    def models(self, _):
        base = {"id": "base", "object": "model", "max_model_len": 64, "parent": None}
        lora = [{"id": name, "parent": "base"} for name in self.adapters]
        return {"object": "list", "data": [*lora, base]}

    def load_lora_adapter(self, content):
        folder = Path(content["lora_path"])
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
        self.adapters[content["lora_name"]] = load_file(folder / "adapter_model.safetensors")
        return 200, f"Success: LoRA adapter '{content['lora_name']}' added successfully."

    def unload_lora_adapter(self, content):
        del self.adapters[content["lora_name"]]
        return 200, "Success"

    def completions(self, content):
        if content["model"] not in {"base", *self.adapters}:
            return 404, '{"error":{"message":"The model does not exist"}}'
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(0.02)
        self._at_once -= 1
        choices = [
            {
                "index": index,
                "token_ids": [sum(content["prompt"]), index, STOP],
                "logprobs": {"token_logprobs": [-0.5, -index, -content["seed"] / 2**31]},
            }
            for index in range(content["n"])
        ]
        return {"choices": choices[::-1]}


class Busy(ThreadingHTTPServer):
    """As many may wait to be let in as a real server allows; Python's five are too few."""

    request_queue_size = 128


@contextlib.contextmanager
def serving(*, keeps_connections=True, **answers):
    """A server at a free port."""
    vllm = FakeVllm({f"/{name.replace('__', '/')}": value for name, value in answers.items()})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1" if keeps_connections else "HTTP/1.0"
        wbufsize = -1  # head and body in one packet

        def reply(self):
            length = int(self.headers.get("Content-Length") or 0)
            content = json.loads(self.rfile.read(length)) if length else None
            vllm.keys.add(self.headers.get("Authorization"))
            status, text = vllm.answer(self.path, content)
            body = text.encode()
            with contextlib.suppress(OSError):  # the client may have gone
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        do_GET = do_POST = reply  # noqa: N815

        def log_message(self, *_):
            pass

    server = Busy(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="fake vLLM")
    thread.start()
    vllm.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield vllm
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def slow(seconds, then=(200, "{}")):
    def answer(_):
        time.sleep(seconds)
        return then

    return answer


def client_of(vllm, model, *, max_length=64, timeout=5.0, **keywords):
    return contextlib.closing(
        VllmServer(vllm.url, model, max_length=max_length, timeout=timeout, **keywords)
    )


def refusal(function, *args, **keywords):
    """The message of the error: one sentence, what is wrong and after a colon what to do."""
    with pytest.raises(GenerationError) as caught:
        function(*args, **keywords)
    return str(caught.value)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def own_folders():
    if not SHARED_MEMORY.is_dir():
        return []
    return [path.name for path in SHARED_MEMORY.iterdir() if f"-{os.getpid()}-" in path.name]


def left_threads():
    return [t.name for t in threading.enumerate() if "ThreadPoolExecutor" in t.name]


# --- a server that is right ----------------------------------------------------------------------


def test_completions_come_back_in_the_order_of_the_prompts(model):
    with serving() as vllm, client_of(vllm, model) as client:
        client.sync(model)
        drawn = client.generate(PROMPTS, SAMPLING, seed=3)
    assert drawn.completion_ids == [[11, 0, 1], [11, 1, 1], [7, 0, 1], [11, 0, 1]]
    assert [log_probs[:2] for log_probs in drawn.log_probs] == [
        [-0.5, 0],
        [-0.5, -1],
        [-0.5, 0],
        [-0.5, 0],
    ]


def test_equal_prompts_share_a_request_and_differ_in_seed(model):
    with serving() as vllm, client_of(vllm, model) as client:
        client.sync(model)
        client.generate(PROMPTS, SAMPLING, seed=2**31 - 1)
        asked = [content for path, content in vllm.requests if path == "/v1/completions"]
    found = sorted((content["seed"], content["prompt"], content["n"]) for content in asked)
    assert found == [(1, [7], 1), (2, [5, 6], 1), (2**31 - 1, [5, 6], 2)]
    for content in asked:
        assert content["max_tokens"] == 4
        assert content["temperature"] == 0.5
        assert content["stop_token_ids"] == [STOP]
        assert content["logprobs"] == 0
        assert content["return_token_ids"] is True
        assert content["add_special_tokens"] is False


def test_the_adapter_arrives_as_it_is_and_the_one_before_goes(model):
    with serving() as vllm, client_of(vllm, model) as client:
        client.sync(model)
        (first,) = vllm.adapters
        with torch.no_grad():
            for tensor in adapter_tensors(model).values():
                tensor.add_(1)
        client.sync(model)
        ((second, arrived),) = vllm.adapters.items()
        assert second != first
        for name, tensor in adapter_tensors(model).items():
            assert arrived[name].equal(tensor.to(client.adapter_dtype))
        (root,) = own_folders()
        assert len(list((SHARED_MEMORY / root).iterdir())) == 1, "only the last adapter's folder"
        assert client.sync_seconds > 0


def test_with_the_adapter_switched_off_the_base_is_asked(model):
    with serving() as vllm, client_of(vllm, model) as client:
        for switch in (contextlib.nullcontext, model.disable_adapter, contextlib.nullcontext):
            with switch():
                client.sync(model)
            client.generate(PROMPTS[:1], SAMPLING, seed=0)
        asked = [content["model"] for path, content in vllm.requests if path == "/v1/completions"]
        assert asked[1] == "base"
        assert asked[0] != asked[2]
        assert list(vllm.adapters) == [asked[2]]


def test_a_server_that_is_still_starting_is_waited_for(model):
    with serving() as vllm:
        vllm.fails_first = 2
        with client_of(vllm, model, timeout=1.0):
            assert vllm.fails_first == 0


@pytest.mark.parametrize("key", [None, "secret"])
def test_a_key_is_sent_where_there_is_one(key, model, monkeypatch):
    if key:
        monkeypatch.setenv("VLLM_API_KEY", key)
    with serving() as vllm, client_of(vllm, model) as client:
        client.sync(model)
    assert vllm.keys == {f"Bearer {key}" if key else None}


# --- a server that is not there ------------------------------------------------------------------


def test_a_dead_port_names_the_start_command(model):
    url = f"http://127.0.0.1:{free_port()}"
    started = time.monotonic()
    text = refusal(VllmServer, url, model, max_length=64, timeout=0.2)
    assert time.monotonic() - started < 30
    assert url in text
    assert START.format(rank=8) in text
    assert "vllm_server_base_url" in text
    assert own_folders() == []


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1"])
def test_an_address_without_a_protocol_is_refused_at_once(url, model):
    text = refusal(VllmServer, url, model, max_length=64, timeout=0.2)
    assert "is no address" in text
    assert "http://127.0.0.1:8000" in text


def test_a_server_that_goes_away_is_named_and_leaves_no_folder(model):
    with serving(keeps_connections=False) as vllm:
        client = VllmServer(vllm.url, model, max_length=64, timeout=5.0)
        client.sync(model)
    assert "is away" in refusal(client.generate, PROMPTS, SAMPLING, 0)
    assert "is away" in refusal(client.sync, model)
    client.close()
    assert own_folders() == []
    assert left_threads() == []


# --- a server that is something else -------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    ["<!doctype html><title>It works.</title>", '{"models": []}', '{"data": ["base"]}', "7"],
    ids=str,
)
def test_another_service_is_not_taken_for_vllm(answer, model):
    with serving(health=(200, "ok"), v1__models=(200, answer)) as vllm:
        text = refusal(client_of, vllm, model)
    assert "is not the vLLM server" in text
    assert "vllm_server_base_url" in text


def test_a_too_short_server_names_both_lengths(model):
    with serving() as vllm:
        text = refusal(client_of, vllm, model, max_length=65)
        assert "--max-model-len 65" in text
        assert "takes 64 tokens" in text
        with client_of(vllm, model, max_length=64):
            pass


@pytest.mark.parametrize("status", [400, 404])
def test_a_server_that_cannot_load_names_reason_and_command(status, model):
    refused = {"v1__load_lora_adapter": (status, "No adapter\nfound for x")}
    with serving(**refused) as vllm, client_of(vllm, model) as client:
        text = refusal(client.sync, model)
        assert [list((SHARED_MEMORY / name).iterdir()) for name in own_folders()] == [[]]
        assert "call sync first" in refusal(client.generate, PROMPTS, SAMPLING, 0)
    assert "No adapter found for x)" in text
    assert "vllm_adapter_dir" in text
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in text
    assert "--max-lora-rank 8" in text


def test_an_adapter_the_server_cannot_forget_does_no_harm(model):
    with serving(v1__unload_lora_adapter=(500, "no")) as vllm, client_of(vllm, model) as client:
        client.sync(model)
        client.sync(model)
        assert len(client.generate(PROMPTS, SAMPLING, seed=0).completion_ids) == len(PROMPTS)
    assert own_folders() == []


def completions(*choices):
    return 200, json.dumps({"choices": list(choices)})


def choice(ids=(3, 1), log_probs=(-1.0, -2.0), index=0):
    return {
        "index": index,
        "token_ids": ids and list(ids),
        "logprobs": {"token_logprobs": list(log_probs)},
    }


@pytest.mark.parametrize(
    "answer",
    [
        (200, "<html>"),
        (200, '{"choices": 3}'),
        completions(),
        completions({**choice(), "logprobs": None}),
        completions(choice(log_probs=(-1.0,))),
        completions(choice(log_probs=(-1.0, float("nan")))),
    ],
    ids=lambda answer: answer[1][:60],
)
def test_completions_without_all_their_tokens_are_refused(answer, model):
    with serving(v1__completions=answer) as vllm, client_of(vllm, model) as client:
        client.sync(model)
        text = refusal(client.generate, [[5, 6]], SAMPLING, 0)
    assert "is not the vLLM server" in text
    assert left_threads() == []


@pytest.mark.parametrize("status", [500])
def test_a_refused_completion_is_named_with_its_reason(status, model):
    long = json.dumps({"error": "too   long " + "x" * 1000})
    with serving(v1__completions=(status, long)) as vllm, client_of(vllm, model) as client:
        client.sync(model)
        text = refusal(client.generate, PROMPTS, SAMPLING, 0)
    assert f"/v1/completions with {status}" in text
    assert "too long" in text
    assert len(text) < 400


@pytest.mark.long
def test_a_slow_completion_names_the_timeout_setting(model):
    late = {"v1__completions": slow(3)}
    with serving(**late) as vllm, client_of(vllm, model, timeout=1.0) as client:
        client.sync(model)
        text = refusal(client.generate, PROMPTS, SAMPLING, 0)
    assert "in 1 s" in text
    assert "vllm_server_timeout" in text
    assert own_folders() == []
    assert left_threads() == []
