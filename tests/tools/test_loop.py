"""The loop of tools: what is trained is what was sampled, and no tool ends a run by accident."""

import asyncio
import contextlib
import itertools
import json
import math
import sys
import time
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rloo_kit.errors import BackendError, ConfigError, DataError, RewardContractError
from rloo_kit.models.adapters import EMBEDDED
from rloo_kit.scoring.contract import checked
from rloo_kit.tools import loop
from rloo_kit.tools.calculator import calculator
from rloo_kit.tools.environments import Environments
from rloo_kit.tools.loop import ToolLimits, ToolLoop
from rloo_kit.tools.numbers import call_numbers
from rloo_kit.tools.python import python
from rloo_kit.training.trl_step import run_tool_loop

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
PROMPT = [{"role": "user", "content": "What is 20 + 3?"}]


def bytes_with(*special, template):
    """A tokenizer of bytes and some whole tokens; the first one ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[0], pad_token=special[0],
        chat_template=template,
    )  # fmt: skip


def qwen3(name="qwen3"):
    text = (TEMPLATES / f"{name}.jinja").read_text()
    return bytes_with("<|im_end|>", "<|im_start|>", template=text)


def qwen3_thinking():
    """Qwen3-Thinking-2507 opens the thought in the prompt; TRL does not know its template."""
    template = qwen3().chat_template
    end = template.rindex("{{- '<|im_start|>assistant\\n' }}")
    opened = "{{- '<|im_start|>assistant\\n<think>\\n' }}\n{%- endif %}"
    return bytes_with("<|im_end|>", "<|im_start|>", template=template[:end] + opened)


def several():
    tokenizer = qwen3_thinking()
    tokenizer.chat_template = {"rag": "{{ messages }}", "default": tokenizer.chat_template}
    return tokenizer


def llama():
    text = (TEMPLATES / "llama3_1.jinja").read_text()
    special = ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>")
    return bytes_with(*special, template=text)


def tiny_caller():
    return AutoTokenizer.from_pretrained(EMBEDDED["tiny-caller"])


THOUGHT = "hm\n</think>\n\n"  # the template has opened it


def hermes(*calls, **call):
    marked = [f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in [*calls, call] if one]
    return THOUGHT + "\n".join(marked)


def turn(name, **arguments):
    """A whole turn that calls one tool."""
    return f"{hermes(name=name, arguments=arguments)}<|im_end|>"


CALL = hermes(name="calculator", arguments={"expression": "20 + 3"})
IN_LLAMA = '{"name": "calculator", "parameters": {"expression": "20 + 3"}}'
TURN = f"{CALL}<|im_end|>"


class Script:
    """A sampler whose turns are given: one list of texts for each round."""

    def __init__(self, tokenizer, *rounds, log_probs=True):
        self.tokenizer = tokenizer
        self.rounds = [*rounds]
        self.read = []  # prompt ids of each round
        self.said = []  # completion ids of each round
        self.log_probs = log_probs

    def __call__(self, prompt_ids):
        texts = self.rounds.pop(0)
        assert len(texts) == len(prompt_ids)
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        self.read.append(prompt_ids)
        self.said.append(ids)
        return ids, [[-1.0] * len(one) for one in ids] if self.log_probs else None


def made(tokenizer, tools=(calculator,), environments=None, **how):
    limits = ToolLimits(**{"max_tokens": 4000, "max_length": 8000, **how})
    return ToolLoop(tools, environments, tokenizer, {}, limits, run_tool_loop)


def sample(tool_loop, script, rows=1):
    rows = [{"prompt": PROMPT}] * rows if isinstance(rows, int) else rows
    return tool_loop.sample(
        rows, script, contextlib.nullcontext, ends={script.tokenizer.eos_token_id}
    )


def played(*rounds, tools=(calculator,), rows=1, **how):
    """What is sampled of a model that says these turns, and its tokens of each round."""
    tokenizer = tiny_caller()
    script = Script(tokenizer, *rounds)
    return sample(made(tokenizer, tools, **how), script, rows), script.said


# --- what is trained -----------------------------------------------------------------------------


@pytest.mark.parametrize("log_probs", [True, False])
@pytest.mark.parametrize(
    ("make", "call"),
    [
        (tiny_caller, CALL),
        (qwen3, f"<think>\n{CALL}"),
        (lambda: qwen3("qwen2_5"), CALL),
        (lambda: qwen3("qwen3_instruct_2507"), CALL),
        (qwen3_thinking, CALL),
        (several, CALL),
        (llama, IN_LLAMA),
    ],
    ids=[
        "tiny-caller",
        "qwen3",
        "qwen2.5",
        "qwen3-instruct",
        "qwen3-thinking",
        "several",
        "llama3.1",
    ],
)
def test_what_is_trained_is_what_was_sampled(make, call, log_probs):
    tokenizer = make()
    end = tokenizer.eos_token
    rounds = [f"no call{end}", call + end], [call + end], [f"23 again{end}"]
    script = Script(tokenizer, *rounds, log_probs=log_probs)
    found = sample(made(tokenizer), script, rows=2)
    tokens = found.tokens
    # only the second row goes on after the first round
    (first, second), *others = script.said
    assert tokens.turns == [[first], [second, *itertools.chain(*others)]]
    assert tokens.sampled_ids == [[*itertools.chain(*turns)] for turns in tokens.turns]
    # the prompt of each turn is what came before it, id for id
    (first, second), *others = script.read
    for row, before in enumerate(([first], [second, *itertools.chain(*others)])):
        whole = tokens.prompt_ids[row] + tokens.completion_ids[row]
        assert [whole[: len(one)] for one in before] == before
        if log_probs:
            assert [one != 0 for one in found.sampler_log_probs[row]] == tokens.is_sampled[row]
    assert (found.sampler_log_probs is None) == (not log_probs)
    assert "23" in tokenizer.decode(tokens.completion_ids[1])
    roles = [[one["role"] for one in turns] for turns in found.completions]
    assert roles == [["assistant"], ["assistant", "tool"] * 2 + ["assistant"]]
    assert found.ended == [True] * 2


def test_a_turn_of_the_model_reads_the_result_as_the_template_shows_it():
    tokenizer = qwen3_thinking()
    script = Script(tokenizer, [TURN], ["so\n</think>\n\n23<|im_end|>"])
    found = sample(made(tokenizer), script)
    read = tokenizer.decode(script.read[1][0])
    assert "Compute an arithmetic expression exactly." in read
    assert read.endswith(
        f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n23\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
    call, result, answer = found.completions[0]
    assert call["content"].startswith("hm")
    assert call["tool_calls"][0]["function"]["arguments"] == {"expression": "20 + 3"}
    assert result == {"role": "tool", "name": "calculator", "content": "23"}
    assert answer == {"role": "assistant", "content": "so\n</think>\n\n23"}


# --- tools that fail -----------------------------------------------------------------------------


def raises(word: str) -> str:
    """Raise an error.

    Args:
        word: Its text.
    """
    raise KeyError(word * 2000)


def leaves(word: str) -> str:
    """End the process.

    Args:
        word: Not used.
    """
    sys.exit(3)


def exhausts(word: str) -> str:
    """Ask an empty iterator.

    Args:
        word: Not used.
    """
    return next(iter(()))


def hangs(word: str) -> str:
    """Never return.

    Args:
        word: Not used.
    """
    time.sleep(60)


async def waits(word: str) -> str:
    """Never return.

    Args:
        word: Not used.
    """
    await asyncio.sleep(60)


async def loses(word: str) -> str:
    """Fail with an error of its own.

    Args:
        word: Not used.
    """
    raise TimeoutError("no answer from the server")


def floods(word: str) -> str:
    """Return megabytes.

    Args:
        word: Repeated.
    """
    return word * 5_000_000


FAULTS = {
    raises: "KeyError",
    leaves: "SystemExit",
    exhausts: "StopIteration",
    hangs: "took more than 0.2 s",
    waits: "took more than 0.2 s",
    loses: "TimeoutError: no answer from the server",
}


@pytest.mark.parametrize("tool", FAULTS, ids=lambda tool: tool.__name__)
def test_the_model_reads_the_error_of_a_tool(tool):
    rounds = [turn(tool.__name__, word="x")], ["sorry<|im_end|>"]
    found, _ = played(*rounds, tools=[tool], timeout=0.2)
    text = found.completions[0][1]["content"]
    assert FAULTS[tool] in text
    assert text.startswith("{'error':")
    assert len(text) < 700
    numbers = call_numbers(found.completions, [0.0], [[0]])
    assert numbers["tools/failure_frequency"] == 1.0
    assert numbers["tools/call_frequency"] == 1.0


@pytest.mark.parametrize("tool", [raises, waits], ids=lambda tool: tool.__name__)
def test_the_error_of_a_tool_stops_the_run_if_asked_for(tool):
    tokenizer = tiny_caller()
    tool_loop = made(tokenizer, [tool], timeout=0.2, stop_on_error=True)
    script = Script(tokenizer, [turn(tool.__name__, word="x")], ["sorry<|im_end|>"])
    with pytest.raises(ConfigError, match="on_tool_error"):
        sample(tool_loop, script)
    sample(tool_loop, Script(tokenizer, ["fine<|im_end|>"]))  # the next batch is not to blame


def test_a_tool_of_the_kit_that_cannot_work_stops_the_run(monkeypatch):
    monkeypatch.setattr(sys, "platform", "plan9")
    with pytest.raises(BackendError, match="the code sandbox needs Linux, and this is plan9"):
        played([turn("python", code="print(1)")], ["sorry<|im_end|>"], tools=[python])


def test_a_result_has_a_bounded_length():
    how = {"tools": [floods], "max_tokens": 20_000, "max_length": 40_000}
    found, _ = played([turn("floods", word="x")], ["a<|im_end|>"], **how)
    result = found.completions[0][1]["content"]
    assert result.endswith("... (4990000 more characters)")
    assert len(result) < loop.MAX_RESULT + 50


def test_each_result_and_each_error_is_shown():
    tokenizer = tiny_caller()
    tool_loop = made(tokenizer, [calculator, raises])
    shown = []
    tool_loop.show = shown.append
    rounds = [TURN], [turn("raises", word="x")], ["sorry<|im_end|>"]
    sample(tool_loop, Script(tokenizer, *rounds))
    assert shown[0] == "calculator: 23"
    assert shown[1].startswith("raises: KeyError: 'xxx")


def test_async_tools_of_a_turn_run_together():
    async def slow(word: str) -> str:
        """Wait.

        Args:
            word: Returned.
        """
        await asyncio.sleep(0.5)
        return word

    calls = hermes(*({"name": "slow", "arguments": {"word": str(n)}} for n in range(6)))
    started = time.perf_counter()
    found, _ = played([f"{calls}<|im_end|>"], ["a<|im_end|>"], tools=[slow])
    assert time.perf_counter() - started < 2.0
    assert [one["content"] for one in found.completions[0][1:-1]] == list("012345")


WRONG_CALLS = [
    '{"name": "unknown", "arguments": {}}',
    '{"name": "calculator", "arguments": {"wrong": 1}}',
    '{"name": "calculator", "arguments": ["20 + 3"]}',
    '{"name": "calculator", "arguments": "20 + 3"}',
    '{"name": "calculator", "arguments": {"expression": "__import__(1)"}}',
    '{"name": "calculator"}',
]
NO_CALLS = ['{"name": 3, "arguments": {}}', '{"arguments": {}}', "{not json}", "[1]", "null"]


def marked(call):
    return f"{THOUGHT}<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_wrong_call_is_an_error_text(call):
    found, _ = played([f"{marked(call)}<|im_end|>"], ["sorry<|im_end|>"])
    assert [one["role"] for one in found.completions[0]] == ["assistant", "tool", "assistant"]
    assert found.completions[0][1]["content"].startswith("{'error':")


@pytest.mark.parametrize(
    "said", [*map(marked, NO_CALLS), f"{THOUGHT}<tool_call>", CALL.removeprefix(THOUGHT)]
)
def test_what_cannot_be_read_as_a_call_is_an_answer(said):
    found, _ = played([f"{said}<|im_end|>"])
    assert found.completions[0] == [{"role": "assistant", "content": said}]


@pytest.mark.parametrize(
    "result", [None, b"x", {"a": ["é"]}, "", "<|im_end|>\x00</think>{{ {% 𝛑", "\ud800"]
)
def test_any_result_of_any_words_is_read(result):
    def echo(text: str) -> str:
        """Say something.

        Args:
            text: Not used.
        """
        return result

    rounds = [turn("echo", text="{{ 1e999 {% é")], ["fine<|im_end|>"]
    found, _ = played(*rounds, tools=[echo])
    assert found.completions[0][1]["content"] == str(result).replace("\ud800", "?")
    assert len(found.tokens.is_sampled[0]) == len(found.tokens.completion_ids[0])


# --- limits --------------------------------------------------------------------------------------


def test_a_result_that_does_not_fit_truncates_the_trajectory():
    turns = [turn("floods", word="x"), "no<|im_end|>"]
    found, said = played(turns, tools=[floods], rows=2, max_tokens=500)
    assert found.ended == [False, True]
    assert found.tokens.completion_ids == said[0]
    assert all(found.tokens.is_sampled[0])


def test_the_last_turn_is_cut_at_the_longest_completion():
    found, _ = played([TURN], ["x" * 400], max_tokens=200)
    assert len(found.tokens.completion_ids[0]) == 200
    assert len(found.tokens.is_sampled[0]) == len(found.sampler_log_probs[0]) == 200


def test_a_result_that_fills_the_completion_is_no_answer():
    whole, said = played([TURN], ["23<|im_end|>"])
    length = len(whole.tokens.completion_ids[0]) - len(said[1][0])
    found, _ = played([TURN], ["23<|im_end|>"], max_tokens=length)
    assert [one["role"] for one in found.completions[0]] == ["assistant", "tool", "assistant"]
    assert found.completions[0][-1]["content"] == ""
    assert len(found.tokens.completion_ids[0]) == length


def test_a_prompt_that_is_too_long_with_its_tools_is_refused():
    tokenizer = qwen3()
    with pytest.raises(DataError, match=r"raise model\.max_seq_length"):
        sample(made(tokenizer, max_length=200), Script(tokenizer))


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_a_trajectory_ends_after_the_last_round(rounds):
    tokenizer = tiny_caller()
    script = Script(tokenizer, *[[TURN]] * (rounds + 1))
    found = sample(made(tokenizer, max_rounds=rounds), script)
    assert not script.rounds
    assert found.ended == [False]


# --- environments --------------------------------------------------------------------------------


class Guess:
    """A game with a number."""

    def reset(self, number, **row):
        self.number = number
        self.row = row
        self.won = False
        return " I have a number."

    def guess(self, value: int) -> str:
        """Guess the number.

        Args:
            value: The guess.
        """
        self.won = value == self.number
        return "right" if self.won else "wrong"

    def get_reward(self):
        return float(self.won)

    def _secret(self):
        return self.number


class Takes(Guess):
    def reset(self, numbers, **row):
        numbers.pop()
        self.numbers = numbers


def test_what_an_environment_changes_in_its_row_is_its_own():
    row = {"prompt": PROMPT, "numbers": [1, 2]}
    environments = Environments(Takes)
    environments.begin([row, row])
    assert row["numbers"] == [1, 2]
    assert [one.numbers for one in environments.current] == [[1], [1]]


def test_names_in_a_stream_are_checked_when_they_are_read():
    stream = Dataset.from_dict({"environment": ["lost"]}).to_iterable_dataset().map(dict)
    Environments({"a": Guess}).check_names(stream)


class Quiet(Guess):
    """Without an observation."""

    def reset(self, number, **row):
        super().reset(number, **row)


class Lost(Guess):
    def get_reward(self):
        raise KeyError("score")


def test_an_error_of_get_reward_names_its_line():
    environments = Environments(Lost)
    reward = checked(environments.rewards[0])
    environments.begin([{"prompt": PROMPT, "number": 4}])
    columns = {"environments": environments.current, "prompts": [PROMPT], "completions": ["a"]}
    with pytest.raises(RewardContractError, match=r"KeyError.*\(test_loop.py:\d+\)"):
        reward(**columns)


def test_each_trajectory_has_an_environment_of_its_own():
    tokenizer = qwen3()
    tool_loop = made(tokenizer, [], Guess)
    script = Script(tokenizer, [turn("guess", value=4)] * 2, ["ok<|im_end|>"] * 2)
    rows = [{"prompt": PROMPT, "number": number} for number in (4, 5)]
    found = sample(tool_loop, script, rows)
    assert [one[1]["content"] for one in found.completions] == ["right", "wrong"]
    (reward,) = tool_loop.environments.rewards
    assert reward.__name__ == "Guess"
    assert reward(environments=tool_loop.environments.current) == [1.0, 0.0]
    assert found.prompts[0][-1]["content"] == "What is 20 + 3? I have a number."
    assert PROMPT[0]["content"] == "What is 20 + 3?"
    assert tool_loop.environments.current[0].row == {"prompt": PROMPT}
    text = tokenizer.decode(script.read[0][0])
    assert "Guess the number." in text
    assert "_secret" not in text
    assert "get_reward" not in text
    before = [*tool_loop.environments.current]
    sample(tool_loop, Script(tokenizer, ["no<|im_end|>"] * 2), rows)
    assert tool_loop.environments.current == before  # made once, reset often


def test_an_observation_with_half_a_character_is_read():
    class Broken(Guess):
        def reset(self, **row):
            return " \ud800"

    (prompt,) = Environments(Broken).begin([{"prompt": PROMPT}])
    assert prompt[-1]["content"] == "What is 20 + 3? ?"


def test_an_observation_follows_a_prompt_in_parts():
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " 20 + 3?"}]
    rows = [{"prompt": [{"role": "user", "content": parts}], "number": 4}]
    (prompt,) = Environments(Guess).begin(rows)
    assert prompt[-1]["content"] == "What is 20 + 3? I have a number."


def test_rows_choose_an_environment_by_name():
    tokenizer = qwen3()
    tool_loop = made(tokenizer, [calculator], {"loud": Guess, "quiet": Quiet})
    names = ("loud", "quiet", "loud")
    rows = [{"prompt": PROMPT, "number": 1, "environment": name} for name in names]
    found = sample(tool_loop, Script(tokenizer, ["no<|im_end|>"] * 3), rows)
    assert [type(one) for one in tool_loop.environments.current] == [Guess, Quiet, Guess]
    assert [len(one[-1]["content"]) for one in found.prompts] == [32, 15, 32]
    first, second = tool_loop.environments.rewards
    assert first(environments=tool_loop.environments.current) == [0.0, None, 0.0]
    assert second(environments=tool_loop.environments.current) == [None, 0.0, None]
    tool_loop.environments.check_names(Dataset.from_list(rows))
    with pytest.raises(DataError, match="column environment holds None, but must name one of loud"):
        tool_loop.environments.check_names(Dataset.from_list([{"prompt": PROMPT}]))
    with pytest.raises(DataError, match="column environment holds 1, but"):  # a name is a text
        Environments({"1": Guess}).check_names(Dataset.from_dict({"environment": [1]}))
    with pytest.raises(DataError, match="column environment holds 'lost'"):
        sample(tool_loop, Script(tokenizer), [rows[0] | {"environment": "lost"}])


def test_a_reset_that_raises_is_named():
    with pytest.raises(DataError, match=r"Guess.reset raised TypeError.*number"):
        Environments(Guess).begin([{"prompt": PROMPT}])


# --- refused before the training -----------------------------------------------------------------


def test_what_does_not_fit_is_refused():
    def untyped(word):
        """Say a word.

        Args:
            word: The word.
        """

    def many(*words: str):
        """Say words.

        Args:
            words: The words.
        """

    class Late:
        async def reset(self, **row): ...

    class Big:
        def __init__(self, size): ...

    plain = bytes_with("<eos>", template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    unknown, changed, named, other = qwen3(), tiny_caller(), qwen3(), qwen3()
    unknown.chat_template = unknown.chat_template.replace("<tool_call>", "<call>")
    changed.chat_template = changed.chat_template.replace(
        "{{- content -}}", "{{- content + ('!' if loop.last else '') -}}"
    )
    named.chat_template = {"default": unknown.chat_template}
    other.chat_template = {"tool_use": other.chat_template}
    for message, given in {
        "shows no tool calls": (plain,),
        "no default chat template": (other,),
        "does not know how this model writes a tool call": (named,),
        "untyped cannot be shown": (qwen3(), [untyped]),
        r"many has the parameter \*words": (qwen3(), [many]),
        "dict needs a method def reset": (qwen3(), [], dict),
        "Late needs a method def reset.* that is not async": (qwen3(), [], Late),
        "Big raised TypeError when it was made without arguments": (qwen3(), [], Big),
        "share a name": (qwen3(), [calculator, calculator]),
        "table of environments is empty": (qwen3(), [], {}),
        "response_template": (unknown,),
        "changes earlier turns": (changed,),
    }.items():
        with pytest.raises(ConfigError, match=message):
            made(*given)
    with pytest.raises(DataError, match=r"data\.chat: true"):
        sample(made(qwen3()), Script(qwen3()), [{"prompt": "hm"}])


# --- numbers -------------------------------------------------------------------------------------


def trajectory(*results, is_open=False):
    call = {"function": {"name": "calculator", "arguments": {}}}
    turns = []
    for result in results:
        turns += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        turns += [{"role": "tool", "name": "calculator", "content": result}]
    last = {"role": "assistant", "content": "4"} | ({"tool_calls": [call]} if is_open else {})
    return [*turns, last]


def test_the_numbers_of_a_batch_are_those_counted_by_hand():
    none, one = trajectory(), trajectory("4")
    failed = trajectory("{'error': 'no'}", "4")
    cut = trajectory("x" * (loop.MAX_RESULT + 30), is_open=True)
    rows = [none, one, failed, none, one, one, cut, none]
    scores = [1.0, 0.5, 0.0, None, 1.0, 1.0, 0.0, 0.5]
    found = call_numbers(rows, scores, [[0, 1, 2, 3], [4, 5], [6, 7]])
    assert found == {
        "tools/call_frequency": 7 / 8,
        "tools/failure_frequency": 1 / 6,
        "tools/cut_frequency": 1 / 6,
        "tools/unread_frequency": 1 / 8,
        "tools/score_gain": ((0.25 - 1.0) + (0.0 - 0.5)) / 2,
        "tools/compared_frequency": 3 / 5,
    }
    found = call_numbers(["text", none], [0.0, 1.0], [[0, 1]])
    assert found["tools/call_frequency"] == found["tools/failure_frequency"] == 0.0
    assert math.isnan(found["tools/score_gain"])
    assert math.isnan(found["tools/compared_frequency"])
