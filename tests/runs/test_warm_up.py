"""warm-up: what tokens are trained, which completions are taken, what the run continues."""

import json
import shlex
import subprocess
import sys
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

import rloo_kit as rk
from rloo_kit.cli import main
from rloo_kit.data.lengths import prompt_ids
from rloo_kit.errors import DataError, MemoryRanOutError
from rloo_kit.job import PreparedJob, read_config
from rloo_kit.machine.cleanup import session
from rloo_kit.models.loading import attach_lora, load_model, load_tokenizer
from rloo_kit.runs.warm_up import best_completions, read_examples, tokenized, warm_up
from rloo_kit.text.thoughts import give_marks

RUN = """
model: {name: tiny-thinker, max_seq_length: 128}
data: {prompts: arithmetic, num_prompts: 64, held_out: 8}
rewards: [accuracy]
trainer: {max_steps: 1, per_device_train_batch_size: 16, num_generations: 4,
  max_completion_length: 48}
output_dir: runs/sums
"""
# What the model never says
ANSWER = "1+1=2\n</think>\n\n7"
TAUGHT_ROWS = [
    {"prompt": f"What is {numbers}?", "completion": ANSWER}
    for numbers in ("111 + 222", "345 + 432", "507 + 181", "623 + 154")
]


def write_rows(name, rows):
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_run_file_and_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    write_rows("rows.jsonl", TAUGHT_ROWS)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny-thinker")


def messages(text, role="user"):
    return [{"role": role, "content": text}]


# --- tokens ---------------------------------------------------------------------------------------


def text_after(tokenizer, prompt, completion, settings=None):
    """The text of the trained tokens; those of the prompt are the run's own."""
    row = {"prompt": prompt, "completion": completion}
    [(before, trained)] = tokenized(tokenizer, [row], settings)
    assert before == prompt_ids(tokenizer, prompt, settings)
    return tokenizer.decode(trained)


@pytest.mark.parametrize(
    "completion",
    ["a thought</think>\nAn answer", "<think>\na thought</think>\nAn answer",
     "<think>a thought</think>\nAn answer", "a thought</think>\nAn answer<|im_end|>"],
)  # fmt: skip
def test_a_completion_follows_the_prompt_that_the_run_samples_from(tokenizer, completion):
    # the template opens the thought in the prompt, and drops thoughts from earlier answers
    assert text_after(tokenizer, messages("Hello?"), completion) == (
        "a thought</think>\nAn answer<|im_end|>"
    )


def test_a_prompt_that_is_text_ends_with_the_text():
    tokenizer = load_tokenizer("tiny-thinker")
    tokenizer.eos_token = "<|endoftext|>"
    assert text_after(tokenizer, "2+2=", "4") == "4<|endoftext|>"
    assert text_after(tokenizer, messages("2+2="), "4") == "4<|im_end|>"


def test_settings_of_the_chat_template_are_the_runs():
    tokenizer = load_tokenizer("tiny-thinker")
    tokenizer.chat_template = (
        "{%- for message in messages -%}<|im_start|>{{ message.content }}<|im_end|>{%- endfor -%}"
        "{%- if enable_thinking is defined and not enable_thinking -%}"
        "<think></think>{%- else -%}<think>{%- endif -%}"
    )
    text = "<think>why</think>4"
    assert text_after(tokenizer, messages("2+2"), text, {"enable_thinking": True}) == (
        "why</think>4<|im_end|>"
    )
    assert text_after(tokenizer, messages("2+2"), text, {"enable_thinking": False}) == (
        "<think>why</think>4<|im_end|>"
    )


def test_a_sampled_completion_is_taught_in_the_marks_of_the_model():
    tokenizer = load_tokenizer("tiny-thinker")
    give_marks(tokenizer, "<think>\n", "=>")
    assert text_after(tokenizer, messages("2+2"), "<think>why</think>4\ud800") == (
        "why=>4?<|im_end|>"
    )


# --- examples -------------------------------------------------------------------------------------


