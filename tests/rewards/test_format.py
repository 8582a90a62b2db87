"""The formats: regular expressions, tags, JSON, and the factory behind the name."""

import json
import pickle
import re
import time

import pytest
import yaml
from rloo_kit.rewards import JsonFormat, RegexFormat, TagFormat

from rloo_kit.scoring.specs import load_reward

ENDLESS = "(a|aa)+$", "a" * 60 + "!"  # a pattern and a text on which it backtracks for years


def score(reward, text, prompt="Q"):
    return reward(completions=[text], prompts=[prompt])[0]


# --- regular expressions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "text", "expected"),
    [
        ("{pattern: a.*b}", "xa b", 0.0),
        ("{pattern: a.*b, full: false}", "xa\nbx", 1.0),
        ("{pattern: ^a, full: false}", "x\na", 0.0),
        ("{pattern: '[0-9]+', part: answer}", "<think>4", 0.0),
        ("{pattern: .+}", "\ud800\U0001f600", 1.0),
    ],
)
def test_a_regular_expression_is_matched(parameters, text, expected):
    assert score(RegexFormat(**yaml.safe_load(parameters)), text) == expected


def test_an_answer_needs_a_closed_thought():
    assert score(RegexFormat("4", part="answer"), "4", "Q<think>") == 0.0
    assert score(RegexFormat("4", part="answer", thought_opened=True), "4", []) == 0.0


def test_a_pattern_that_backtracks_without_end_scores_nothing_in_time():
    pattern, text = ENDLESS
    began = time.process_time()
    assert RegexFormat(pattern)(completions=[text, "aaa"]) == [0.0, 1.0]
    assert time.process_time() - began < 20


# --- tags -----------------------------------------------------------------------------------------


TAGS = TagFormat(tags=("think", "answer"))


@pytest.mark.parametrize(
    "text",
    [
        "\n<think>\na\n</think>\n\n<answer>4</answer>\n",
        "<think>a < b <b>c</b></think><answer>4</answer>",
    ],
)
def test_each_tag_stands_once_in_order_with_nothing_outside(text):
    assert score(TAGS, text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "a</think><answer>4</answer>",
        "<answer>4</answer><think>a</think>",
        "<think>a<answer>4</answer></think>",
        "<think>a</think><think>b</think><answer>4</answer>",
        "<think>a</think><answer>4</answer></answer>",
        "so <think>a</think><answer>4</answer>",
        "<think>a</think> so <answer>4</answer>",
        "<think>a</think><answer>4</answer> so",
        "<think>a</think><answer id='1'>4</answer>",
    ],
)
def test_other_tags_score_nothing(text):
    assert score(TAGS, text) == 0.0


def test_a_thought_opened_in_the_prompt_is_the_first_tag():
    rest = "a</think><answer>4</answer>"
    opened = TagFormat(tags=("think", "answer"), thought_opened=True)
    for reward, prompt in ((TAGS, "Q<think>\n"), (opened, [])):
        assert (score(reward, rest, prompt), score(reward, f"<think>{rest}", prompt)) == (1.0, 0.0)
    assert score(TagFormat(tags="answer"), "<answer>4</answer>", "Q<think>") == 1.0


# --- JSON -----------------------------------------------------------------------------------------

SCHEMA = """{
  "$defs": {"count": {"type": "integer", "minimum": 0}},
  "type": "object",
  "properties": {"total": {"$ref": "#/$defs/count"}, "unit": {"pattern": "^[a-z]+$"}},
  "required": ["total"],
  "additionalProperties": false
}"""


ANSWERS = {
    '{"total": 4}': 1.0,
    '```json\n{"total": 4}\n```': 1.0,
    '```JSON\n{"total": 4}```': 1.0,
    '{"total": 4, "unit": "M"}': 0.0,
    '{"total": -4}': 0.0,
    '{"total": 4, "more": 1}': 0.0,
    '{"total": 4': 0.0,
    'Here: {"total": 4}': 0.0,
    '```json\n{"total": 4}\n```\n```json\n{"total": 4}\n```': 0.0,
}


@pytest.mark.parametrize(("answer", "expected"), ANSWERS.items())
def test_the_answer_is_json_under_the_schema(answer, expected):
    reward = JsonFormat(schema=json.loads(SCHEMA))
    assert score(reward, f'{{"total": 4}}</think>{answer}') == expected


@pytest.mark.parametrize("answer", ["NaN", "[Infinity]", "-Infinity", "1e999", "[" * 100_000])
def test_what_no_reader_can_hold_is_no_json(answer):
    assert score(JsonFormat(schema={}), answer) == 0.0
    assert score(JsonFormat(schema=True), '[1.5e3, null, "\\ud800"]') == 1.0


def test_a_pattern_in_a_schema_has_a_time_limit():
    pattern, text = ENDLESS
    reward = JsonFormat(schema={"pattern": pattern})
    assert [score(reward, given) for given in (f'"{text}"', '"aaa"', "4")] == [0.0, 1.0, 1.0]


REFERENCES = {
    '{"properties": {"total": {"items": {"$ref": "#/$defs/none"}}}}': "'#/$defs/none'",
    '{"items": {"$dynamicRef": "#none"}}': "'#none'",
    '{"items": {"$ref": "https://example.com/a"}}': "'https://example.com/a'",
    '{"$schema": "http://json-schema.org/draft-04/schema#", "$ref": 5}': "5",
}


@pytest.mark.parametrize(("schema", "name"), REFERENCES.items())
def test_a_reference_out_of_the_schema_is_refused(schema, name):
    with pytest.raises(ValueError, match=re.escape(f"refers to {name}, which it does not")):
        JsonFormat(schema=json.loads(schema))


@pytest.mark.parametrize(
    "schema",
    [
        """{"$schema": "http://json-schema.org/draft-07/schema#",
            "dependencies": {"a": {"required": ["b"]}, "c": ["d"]}}""",
        """{"$schema": "http://json-schema.org/draft-04/schema#",
            "definitions": {"n": {}}, "items": {"$ref": "#/definitions/n"}}""",
        '{"properties": {"$ref": {"type": "string"}, "next": {"$ref": "#"}}}',
        '{"$ref": "#total", "$defs": {"t": {"$anchor": "total"}}}',
    ],
)
def test_schemas_of_every_draft_are_accepted(schema):
    assert score(JsonFormat(schema=json.loads(schema)), "{}") == 1.0


# --- the factory ----------------------------------------------------------------------------------


FORMATS = {
    "{name: format, pattern: a, full: false, part: answer}": RegexFormat("a", False, "answer"),
    "{name: format, tags: [a, b], part: answer}": TagFormat(tags=("a", "b"), part="answer"),
    "{name: format, schema: false}": JsonFormat(schema=False),
}


@pytest.mark.parametrize(("table", "reward"), FORMATS.items())
def test_the_name_makes_the_format_that_is_given(table, reward):
    loaded = load_reward(yaml.safe_load(table))
    assert (loaded.func.reward, loaded.name) == (reward, "format")
    again = pickle.loads(pickle.dumps(reward))
    assert (again, hash(again)) == (reward, hash(reward))
