"""rloo-kit chat and serve: what is said, shown and started."""

import io
import itertools
import json
import os
import pty
import select
import signal
import sys
import threading
import time

import pytest
import torch

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.errors import ConfigError
from rloo_kit.evaluation.models import find_trained, load_base
from rloo_kit.export.chat import _console, _Printer, chat
from rloo_kit.export.serve import server_command


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """The folder of an adapter that changes what is said."""
    folder = tmp_path_factory.mktemp("chat") / "polite"
    model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256)
    model = rk.attach_lora(model, r=8)
    torch.manual_seed(0)
    for name, values in model.named_parameters():
        if "lora_B" in name:
            values.data.normal_(0, 0.2)
    return rk.save_adapter(model, tokenizer, folder)


def talk(model, *lines, **settings):
    out = io.StringIO()
    chat(model, source=io.StringIO("".join(f"{line}\n" for line in lines)), out=out, **settings)
    return out.getvalue()


def greedy(model, question):
    """What the model answers, by the kit's own evaluation."""
    prompts = rk.load_prompts("arithmetic", num_prompts=1)
    rows = prompts.from_list([{"prompt": [{"role": "user", "content": question}]}])
    trained = find_trained(model)
    one = load_base(trained)
    with one.using(trained) as loaded:
        found = rk.evaluate(loaded, one.tokenizer, rows, [], temperature=0)
    return found.samples[0]["completion"]


QUESTION = "What is 252 + 409?"


def test_chat_answers_as_the_model_does(adapter):
    for model in (adapter, "tiny-thinker"):
        said = talk(model, QUESTION, temperature=0)
        assert said.split() == greedy(model, QUESTION).split()
    assert talk(adapter, QUESTION, temperature=0) != talk("tiny-thinker", QUESTION, temperature=0)


def test_base_answers_next_to_the_trained_model(adapter):
    said = talk(adapter, QUESTION, temperature=0, base=True)
    assert {"polite:", "base:"} <= set(said.split())
    assert greedy("tiny-thinker", QUESTION).rpartition("</think>")[2].strip() in said


def test_answer_longer_than_the_model_takes_is_refused(adapter):
    with pytest.raises(ConfigError, match="takes 1024 with an answer of 2000"):
        talk(adapter, "hello", max_tokens=2000)


@pytest.mark.long
def test_conversation_is_remembered_and_blank_lines_are_skipped():
    once = talk("tiny-thinker", QUESTION, temperature=0)
    twice = talk("tiny-thinker", QUESTION, "", QUESTION, temperature=0)
    assert twice.startswith(once.rstrip())
    assert twice != once + once


@pytest.mark.long
def test_same_seed_gives_the_same_answers():
    first = [talk("tiny-thinker", QUESTION, seed=seed) for seed in (1, 1)]
    assert first[0] == first[1]
    assert len({talk("tiny-thinker", QUESTION, seed=seed) for seed in range(4)}) > 1


def test_terminal_dims_the_thought_and_escapes_control_characters():
    first, second = pty.openpty()
    with os.fdopen(first, "rb", buffering=0) as seen, os.fdopen(second, "w") as out:
        console = _console(out)
        for in_thought in (True, False):
            show = _Printer(console)
            show.in_thought = in_thought
            for piece in ("so 4\x1b[2J", "</thi", "nk>", " the ", "answer [b]"):
                show(piece)
            console.print()
        found = b""
        while select.select([seen], [], [], 1.0)[0]:  # the terminal hands it over in pieces
            found += seen.read(4096)
        text = found.decode()
    thought, _, answer = text.partition("</thi")
    assert thought.startswith("\x1b[2mso 4\\x1b[2J")
    assert "\x1b[2mnk>" in answer
    assert " the answer [b]" in answer.replace("\x1b[0m", "")
    again = text.split("answer [b]")[1]
    assert "\x1b[2mso" not in again  # nobody opened a thought


@pytest.mark.long
def test_ctrl_c_ends_an_answer_not_the_conversation(monkeypatch):
    """The signal comes while the first answer is being drawn."""
    question = "What is 11 + 11?"

    class Lines(io.StringIO):
        def readline(self, *args):
            line = super().readline(*args)
            if line.startswith("count"):
                threading.Thread(target=strike, daemon=True).start()
            return line

    def strike():
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    from transformers import TextStreamer

    put = TextStreamer.put

    def slow(self, value):
        time.sleep(0.05)
        put(self, value)

    monkeypatch.setattr(TextStreamer, "put", slow)
    out = io.StringIO()
    chat("tiny-thinker", source=Lines(f"count to 100\n{question}\n"), out=out, temperature=0)
    assert out.getvalue().split()[-1] == greedy("tiny-thinker", question).split()[-1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["chat", "tiny-thinker", "--base"], "is its own base"),
        (["chat", "tiny-thinker", "--temperature", "-1"], "must be between 0"),
        (["chat", "tiny-thinker", "--max-tokens", "0"], "must be at least 1"),
        (["chat", "./nowhere"], "does not exist"),
        (["serve", "tiny-thinker", "--port", "99999"], "must be between 1 and 65535"),
    ],
)
def test_bad_input_gives_one_sentence(arguments, expected, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.strip().splitlines()) == 1


# --- serve ----------------------------------------------------------------------------------------


def test_server_command_has_base_and_adapter(adapter, monkeypatch):
    monkeypatch.setattr(
        "rloo_kit.export.serve.why_not_vllm", lambda: None
    )  # tests/vllm starts a real one
    command = server_command(adapter, port=8123, more=["--quantization", "bitsandbytes"])
    given = dict(itertools.pairwise(command))
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert given["--model"].endswith("tiny-thinker")
    served = json.loads(given["--lora-modules"])
    assert served == {"name": "polite", "path": str(adapter.resolve())}
    assert given["--max-lora-rank"] == "8"
    assert given["--host"] == "127.0.0.1"
    assert command[-2:] == ["--quantization", "bitsandbytes"]
    alone = server_command("tiny-thinker")
    assert "--enable-lora" not in alone
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"rank_pattern": {"q": 20}}))
    assert "32" in server_command(adapter)
    (adapter / "adapter_config.json").write_text(json.dumps(config))


def test_serve_without_vllm_is_refused(capsys):
    from rloo_kit.machine.hardware import why_not_vllm

    if why_not_vllm() is None:
        pytest.skip("vLLM is here; tests/vllm starts it")
    with pytest.raises(rk.KitError, match="vLLM's server cannot be started here"):
        server_command("tiny-thinker")
    with pytest.raises(ConfigError):
        server_command("tiny-thinker", port=0)