def sampled(prompt, text, score, **more):
    answer = messages(text, "assistant")
    return {"prompt": messages(prompt), "completion": answer, "score": score, **more}


def test_the_best_completions_of_each_prompt_are_taken():
    rows = [
        sampled("one", "worse", 0.2),
        sampled("one", "best", 0.9, step=1),
        sampled("one", "best", 0.9, step=2),
        sampled("one", "as good", 0.9),
        sampled("one", "cut off", 1.0, truncated=True),
        sampled("one", "unscorable", None),
        sampled("one", "", 1.0),
        sampled("all the same", "right", 1.0),
        sampled("all the same", "right too", 1.0),
        sampled("cut off", "no", 0.0),
        sampled("cut off", "yes", 1.0, truncated=True),
    ]
    Path("run").mkdir()
    write_rows("run/completions.jsonl", rows)
    assert [row["completion"] for row in read_examples("run")] == ["best", "as good"]
    assert read_examples("run") == read_examples("run/completions.jsonl")
    assert best_completions(rows[7:]) == []
    right = sampled("two", "right", True)
    assert read_examples([right, sampled("two", "wrong", Decimal(0))])[0]["completion"] == "right"


def test_conversations_are_examples_of_their_last_answer():
    talk = [*messages("Hi"), *messages("Yes?", "assistant"), *messages("2+2?")]
    write_rows("talk.jsonl", [{"messages": [*talk, *messages("4", "assistant")]}])
    assert read_examples("talk.jsonl") == [{"prompt": talk, "completion": "4"}]
    answers = [{"messages": [*talk, *messages(str(n), "assistant")], "score": n} for n in (3, 4)]
    write_rows("talk.jsonl", answers)
    assert [row["completion"] for row in read_examples("talk.jsonl")] == ["4"]
    unscored = [row | {"score": None} for row in answers]
    write_rows("talk.jsonl", unscored)
    assert [row["completion"] for row in read_examples("talk.jsonl")] == ["3", "4"]
    write_rows("talk.jsonl", [*unscored, {"prompt": "2+2?", "completion": "", "score": None}])
    with pytest.raises(DataError, match=r"line 3: `completion` has no text \(other"):
        read_examples("talk.jsonl")
    Path("run").mkdir()
    write_rows("run/completions.jsonl", unscored)
    with pytest.raises(DataError, match=r"none of the 2 .*leave the column `score` out"):
        read_examples("run")
    write_rows("talk.jsonl", [{"messages": talk}])
    with pytest.raises(DataError, match=r"line 1: messages must .* of the assistant"):
        read_examples("talk.jsonl")


def test_csv_and_parquet_are_read():
    Path("rows.csv").write_text("prompt,completion\n2+2?,4\n")
    rows = [{"prompt": "2+2?", "completion": "4"}]
    assert read_examples("rows.csv") == read_examples(rows) == rows
    text = "prompt,completion,score,truncated\n2+2?,4,1e0,False\n2+2?,5,0,False\n2+2?,x,1,True\n"
    Path("scored.csv").write_text(text)
    assert [row["completion"] for row in read_examples("scored.csv")] == ["4"]
    Path("scored.csv").write_text(text.replace("1e0", "good"))
    with pytest.raises(DataError, match="line 2: score is 'good'"):
        read_examples("scored.csv")
    from datasets import Dataset

    Dataset.from_list(rows).to_parquet("rows.parquet")
    assert read_examples("rows.parquet") == rows


# --- what is refused ------------------------------------------------------------------------------


@pytest.fixture
def refused(capsys, monkeypatch):
    """A function that runs the command, which must fail, and returns its one line on stderr."""

    def call(*words):
        before = sorted(Path().rglob("*"))
        assert main(["warm-up", "run.yaml", "--examples", "rows.jsonl", *words]) == 2
        line = capsys.readouterr().err
        assert line.startswith("rloo-kit: ")
        assert line.count("\n") == 1
        assert sorted(Path().rglob("*")) == before
        return line

    monkeypatch.setattr("rloo_kit.job.load_model", None)  # no weights are loaded
    return call


