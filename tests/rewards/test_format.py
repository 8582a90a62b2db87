"""The formats: regular expressions, tags, JSON, and the factory behind the name."""

import pickle
import re
import time

import pytest
from rloo_kit.rewards import JsonFormat, RegexFormat, TagFormat
from rloo_kit.rewards.format import make_format

from rloo_kit.errors import RewardLoadError
from rloo_kit.scoring.specs import load_reward

ENDLESS = "(a|aa)+$", "a" * 60 + "!"  # a pattern and a text on which it backtracks for years


def score(reward, text, prompt="Q"):
    return reward(completions=[text], prompts=[prompt])[0]


# --- regular expressions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "text", "expected"),
    [
        ({"pattern": r"a.*b"}, "a\nx\nb", 1.0),
        ({"pattern": r"a.*b"}, "xa b", 0.0),
        ({"pattern": r"a.*b"}, "A b", 0.0),
        ({"pattern": r"a.*b", "full": False}, "xa\nbx", 1.0),
        ({"pattern": r"^a", "full": False}, "x\na", 0.0),
        ({"pattern": r"\d+", "part": "answer"}, "a 1</think> 4\n", 1.0),
        ({"pattern": r"\d+", "part": "answer"}, "1</think> four", 0.0),
        ({"pattern": r"\d+", "part": "answer", "full": False}, "a</think>It is 4.", 1.0),
        ({"pattern": r"\d+", "part": "answer"}, "<think>4", 0.0),
        ({"pattern": r"\S+"}, "", 0.0),
        ({"pattern": r".+"}, "\ud800\U0001f600", 1.0),
    ],
)
def test_a_regular_expression_is_matched(parameters, text, expected):
    assert score(RegexFormat(**parameters), text) == expected


def test_an_answer_needs_a_closed_thought():
    reward = RegexFormat("4", part="answer")
    chat = [{"role": "user", "content": "Q"}]
    assert score(reward, "4", "Q<think>") == 0.0
    assert score(reward, "4", chat) == 1.0
    assert score(RegexFormat("4", part="answer", thought_opened=True), "4", chat) == 0.0


def test_a_pattern_that_backtracks_without_end_scores_nothing_in_time():
    pattern, text = ENDLESS
    began = time.process_time()
    assert RegexFormat(pattern)(completions=[text, "aaa"]) == [0.0, 1.0]
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("parameters", "remedy"),
    [
        ({"pattern": "("}, r"'\(' is not a regular expression .* correct it"),
        ({"pattern": None}, "is not a regular expression"),
        ({"pattern": "a", "part": "thought"}, "give one of: completion, answer"),
    ],
)
def test_a_bad_pattern_is_refused(parameters, remedy):
    with pytest.raises(ValueError, match=remedy):
        RegexFormat(**parameters)


# --- tags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think><answer>4</answer>", 1.0),
        ("\n<think>\na\n</think>\n\n<answer>4</answer>\n", 1.0),
        ("<think>a < b <b>c</b></think><answer>4</answer>", 1.0),
        ("a</think><answer>4</answer>", 0.0),
        ("<answer>4</answer><think>a</think>", 0.0),
        ("<think>a<answer>4</answer></think>", 0.0),
        ("</think>a<think><answer>4</answer>", 0.0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer></answer>", 0.0),
        ("so <think>a</think><answer>4</answer>", 0.0),
        ("<think>a</think> so <answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer> so", 0.0),
        ("<think>a</think><answer id='1'>4</answer>", 0.0),
    ],
)
def test_each_tag_stands_once_in_order_with_nothing_outside(text, expected):
    assert score(TagFormat(tags=("think", "answer")), text) == expected


def test_a_thought_opened_in_the_prompt_is_the_first_tag(qwen3_tokenizer, monkeypatch):
    reward = TagFormat(tags=("think", "answer"))
    rest = "a</think><answer>4</answer>"
    whole = "<think>a</think><answer>4</answer>"
    assert (score(reward, rest, "Q<think>\n"), score(reward, whole, "Q<think>")) == (1.0, 0.0)
    monkeypatch.setattr(qwen3_tokenizer, "chat_template", "Q<think>\n")
    bound = reward.bind(qwen3_tokenizer)
    chat = [{"role": "user", "content": "Q"}]
    assert (score(bound, rest, chat), score(bound, whole, chat)) == (1.0, 0.0)
    assert score(TagFormat(tags="answer"), "<answer>4</answer>", "Q<think>") == 1.0


# --- JSON -----------------------------------------------------------------------------------------

