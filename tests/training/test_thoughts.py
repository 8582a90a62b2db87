"""Marks of thoughts: the table of families, by token and by text, and what rewards then read."""

import json
from pathlib import Path

import pytest
import trl
import yaml
from rloo_kit.rewards import Coverage, Rouge, Thinking
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import rloo_kit as rk
from rloo_kit.text.redaction import redact, remember_secret
from rloo_kit.text.thoughts import (
    FAMILIES,
    completion_texts,
    find_thoughts,
    give_marks,
    opens_thought,
    thought_marks,
)

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def words(*tokens, special=(), template=None):
    """Return a tokenizer whose tokens are these, letters, spaces and what `special` names."""
    names = [*tokens, *special, *"abcdefghijklmnopqrstuvwxyz0123456789.:/'\n ", "HI"]
    backend = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, []))
    backend.add_tokens([*tokens])
    backend.add_special_tokens([*special])
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = template
    return tokenizer


THINK = ["<think>", "</think>"]
GRANITE = "first 'Here is my thought process:' and then 'Here is my response:'"


@pytest.mark.parametrize(
    ("template", "tokens", "special", "completion"),
    [
        ("qwen3", THINK, [], "<think>hm</think>4"),
        ("qwen3", THINK, [], "hm</think>4"),
        ("llama3", THINK, [], "<think>hm</think>4"),
        ("gemma4", [], ["<|channel>", "<channel|>"], "<|channel>thought\nhm<channel|>4"),
        (
            "gptoss", ["assistant"], ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"],
            "<|channel|>analysis<|message|>hm"
            "<|end|><|start|>assistant<|channel|>final<|message|>4",
        ),
        (None, [], ["[THINK]", "[/THINK]"], "[THINK]hm[/THINK]4"),
        (None, [], ["<seed:think>", "</seed:think>"], "<seed:think>hm</seed:think>4"),
        (GRANITE, ["H"], [], "Here's my thought process:hmHere is my response:4"),
    ],
)  # fmt: skip
def test_a_family_is_known_and_its_thoughts_are_counted(template, tokens, special, completion):
    file = TEMPLATES / f"{template}.jinja"
    text = file.read_text() if file.exists() else template
    tokenizer = words(*tokens, special=[*special, "<end>"], template=text)
    ids = tokenizer(completion + "<end>")["input_ids"]
    opened = "" if completion.startswith("hm") else "<think>"
    (found,) = completion_texts(tokenizer, [ids])
    assert found == f"{opened}hm</think>4"
    assert find_thoughts(thought_marks(tokenizer), [ids], found) == {
        "tokens": len(ids),
        "thought_tokens": 2,
        "answer_at": len(found) - 1,
    }
    reward = Thinking().bind(tokenizer)
    closed, open_ = reward(
        completions=[found, "hm"], completion_ids=[ids, ids[:2]], prompts=["a", "a"]
    )
    assert closed > open_ == -1


def test_a_model_of_no_family_has_no_marks():
    template = (TEMPLATES / "llama3.jinja").read_text()
    assert thought_marks(words(special=["<|eot_id|>"], template=template)) is None


@pytest.mark.parametrize(
    "reward", [Coverage(), Rouge(measure="precision")], ids=["coverage", "rouge"]
)
def test_the_models_own_mark_in_a_plain_prompt_opens_the_thought(reward):
    bound = reward.bind(words(special=("[THINK]", "[/THINK]")))
    columns = {"completions": ["a cat"], "reference": ["a cat"]}
    assert bound(prompts=["a cat [THINK]"], **columns) == [0.0]
    assert bound(prompts=["a cat [THINK] [/THINK]"], **columns) == [1.0]


def test_the_documentation_lists_every_family():
    page = (Path(__file__).parents[2] / "docs/how-to/rewards.md").read_text()
    assert [name for name in FAMILIES if f"- {name}: " not in page] == []