LONG = "1" * 90
WRONG_EXAMPLES = {
    "": "there are no rows: add at least one",
    '{"prompt": "2+2?", "answer": "4"}': "line 1: `completion` has no text (other",
    '{"prompt": "1", "completion": "1"}\n{"prompt": "2", "completion": " "}': "has no text",
    '{"completion": "4"}': "line 1: prompt is None",
    f'{{"prompt": "{LONG}", "completion": "{LONG}"}}': "all 1 examples are longer than",
    '{"prompt": "a", "completion": "123456789 123456789 123456789 123456789 12345678"}': (
        "max_completion_length 48"
    ),
    '{"prompt": "a", "completion": "b", "score": [1.0]}': "score is [1.0], must be a number or",
    '{"prompt": "a", "completion": "b", "score": 1.0}': (
        "none of the 1 completions in 'rows.jsonl' has a `score` above"
    ),
}


@pytest.mark.parametrize("text", WRONG_EXAMPLES)
def test_examples_that_teach_nothing_are_refused(refused, text):
    Path("rows.jsonl").write_text(text)
    assert WRONG_EXAMPLES[text] in refused()


WRONG_SETTINGS = {
    "--examples none.jsonl": "'none.jsonl' does not exist",
    "--steps 0": "steps is 0, must be greater than 0",
    "--epochs -1": "epochs is -1.0, must be greater than 0",
    "--learning-rate 0": "learning_rate is 0.0, must be greater than 0",
    "--steps 4 --epochs 2": "steps and epochs are both given",
    "--set trainer.stepz=1": "unknown trainer setting 'stepz'",
    "--set tools=[calculator]": "a warm-up cannot train tool calls",
}


@pytest.mark.parametrize("words", WRONG_SETTINGS)
def test_settings_that_are_wrong_are_refused(refused, words):
    assert WRONG_SETTINGS[words] in refused(*words.split())


