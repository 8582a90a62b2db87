"""What a client of vLLM's server says of faults that tests/vllm cannot make a real one show."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from rloo_kit import LeaveOneOutConfig
from rloo_kit.cli import main
from rloo_kit.config.run_file import find_run_file, read_run_file
from rloo_kit.errors import GenerationError
from rloo_kit.sampling import choice
from rloo_kit.sampling.engine import Sampling
from rloo_kit.sampling.vllm_server import Needs, VllmServer

NEEDS = Needs("Qwen/Qwen3-4B-Thinking-2507", 2048, 16, in_4bit=True)
CARD = {"id": "base", "root": NEEDS.base, "max_model_len": 4096}
CHOICE = {"token_ids": [7, 2], "logprobs": {"token_logprobs": [-0.5, -0.25]}}


class Answers(ThreadingHTTPServer):
    """Answers as vLLM 0.31 does, but for the paths of ``faults``: a status and JSON or text."""

    daemon_threads = True

    def __init__(self, port=0, **faults):
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked = []
        self.answers = {
            "models": (200, {"data": [CARD]}),
            "load_lora_adapter": (200, "Success"),
            "unload_lora_adapter": (200, "Success"),
            "completions": (200, {"choices": [CHOICE]}),
            **faults,
        }
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.removeprefix("/v1/")
        body = json.loads(sent or "null")
        self.server.asked.append((path, body, self.headers.get("Authorization")))
        status, answer = self.server.answers.get(path, (404, {"detail": "Not Found"}))
        if path == "load_lora_adapter" and body == {} and status != 404:
            status = 400  # as a body without its fields
        text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self):
        self.do_GET()

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def serve():
    """Return a function that starts a server; all of them end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*args, **faults):
            server = Answers(*args, **faults)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            return server

        yield start


def client(url, needs=NEEDS, timeout=0.0, dtype=None):
    args = SimpleNamespace(
        vllm_server_base_url=url, vllm_server_timeout=timeout, vllm_adapter_dir=None
    )
    return VllmServer(args, needs, dtype)


def error(status, message):
    return status, {"error": {"message": message, "type": "any", "code": status}}


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"models": (200, "<html>")}, r"answers 200 \(<html>\): look at its log, .* vllm serve"),
        ({"models": (200, {"data": []})}, "answers 200 .*start it with"),
        ({"models": (200, {"data": [CARD | {"max_model_len": None}]})}, "answers 200 .*start it"),
        ({"models": error(401, "Unauthorized")}, "401 .*environment variable VLLM_API_KEY"),
        ({"models": (503, "")}, r"answers 503 \(.*\): look at its log"),
        (
            {"models": (200, {"data": [CARD | {"max_model_len": 512}]})},
            "accepts 512 tokens at most, but the run needs 2048: start .*--max-model-len 2048",
        ),
        ({"load_lora_adapter": (404, {"detail": "Not Found"})}, "does not accept adapters at run"),
    ],
)
def test_a_server_that_cannot_sample_is_one_sentence(faults, words, serve):
    with pytest.raises(GenerationError, match=f"^vLLM's server at http[^\n]*{words}[^\n]*$"):
        client(serve(**faults).url)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            (200, {"choices": [{"text": "older"}]}),
            "answers 200 .* start it with",
        ),
        ((500, "Internal Server Error"), r"answers 500 \(Internal Server Error\): look at its log"),
        (error(400, "top_q\nmore"), r"400 \(top_q\): look at its log, fix the reported problem"),
        (error(404, "no model"), r"answers 404 \(no model\)"),
    ],
)
def test_an_answer_without_completions_is_one_sentence(answer, words, serve):
    engine = client(serve(completions=answer).url)
    with pytest.raises(GenerationError, match=f"^[^\n]*{words}[^\n]*$"):
        engine.generate([[1, 2], [3]], Sampling(4, (2,)), seed=0)


def test_each_row_is_asked_for_with_its_seed_and_the_key(serve, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "a-key")
    server = serve()
    drawn = client(f"{server.url}/v1/").generate([[1, 2], [3]], Sampling(4, (2,)), seed=2**31 - 1)
    assert drawn.completion_ids == [[7, 2], [7, 2]]
    assert drawn.log_probs == [[-0.5, -0.25], [-0.5, -0.25]]
    rows = [body for path, body, _ in server.asked if path == "completions"]
    assert {row["seed"]: row["prompt"] for row in rows} == {2**31 - 1: [1, 2], 0: [3]}
    assert {row["model"] for row in rows} == {"base"}
    assert {key for _, _, key in server.asked} == {"Bearer a-key"}


def test_a_long_prompt_asks_for_the_tokens_that_fit(serve):
    server = serve()
    prompts = [[1] * length for length in (8, CARD["max_model_len"] - 3, CARD["max_model_len"])]
    client(server.url).generate(prompts, Sampling(64, ()), seed=0)
    asked = {len(body["prompt"]): body["max_tokens"] for _, body, _ in server.asked[2:]}
    assert [asked[len(ids)] for ids in prompts] == [64, 3, 1]