def test_a_mark_that_its_neighbours_share_a_token_with_is_found_in_the_text():
    tokenizer = words("<think>", ".</", "think", ">:", template="<think></think>")
    ids = tokenizer("so 4.</think>: it is 4")["input_ids"]
    marks = thought_marks(tokenizer)
    assert marks.end.token is None
    assert tokenizer.decode(marks.thought(ids)) == "so 4"
    assert completion_texts(tokenizer, [ids]) == ["so 4.</think>: it is 4"]
    opened = tokenizer("<think>so")["input_ids"]
    assert marks.is_open(opened)
    assert not marks.is_open(opened + ids)


def test_an_answer_keeps_what_only_looks_like_a_special_token():
    tokenizer = words("s", special=["<s>", "[THINK]", "[/THINK]"])
    spelt = tokenizer.convert_tokens_to_ids(["s", ":", "s"])
    ids = tokenizer("[THINK]hm[/THINK]")["input_ids"] + spelt + tokenizer("<s>")["input_ids"]
    assert completion_texts(tokenizer, [ids]) == ["<think>hm</think>s:s"]
    found = find_thoughts(thought_marks(tokenizer), [ids], "<think>hm</think>s:s")
    assert found == {"tokens": len(ids), "thought_tokens": 2, "answer_at": len("<think>hm</think>")}


def test_an_answer_begins_behind_the_mask_of_a_secret_as_the_files_have_it():
    remember_secret("qwerty7a8s9d0f1g2", "LONG_WORD")
    tokenizer = words("qwerty7a8s9d0f1g2", special=["[THINK]", "[/THINK]"])
    ids = tokenizer("[THINK]qwerty7a8s9d0f1g2[/THINK]4")["input_ids"]
    (text,) = completion_texts(tokenizer, [ids])
    at = find_thoughts(thought_marks(tokenizer), [ids], text)["answer_at"]
    assert redact(text)[at:] == "4"


def test_gpt_oss_without_analysis_has_an_empty_thought():
    special = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    tokenizer = words("assistant", "final", special=special, template="<|channel|>final<|message|>")
    ids = tokenizer("<|channel|>final<|message|>4<|return|>")["input_ids"]
    assert completion_texts(tokenizer, [ids]) == ["</think>4"]
    spelt = "<|end|><|start|>assistant<|channel|>final<|message|>4"
    assert thought_marks(tokenizer).own_text("</think>4") == spelt
    assert thought_marks(tokenizer).thought(ids) == []


def test_marks_given_by_hand_are_saved_with_the_tokenizer(tmp_path):
    tokenizer = words("a", "b", template="{{ messages[0].content }}<go>")
    assert thought_marks(tokenizer) is None
    assert not opens_thought(tokenizer, "2 + 2 <go>\n")
    give_marks(tokenizer, "<go>", "</go>")
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert thought_marks(again).end.text == "</go>"
    assert opens_thought(again, "2 + 2 <go>\n")


# --- trainings -----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_training_counts_the_thoughts_of_the_marks_that_its_run_file_gives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = {
        "model": {"name": "tiny-thinker", "load_in_4bit": False, "max_seq_length": 128},
        "data": {"num_prompts": 64, "held_out": 0},
        "rewards": ["thinking", "length"],
        "trainer": {
            "max_steps": 1, "per_device_train_batch_size": 32, "max_completion_length": 12,
        },
        "output_dir": "run",
        "thinking": {"start": "<think>", "end": "7"},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    rk.train("run.yaml")
    assert thought_marks(AutoTokenizer.from_pretrained("run/adapter")).end.text == "7"
    rows = [*map(json.loads, Path("run/completions.jsonl").read_text().splitlines())]
    texts = [row["completion"][-1]["content"] for row in rows]
    assert "7" not in "".join(texts)
    counted = [row["thought_tokens"] for row in rows]
    assert counted == [  # a byte is a token
        text.index("</think>") if "</think>" in text else None for text in texts
    ]
    assert {number is None for number in counted} == {True, False}
    scores = [row["rewards"]["thinking"] for row in rows]
    assert [score == -1 for score in scores] == [number is None for number in counted]
    page = (tmp_path / "run/report.html").read_text()
    assert all(f'"thought_tokens":{number}' in page for number in {*counted} - {None})
