"""rloo-kit chat and serve: what is said, shown and started."""

import contextlib
import io
import itertools
import json
import shutil
import sys
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.config.run_file import DataSection
from rloo_kit.data.hub_tasks import SYSTEM
from rloo_kit.data.lengths import prompt_ids
from rloo_kit.errors import ConfigError
from rloo_kit.evaluation.trained import find_trained, load_base
from rloo_kit.export.chat import chat, confirmed_python, printer
from rloo_kit.export.serve import server_command
from rloo_kit.job import system_message
from rloo_kit.machine.hardware import Hardware, why_not_vllm
from rloo_kit.models.loading import load_tokenizer
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.rloo.batching import TokenRows

QUESTION = "What is 252 + 409?"
# The lowest temperature: greedy
RUN_FILE = "trainer: {temperature: 0.001, max_completion_length: 60}\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory, save_adapter):
    """The folder of a run whose adapter changes what is said."""
    folder = tmp_path_factory.mktemp("runs") / "polite"
    save_adapter(folder / "adapter", std=0.2)
    (folder / "run.yaml").write_text(RUN_FILE)
    (folder / "end.json").write_text("{}")
    return folder


def talk(model, *lines, **settings):
    lines = "".join(f"{line}\n" for line in lines)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "stdin", io.StringIO(lines))
        chat(str(model), **settings)
    return out.getvalue()


def greedy(trained):
    """What a model answers, by the kit's own evaluation."""
    rows = [{"prompt": [{"role": "user", "content": QUESTION}]}]
    one = load_base(trained)
    with one.using(trained) as loaded:
        found = rk.evaluate(
            loaded, one.tokenizer, rows, [], temperature=0, max_completion_length=60
        )
    return found.samples[0]["completion"]


@pytest.mark.long
def test_chat_answers_as_the_model_and_its_base_do_and_remembers(run):
    trained = find_trained(run)
    own, of_base = (greedy(one).split() for one in (trained, trained.without_adapter()))
    assert own != of_base
    twice = talk(run, QUESTION, "", QUESTION).split()  # the blank line is skipped
    assert twice[: len(own)] == own
    assert twice != own + own
    both = talk(run, QUESTION, base=True)
    assert both.split() == ["polite:", *own, "base:", *of_base]


def test_a_thought_that_was_cut_off_is_not_remembered(run, tmp_path, monkeypatch):
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "run.yaml").write_text(RUN_FILE.replace("60", "4"))
    prompts = Mock(wraps=prompt_ids)
    monkeypatch.setattr("rloo_kit.export.chat.prompt_ids", prompts)
    assert talk(folder, QUESTION, QUESTION).strip()
    turns = [turn["content"] for turn in prompts.call_args.args[1]]
    assert turns[:3] == [QUESTION, "", QUESTION]


def test_a_thought_that_was_cut_off_after_a_call_is_not_remembered(run, monkeypatch):
    given = []

    def sample(rows, *_):
        given.append([turn["content"] for turn in rows[0]["prompt"]])
        said = [{"role": "assistant", "content": text} for text in ("a call", "<think>so")]
        ids = load_tokenizer("tiny-thinker")("<think>so").input_ids
        return Mock(completions=[said], tokens=TokenRows([[1]], [ids]))

    monkeypatch.setattr("rloo_kit.export.chat._tool_loop", lambda *_: Mock(sample=sample))
    talk(run, QUESTION, QUESTION)
    assert given[1] == [QUESTION, "a call", "", QUESTION]


@pytest.mark.long
def test_a_models_own_settings_of_sampling_do_not_apply(run, tmp_path):
    base = shutil.copytree(TINY_THINKER, tmp_path / "base")
    file = base / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 9.0}))
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "run.yaml").write_text(f"model: {{name: {base}}}\n{RUN_FILE}")
    assert talk(folder, QUESTION).split() == greedy(find_trained(folder)).split()


def test_conversation_that_is_too_long_is_refused(run):
    with pytest.raises(ConfigError, match="start a new conversation"):
        talk(run, "1 + 2 = 3. " * 200)


@pytest.mark.long
def test_the_model_calls_the_tools_of_its_run(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "async def calculator(expression: str) -> str:\n"
        '    """Compute.\n\n    Args:\n        expression: What.\n    """\n'
        "    return str(eval(expression))\n"
    )
    (tmp_path / "run.yaml").write_text(
        "model: {name: tiny-caller, max_seq_length: 512}\n"
        "tools: [mine.py:calculator]\nenvironment: maze\n"
        "data: {prompts: sums}\n"
        "trainer: {max_steps: 1, per_device_train_batch_size: 4, num_generations: 4,\n"
        "  max_completion_length: 96}\n"
        f"output_dir: {tmp_path}/run\n"
    )
    rk.train(tmp_path / "run.yaml", ["data.held_out=0"])
    capsys.readouterr()
    for seed in range(60):  # a completion has a call one time in five
        torch.manual_seed(seed)
        said = talk(tmp_path / "run", "What is 345 + 432?", "What is 2 + 2?")
        if "calculator: 777" in said:
            break
    assert said.startswith("environments are not used in a chat")
    call, _, answer = said.partition("calculator: 777")
    assert '"expression": "345 + 432"' in call
    assert "777" in answer