SCHEMA = {
    "$defs": {"count": {"type": "integer", "minimum": 0}},
    "type": "object",
    "properties": {"total": {"$ref": "#/$defs/count"}, "unit": {"pattern": "^[a-z]+$"}},
    "required": ["total"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"total": 4}', 1.0),
        ('\n{"total": 4,\n "unit": "m"}\n', 1.0),
        ('```json\n{"total": 4}\n```', 1.0),
        ('```JSON\n{"total": 4}```', 1.0),
        ('{"sum": 4}', 0.0),
        ('{"total": 4, "unit": "M"}', 0.0),
        ('{"total": 4, "more": 1}', 0.0),
        ('{"total": 4', 0.0),
        ('Here: {"total": 4}', 0.0),
        ('Here:\n```json\n{"total": 4}\n```', 0.0),
        ('```json\n{"total": 4}\n```\n```json\n{"total": 4}\n```', 0.0),
    ],
)
def test_the_answer_is_json_under_the_schema(answer, expected):
    assert score(JsonFormat(schema=SCHEMA), f'{{"total": 4}}</think>{answer}') == expected


@pytest.mark.parametrize("answer", ["NaN", "[Infinity]", "-Infinity", "1e999", "[" * 100_000])
def test_what_no_reader_can_hold_is_no_json(answer):
    assert score(JsonFormat(schema={}), answer) == 0.0
    assert score(JsonFormat(schema=True), '[1.5e3, null, "\\ud800"]') == 1.0


def test_a_pattern_in_a_schema_has_a_time_limit():
    pattern, text = ENDLESS
    assert score(JsonFormat(schema={"pattern": pattern}), f'"{text}"') == 0.0
    assert score(JsonFormat(schema={"pattern": pattern}), '"aaa"') == 1.0
    assert score(JsonFormat(schema={"pattern": pattern}), "4") == 1.0


@pytest.mark.parametrize("schema", [3, "object", [1], {"type": "objekt"}, {"enum": {1, 2}}])
def test_a_bad_schema_is_refused(schema):
    with pytest.raises(ValueError, match=r"is not a JSON schema .* give a table such as"):
        JsonFormat(schema=schema)


NUMBER = {"$defs": {"n": {"type": "number"}, "list": {"items": {"$ref": "#/$defs/n"}}}}


def test_a_reference_inside_the_schema_is_followed():
    reward = JsonFormat(schema={"$ref": "#/$defs/list", **NUMBER})
    assert [score(reward, text) for text in ("[1, 2]", '["1"]')] == [1.0, 0.0]


@pytest.mark.parametrize("key", ["$ref", "$dynamicRef"])
@pytest.mark.parametrize("name", ["#/$defs/none", "#none", "https://example.com/a", "other.json"])
def test_a_reference_out_of_the_schema_is_refused(key, name):
    schema = {"properties": {"total": {"items": {key: name}}}, **NUMBER}
    with pytest.raises(ValueError, match=re.escape(f"refers to '{name}', which it does not")):
        JsonFormat(schema=schema)


OLD = "http://json-schema.org/draft-0{}/schema#"


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": OLD.format(7), "dependencies": {"a": {"required": ["b"]}, "c": ["d"]}},
        {"$schema": OLD.format(4), "definitions": {"n": {}}, "items": {"$ref": "#/definitions/n"}},
        {"properties": {"$ref": {"type": "string"}, "next": {"$ref": "#"}}},
        {"$ref": "#total", "$defs": {"t": {"$anchor": "total"}}},
        {"items": False},
    ],
)
def test_schemas_of_every_draft_are_accepted(schema):
    assert score(JsonFormat(schema=schema), "{}") == 1.0


def test_a_reference_that_is_no_text_is_refused():
    with pytest.raises(ValueError, match="refers to 5, which it does not contain"):
        JsonFormat(schema={"$schema": OLD.format(4), "$ref": 5})


# --- the factory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "reward"),
    [
        ({"pattern": "a"}, RegexFormat("a")),
        ({"pattern": "a", "full": False, "part": "answer"}, RegexFormat("a", False, "answer")),
        ({"tags": ["a", "b"], "part": "answer"}, TagFormat(tags=("a", "b"), part="answer")),
        ({"schema": {"type": "object"}}, JsonFormat(schema={"type": "object"})),
        ({"schema": False}, JsonFormat(schema=False)),
    ],
)
def test_the_name_makes_the_format_that_is_given(parameters, reward):
    assert make_format(**parameters) == reward
    loaded = load_reward({"name": "format", **parameters})
    assert (loaded.func.reward, loaded.name) == (reward, "format")
    assert pickle.loads(pickle.dumps(reward)) == reward
    assert hash(pickle.loads(pickle.dumps(reward))) == hash(reward)


@pytest.mark.parametrize(
    ("parameters", "remedy"),
    [
        ({}, "has no format; give exactly one of pattern, tags and schema"),
        ({"pattern": "a", "tags": ["a"]}, "has pattern and tags; give exactly one"),
        ({"tags": ["a"], "full": True}, "full has no effect on 'tags'; remove it"),
        ({"schema": {}, "part": "answer"}, "part has no effect on 'schema'; remove it"),
    ],
)
def test_the_name_asks_for_exactly_one_format(parameters, remedy):
    with pytest.raises(ValueError, match=remedy):
        make_format(**parameters)
    with pytest.raises(RewardLoadError, match=remedy):
        load_reward({"name": "format", **parameters})