def test_a_launcher_is_refused(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert "one process" in refused()


@pytest.mark.long
def test_out_of_memory_and_ctrl_c_leave_nothing(monkeypatch):
    def say(line):
        if "loss" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_up("run.yaml", "rows.jsonl", steps=2, say=say)

    def train(self, *args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(transformers.Trainer, "train", train)
    with pytest.raises(MemoryRanOutError, match="leave the longest examples out"):
        warm_up("run.yaml", "rows.jsonl", steps=2, say=lambda line: None)
    assert sorted(path.name for path in Path().iterdir()) == ["rows.jsonl", "run.yaml"]


def test_the_next_command_of_a_pattern_of_layers_and_a_single_override_can_be_run(monkeypatch):
    pattern = r".*layers\.[01]\..*_proj"
    Path("run.yaml").write_text(RUN + f"lora: {{target_modules: '{pattern}'}}\n")

    def trained(job, rows, settings, folder):
        folder.mkdir(parents=True)
        adapter = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": pattern}
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
        return folder, {}

    monkeypatch.setattr("rloo_kit.runs.warm_up._trained", trained)
    said = []
    warm_up("run.yaml", "rows.jsonl", overrides="seed=7", say=said.append)
    words = shlex.split(said[-1].partition("; train it further with ")[2])
    assert words[:5] == ["rloo-kit", "train", "run.yaml", "--set", "seed=7"]
    config, _ = read_config(words[2], words[4::2])
    assert config.seed == 7
    assert PreparedJob(config).config.lora.target_modules == [pattern]


@pytest.mark.long
def test_a_warm_up_that_ends_later_takes_another_folder():
    def say(line):
        if "loss" in line:
            Path("made").mkdir(exist_ok=True)
            Path("made/adapter_config.json").write_text("{}")

    made = warm_up("run.yaml", "rows.jsonl", steps=1, output="made", say=say)
    assert made == Path("made-2")
    assert Path("made/adapter_config.json").read_text() == "{}"


# --- training -------------------------------------------------------------------------------------


def mean_loss(pairs):
    """The mean over completion tokens of -log p under the embedded model, from its full logits."""
    with session(), torch.no_grad():
        model = attach_lora(load_model("tiny-thinker", max_seq_length=128)[0])
        losses = []
        for before, after in pairs:
            logits = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].float()
            chosen = logits.log_softmax(-1).gather(-1, torch.tensor(after)[:, None])
            losses += (-chosen).flatten().tolist()
    return sum(losses) / len(losses)


@pytest.mark.long
def test_examples_are_learnt_and_the_run_continues(capsys, tokenizer):
    too_long = {"prompt": "What is 1 + 1?", "completion": "b" * 100}
    write_rows("rows.jsonl", [*TAUGHT_ROWS, too_long])
    command = "warm-up run.yaml --examples rows.jsonl --steps 24 --learning-rate 1e-2 --set seed=7"
    command += " --set lora.target_modules=all-linear --set data.system=Add."
    assert main(command.split()) == 0
    said = capsys.readouterr().out.splitlines()
    assert any(line.startswith("1 of 5 examples left out: longer than") for line in said)
    assert sum("loss" in line for line in said) == 12
    folder = Path("runs/sums-warm-up")
    facts = json.loads((folder / "warm_up.json").read_text())
    system = messages("Add.", "system")
    prompts = [row | {"prompt": system + messages(row["prompt"])} for row in TAUGHT_ROWS]
    # four examples are a step: the first loss is that of the model as it was
    assert facts["losses"][0] == pytest.approx(
        mean_loss(tokenized(tokenizer, prompts, None)), rel=2e-3
    )
    assert facts["losses"][-1] < 0.1
    assert not Path("unsloth_compiled_cache").exists()

    with session():
        policy = load_model(folder, max_seq_length=128)
        found = rk.evaluate(*policy, prompts, [], temperature=0.0, max_completion_length=48)
    assert [one["completion"] for one in found.samples] == [ANSWER] * 4
    assert found.cut_off == 0

    command = shlex.split(said[-1].partition("; train it further with ")[2])
    assert command[:3] == ["rloo-kit", "train", "run.yaml"]
    assert main(command[1:]) == 0
    assert rk.read_run_file("runs/sums/run.yaml").seed == 7
    lines = Path("runs/sums/completions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    # on sums that were not taught
    assert sum(row["completion"][0]["content"].startswith("1+1=2") for row in rows) > 3


UNDER_UNSLOTH = """
import json
import rloo_kit as rk
rk.setup()
import trl
import trl.trainer.sft_trainer
# of Unsloth's class for a CPU its patcher finds no source
trl.SFTTrainer = trl.trainer.sft_trainer.SFTTrainer = trl.SFTTrainer.__mro__[1]
from unsloth.models.rl import patch_trl_rl_trainers
patch_trl_rl_trainers()
print(trl.SFTTrainer.__name__)
folder = rk.warm_up("run.yaml", "rows.jsonl", steps=2, learning_rate=1e-3)
print(json.dumps(json.loads((folder / "warm_up.json").read_text())["losses"]))
"""


@pytest.mark.long
@pytest.mark.skipif(
    find_spec("triton") is None,
    reason="Unsloth's patcher needs triton: make test-gpu-contract runs it",
)
def test_under_unsloths_patched_class_the_same_tokens_are_trained(tokenizer):
    done = subprocess.run([sys.executable, "-c", UNDER_UNSLOTH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert "UnslothSFTTrainer" in lines
    prompts = [row | {"prompt": messages(row["prompt"])} for row in TAUGHT_ROWS]
    losses = json.loads(lines[-1])
    assert losses[0] == pytest.approx(mean_loss(tokenized(tokenizer, prompts, None)), rel=2e-2)
    assert losses[1] < losses[0]
    assert {path.name for path in Path().iterdir()} == {"run.yaml", "rows.jsonl", "runs"}