def test_the_user_confirms_each_program(monkeypatch):
    console = Console(file=io.StringIO())
    answers = iter(["", "y"])
    monkeypatch.setattr("builtins.input", lambda *_: next(answers))
    run_program = confirmed_python(console)
    with pytest.raises(PermissionError, match="the user did not allow the program to run"):
        run_program(code="print(6 * 7)")
    assert run_program(code="print(6 * 7)") == "42\n"
    assert console.file.getvalue().count("run this program? [y/N] ") == 2


def test_terminal_dims_the_thought_and_escapes_control_characters():
    console = Console(file=io.StringIO(), force_terminal=True)
    for in_thought in (True, False):
        show = printer(console, in_thought)
        for piece in ("so 4\x1b[2J ", "is </think>\n\nthe ", "answer [b]"):
            show(piece)
    thought, again, _ = console.file.getvalue().split("answer [b]")
    assert thought.startswith("\x1b[2mso 4\\x1b[2J \x1b[0m\x1b[2mis </think>\x1b[0m")
    assert thought.endswith("the ")
    assert "\x1b[2m" not in again  # nobody opened a thought


def test_a_base_is_not_its_own_base(capsys):
    assert main(["chat", "tiny-thinker", "--base"]) == 2
    assert "is its own base" in capsys.readouterr().err


# --- serve ----------------------------------------------------------------------------------------


@pytest.fixture
def with_vllm(monkeypatch):
    """As if vLLM were here; tests/vllm starts a real server."""
    monkeypatch.setattr("rloo_kit.export.serve.why_not_vllm", lambda: None)


def test_server_command_has_base_and_adapter(run, with_vllm):
    command = server_command(run, ["--port", "8123"])
    given = dict(itertools.pairwise(command))
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert given["--model"].endswith("tiny-thinker")
    assert "--gpu-memory-utilization" not in given  # there is no card
    served = json.loads(given["--lora-modules"])
    assert served == {"name": "polite", "path": str(run.resolve() / "adapter")}
    assert given["--max-lora-rank"] == "8"
    assert given["--host"] == "127.0.0.1"
    assert command[-2:] == ["--port", "8123"]
    assert "--enable-lora" not in server_command("tiny-thinker")
    file = run / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rank_pattern": {"q": 20}}))
    assert "32" in server_command(run)


def test_server_takes_what_is_free_of_a_card_and_the_bits_of_the_run(
    run, with_vllm, tmp_path, monkeypatch
):
    gib = 1024**3
    card = Hardware("cuda", "RTX 3060", 12 * gib, 9 * gib, True, 1)
    monkeypatch.setattr("rloo_kit.export.serve.detect_hardware", lambda: card)
    given = dict(itertools.pairwise(server_command(run)))
    assert given["--gpu-memory-utilization"] == "0.690"
    assert given["--quantization"] == "bitsandbytes"
    assert "--quantization" not in server_command("tiny-thinker")
    shutil.copytree(run, tmp_path / "run")
    base = tmp_path / "of-a-bnb-4bit" / "toy"  # the name of another folder says nothing
    base.mkdir(parents=True)
    (tmp_path / "run/run.yaml").write_text(f"model: {{name: {base}}}\n")
    packed = {"quantization_config": {"quant_method": "mxfp4"}}
    none = {"quantization_config": None}
    for config in (none, packed, {"text_config": packed}, {"text_config": none}):
        (base / "config.json").write_text(json.dumps(config))  # where vLLM reads the bits
        is_packed = "mxfp4" in str(config)
        assert ("--quantization" in server_command(tmp_path / "run")) == (not is_packed)


def test_server_renders_prompts_as_the_run_did(run, with_vllm, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "run.yaml").write_text(
        "model: {chat_template: mine.jinja}\ndata: {enable_thinking: false}\n"
        "trainer: {chat_template_kwargs: {tone: polite}}\n"
    )
    given = dict(itertools.pairwise(server_command(folder)))
    trained_with = folder / "adapter" / "chat_template.jinja"
    assert given["--chat-template"] == str(trained_with)
    trained_with.unlink()  # as in a checkpoint
    assert "mine.jinja" in server_command(folder)
    settings = json.loads(given["--default-chat-template-kwargs"])
    assert settings == {"tone": "polite", "enable_thinking": False}
    assert not {"--chat-template", "--default-chat-template-kwargs"} & {*server_command(run)}


def test_serve_without_vllm_is_refused():
    if why_not_vllm() is None:
        pytest.skip("vLLM is here; tests/vllm starts it")
    with pytest.raises(rk.KitError, match="vLLM's server cannot be started here"):
        server_command("tiny-thinker")


def test_a_task_brings_its_system_message():
    assert system_message(DataSection(prompts="gsm8k")) == SYSTEM
    assert system_message(DataSection(prompts="gsm8k", system="Be brief.")) == "Be brief."
    assert not system_message(DataSection(prompts="gsm8k", system=""))
    assert system_message(DataSection(prompts="arithmetic")) is None
