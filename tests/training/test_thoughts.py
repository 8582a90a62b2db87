"""Marks of thoughts: the table of families, by token and by text, and what rewards then read."""

import json
import shutil
from pathlib import Path

import pytest
import trl
import yaml
from rloo_kit.rewards import Coverage, Rouge
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.text.thoughts import (
    FAMILIES,
    completion_texts,
    find_thought,
    give_marks,
    opens_thought,
    thought_marks,
)

# Family -> what opens and what closes a thought, and whether these tokens are special
RENAMED = {
    "Qwen3": ("<think>\n", "</think>", False),
    "Magistral": ("[THINK]", "[/THINK]", True),
    "Seed-OSS": ("<seed:think>", "</seed:think>", True),
    "Gemma 4": ("<|channel>thought\n", "<channel|>", True),
    "given by hand": ("<reason>\n", "</reason>", False),
}
# Family -> tokens of a model that speaks at random, those that open a thought, that close it
SPOKEN = {
    "gpt-oss": (
        ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "assistant", "final", "analysis"],
        ["<|channel|>", "analysis", "<|message|>"],
        ["<|channel|>", "final", "<|message|>"],
    ),
    "Granite 3.2": (
        ["Here", "Ġis", "Ġmy", "Ġresponse", ":"],
        ["Here", "Ġis", "Ġmy", "Ġthought", "Ġprocess", ":"],
        ["Here", "Ġis", "Ġmy", "Ġresponse", ":"],
    ),
}


def renamed_thinker(folder, family):
    """Write the embedded model with another family's marks: it thinks as it did."""
    start, end, special = RENAMED[family]
    shutil.copytree(TINY_THINKER, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    names = {"<think>": start.removesuffix("thought\n").strip(), "</think>": end}
    for token in content["added_tokens"]:
        if token["content"] in names:
            token["content"] = names[token["content"]]
            token["special"] = special
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {names.get(name, name): n for name, n in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    for file in (folder / "chat_template.jinja", folder / "tokenizer_config.json"):
        if file.exists():
            template = file.read_text()
            old = "<think>\\n"
            new = start.replace("\n", "\\n")
            file.write_text(template.replace(old, new).replace("</think>", end))


def speaker(folder, family):
    """Write a model that draws the words of a family nearly at random; its thoughts happen."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    words, _, close = SPOKEN[family]
    vocabulary = ["<eos>", *words, "."]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(vocabulary)}, "."))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [word for word in vocabulary if word.startswith("<|")]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>",
        extra_special_tokens=special,
    )  # fmt: skip
    sign = "".join(close) if special else "Here is my thought process:"
    tokenizer.chat_template = "{# " + sign + " #}{{ messages[0].content }}."
    size = len(vocabulary)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=size,
            num_attention_heads=2,
            num_key_value_heads=2,
            eos_token_id=0,
            tie_word_embeddings=False,
            max_position_embeddings=256,
            **shape,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[0, 0] = -1.0  # so that completions are long
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def by_hand(family, ids, tokenizer):
    """Return the length of a thought, counted in the ids; None where none is closed."""
    if family in RENAMED:
        close = tokenizer.convert_tokens_to_ids(RENAMED[family][1])
        return ids.index(close) if close in ids else None
    close = tokenizer.convert_tokens_to_ids(SPOKEN[family][2])
    places = [n for n in range(len(ids)) if ids[n : n + len(close)] == close]
    if not places:
        return None
    end = places[0]
    before = tokenizer.convert_tokens_to_ids(["<|end|>", "<|start|>", "assistant"])
    if family == "gpt-oss" and ids[max(0, end - 3) : end] == before:
        end -= 3
    opened = tokenizer.convert_tokens_to_ids(SPOKEN[family][1])
    return end - (len(opened) if ids[: len(opened)] == opened else 0)


# --- the table -----------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("template", "tokens", "special", "end"),
    [
        ("qwen3", ["<think>", "</think>"], [], "</think>"),
        ("deepseek_r1_distill", ["<think>", "</think>"], [], "</think>"),
        ("glm4moe", ["<think>", "</think>"], [], "</think>"),
        ("gemma4", [], ["<|channel>", "<channel|>"], "<channel|>"),
        ("gptoss", [], ["<|channel|>", "<|message|>", "<|end|>"], "final"),
        (None, [], ["[THINK]", "[/THINK]"], "[/THINK]"),
        (None, [], ["<seed:think>", "</seed:think>"], "</seed:think>"),
        ("llama3", ["<think>", "</think>"], [], "</think>"),
        ("llama3", [], ["<|eot_id|>"], None),
    ],
)
def test_a_family_is_known_by_its_tokenizer_and_template(template, tokens, special, end):
    text = (TEMPLATES / f"{template}.jinja").read_text() if template else None
    marks = thought_marks(words(*tokens, special=special, template=text))
    assert (marks is None) if end is None else (end in marks.end.text)


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
    found = find_thought(thought_marks(tokenizer), ids, "<think>hm</think>s:s")
    assert found == {"tokens": len(ids), "thought_tokens": 2, "answer_at": len("<think>hm</think>")}


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
@pytest.mark.parametrize("family", [*RENAMED, *SPOKEN])
def test_every_family_trains_and_its_thoughts_are_counted(family, tmp_path, monkeypatch):
    import rloo_kit as rk

    monkeypatch.chdir(tmp_path)
    (renamed_thinker if family in RENAMED else speaker)(tmp_path / "model", family)
    (tmp_path / "notes.py").write_text(
        "import json\n\n\ndef note(completions, completion_ids, **_):\n"
        "    with open('ids.jsonl', 'a') as file:\n"
        "        for one, ids in zip(completions, completion_ids):\n"
        "            print(json.dumps([one[0]['content'], ids]), file=file)\n"
        "    return [0.01 * len(set(ids)) for ids in completion_ids]\n"
    )
    run = {
        "model": {"name": "model", "load_in_4bit": False, "max_seq_length": 128},
        "data": {"num_prompts": 64, "held_out": 0},
        "rewards": ["thinking", "notes.py:note"],
        "trainer": {
            "max_steps": 3, "per_device_train_batch_size": 128 if family in SPOKEN else 16,
            "max_completion_length": 96 if family in SPOKEN else 48, "learning_rate": 1e-4,
        },
        "output_dir": "run",
        "thinking": {"start": "<reason>", "end": "</reason>"} if family == "given by hand" else {},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    rk.train("run.yaml")
    tokenizer = AutoTokenizer.from_pretrained("run/adapter")
    assert thought_marks(tokenizer) is not None
    drawn, rows = (
        list(map(json.loads, Path(name).read_text().splitlines()))
        for name in ("ids.jsonl", "run/completions.jsonl")
    )
    expected = [by_hand(family, ids, tokenizer) for _, ids in drawn]
    assert [row["thought_tokens"] for row in rows] == expected
    closed = [number is not None for number in expected]
    assert any(closed)
    assert [("</think>" in text) for text, _ in drawn] == closed
    scores = [row["rewards"]["thinking"] for row in rows]
    bands = [-1.0 if n is None else 0.3 if n < 10 else 0.7 if n < 30 else 1.0 for n in expected]
    assert all(abs(score - band) < 0.11 for score, band in zip(scores, bands, strict=True))
    page = (tmp_path / "run/report.html").read_text()
    assert any(f'"thought_tokens":{number}' in page for number in expected if number is not None)