def test_a_folder_that_the_server_does_not_see_names_the_setting(serve):
    missing = error(404, "Loading lora x failed: No adapter found for /dev/shm/x")
    server = serve()
    engine = client(server.url)
    server.answers["load_lora_adapter"] = missing
    with pytest.raises(GenerationError, match=r"set trainer\.vllm_adapter_dir to a folder that"):
        engine._load()


def test_a_server_that_is_away_is_one_sentence():
    with Answers() as server:
        url = server.url
        server.shutdown()
    with pytest.raises(GenerationError, match=r"be reached \(.*\): .*start it with VLLM_ALLOW"):
        client(url)
    with pytest.raises(GenerationError, match=r"^[^\n]*cannot be reached[^\n]*$"):
        client("http://[not-an-address")


def test_a_run_needs_no_vllm_of_its_own(serve, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rloo_kit.sampling.choice.why_not_vllm", lambda: "vLLM is not installed")
    monkeypatch.setattr("rloo_kit.job.load_model", pytest.fail)
    url = serve(models=(200, {"data": [CARD | {"max_model_len": 8}]})).url
    given = ("trainer.generation=server", f"trainer.vllm_server_base_url={url}")
    assert main(["train", "quickstart", *(word for one in given for word in ("--set", one))]) == 2
    assert "accepts 8 tokens at most, but the run needs 256" in capsys.readouterr().err


def test_the_command_for_an_adapter_loads_its_base_as_the_run_does(serve, monkeypatch, tmp_path):
    config = {"base_model_name_or_path": "me/base", "revision": "v1"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(choice, "find_model", str)
    url = serve(models=(200, {"data": [CARD | {"max_model_len": 8}]})).url
    args = LeaveOneOutConfig(str(tmp_path), generation="server", vllm_server_base_url=url)
    given = [f"model.name={tmp_path}", "model.trust_remote_code=true"]
    run = read_run_file(find_run_file("quickstart"), given)
    says = r"vllm serve me/base .* --revision v1 --trust-remote-code$"
    with pytest.raises(GenerationError, match=says):
        choice.check_engine(args, run)


def test_a_server_that_comes_up_late_is_waited_for(serve):
    with Answers() as server:
        port = server.server_port
        server.shutdown()
    late = threading.Timer(0.5, serve, (port,))
    late.start()
    begun = time.monotonic()
    with pytest.warns(UserWarning, match=r"^waiting up to 20 s for vLLM's server at .* vllm serve"):
        engine = client(f"http://127.0.0.1:{port}", timeout=20)
    late.join()
    assert time.monotonic() - begun < 10
    assert engine.generate([[1]], Sampling(4, ()), seed=0).completion_ids == [[7, 2]]


@pytest.mark.parametrize(
    ("served", "model", "same"),
    [
        ({"root": "Qwen/Qwen3-4B"}, "Qwen/Qwen3-4B", True),
        ({"root": "Qwen/Qwen3-4B"}, "unsloth/Qwen3-4B-unsloth-bnb-4bit", True),
        ({"root": "me/copy", "id": "Qwen/Qwen3-4B"}, "Qwen/Qwen3-4B", True),
        ({"root": "Qwen/Qwen3-8B"}, "Qwen/Qwen3-4B", False),
        ({"root": "/models/any"}, "Qwen/Qwen3-4B", True),  # the canary finds out
        ({"root": "Qwen/Qwen3-8B"}, "/", True),
        ({"root": None, "id": "Qwen/Qwen3-4B"}, "Qwen/Qwen3-4B", True),
    ],
)
def test_hub_names_are_compared_and_folders_are_not(served, model, same, serve):
    server = serve(models=(200, {"data": [CARD | {"id": "base"} | served]}))
    needs = Needs(model, 2048, 16, in_4bit=False)
    client(server.url, needs, dtype="bfloat16")  # after the load the name is Unsloth's
    if same:
        client(server.url, needs)
        return
    with pytest.raises(GenerationError, match="serves 'Qwen/Qwen3-8B', but the run trains 'Qwen/Q"):
        client(server.url, needs)


def test_the_command_has_what_the_run_needs(tmp_path):
    assert NEEDS.command == (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve Qwen/Qwen3-4B-Thinking-2507 "
        "--enable-lora --max-lora-rank 16 --max-model-len 2048 --logprobs-mode processed_logprobs "
        "--generation-config vllm --quantization bitsandbytes"
    )
    packed = Needs("unsloth/Qwen3-4B-bnb-4bit", 512, 20, in_4bit=True).command
    assert "--max-lora-rank 32" in packed
    assert "--quantization" not in packed
    folder = tmp_path / "of-a-bnb-4bit"  # the name of a folder says nothing
    folder.mkdir()
    for config in ({}, {"quantization_config": {"quant_method": "gptq"}}):
        (folder / "config.json").write_text(json.dumps(config))
        command = Needs(str(folder), 512, 20, in_4bit=True).command
        assert ("--quantization" in command) == (not config)
    pinned = Needs("me/any", 512, 20, in_4bit=False, revision="v1").command
    assert pinned.endswith(" --revision v1")
    assert "--quantization" not in Needs("me/any", 512, 20, in_4bit=False).command
