"""Prompts: the built-in task is right and kept apart, and a bad line is named with its number."""

import json
import random
import re

import pyarrow
import pyarrow.parquet
import pytest

from rloo_kit.data import (
    MAX_HELD_OUT,
    NUM_BUILTIN_PROMPTS,
    load_prompts,
    split_held_out,
)
from rloo_kit.errors import DataError
from rloo_kit.tasks import is_held_out, make_arithmetic, worked_thought

USER = {"role": "user", "content": "Why?"}


def write(folder, name, text, encoding="utf-8"):
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


def lines(*rows):
    return "\n".join(json.dumps(row) for row in rows)


# --- the built-in task ----------------------------------------------------------------------------


def numbers(row):
    return tuple(map(int, re.fullmatch(r"What is (\d{3}) \+ (\d{3})\?", row["prompt"]).groups()))


def test_arithmetic_answers_are_right():
    for split in ("train", "held_out"):
        for row in make_arithmetic(500, split=split):
            assert row["answer"] == str(sum(numbers(row)))


def test_no_sum_is_in_both_splits():
    train = {numbers(row) for row in make_arithmetic(5000)}
    held_out = {numbers(row) for row in make_arithmetic(5000, split="held_out")}
    assert not train & held_out
    # Nor would the numbers the other way round or another seed mix them.
    assert all(is_held_out(a, b) for a, b in held_out)
    assert not any(is_held_out(*numbers(row)) for row in make_arithmetic(5000, seed=1))


def test_one_sum_in_sixteen_is_held_out():
    kept = sum(is_held_out(a, b) for a in range(100, 1000) for b in range(100, 1000))
    assert kept == 50_625 == 900 * 900 // 16


def test_arithmetic_is_decided_by_its_seed_alone():
    random.seed(1)
    first = make_arithmetic(50, seed=3)
    random.seed(2)
    assert make_arithmetic(50, seed=3) == first
    assert make_arithmetic(20, seed=3) == first[:20]
    assert make_arithmetic(50, seed=4) != first


def test_arithmetic_has_two_splits():
    with pytest.raises(DataError, match="has the splits train and held_out, not 'test'"):
        load_prompts("arithmetic", split="test")


def test_arithmetic_as_a_dataset():
    dataset = load_prompts("arithmetic")
    assert len(dataset) == NUM_BUILTIN_PROMPTS
    assert dataset.column_names == ["prompt", "answer"]
    plain = load_prompts("arithmetic", num_prompts=3, chat=False)
    assert plain["prompt"][:] == [row["prompt"] for row in make_arithmetic(3)]
    assert dataset[0]["prompt"] == [{"role": "user", "content": plain[0]["prompt"]}]


def random_sums(count):
    rng = random.Random(0)
    return [(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(count)]


def steps(thought):
    """(sum as stated, whether a carry is in it, total) of each step; every step must add up."""
    found = []
    for step in thought.split():
        left, total = step.split("=")
        terms = list(map(int, left.split("+")))
        assert sum(terms) == int(total), thought
        assert len(terms) == 2 or terms[2:] == [1], thought
        found.append((terms[:2], len(terms) == 3, int(total)))
    return found


def answer_of(thought):
    """What the thought comes to: the last digits of the first two totals, and the third whole."""
    units, tens, hundreds = (total for _, _, total in steps(thought))
    return hundreds * 100 + tens % 10 * 10 + units % 10


def test_a_thought_that_forgets_nothing_is_right():
    for a, b in random_sums(2000):
        thought, answer = worked_thought(a, b)
        assert answer == a + b == answer_of(thought)
        digits = [terms for terms, _, _ in steps(thought)]
        assert [x for x, _ in digits] == [a % 10, a // 10 % 10, a // 100]
        assert [y for _, y in digits] == [b % 10, b // 10 % 10, b // 100]


def test_a_thought_that_forgets_comes_to_the_answer_that_follows_from_it():
    wrong = 0
    for index, (a, b) in enumerate(random_sums(2000)):
        rng = random.Random(index)
        thought, answer = worked_thought(a, b, lambda rng=rng: rng.random() < 0.5)
        assert answer == answer_of(thought)
        wrong += answer != a + b
    assert 300 < wrong < 1700


def test_a_thought_that_always_forgets_has_no_carry():
    for a, b in random_sums(200):
        thought, _ = worked_thought(a, b, lambda: True)
        assert not any(carried for _, carried, _ in steps(thought))


def test_forgetting_is_asked_once_for_every_carry_and_only_there():
    asked = []
    worked_thought(199, 801, lambda: bool(asked.append(1)))
    assert len(asked) == 2
    asked.clear()
    worked_thought(123, 456, lambda: bool(asked.append(1)))
    assert asked == []


# --- files ----------------------------------------------------------------------------------------


def test_jsonl_keeps_every_column_and_makes_text_a_user_message(tmp_path):
    path = write(
        tmp_path,
        "p.jsonl",
        lines({"prompt": "Why?", "answer": "42"}, {"prompt": [USER], "level": 3}) + "\n\n  \n",
    )
    assert list(load_prompts(path)) == [
        {"prompt": [USER], "answer": "42", "level": None},
        {"prompt": [USER], "answer": None, "level": 3},
    ]


def test_csv_keeps_every_column_and_line_breaks_in_quotes(tmp_path):
    path = write(tmp_path, "p.csv", 'prompt,answer\n"Why,\nthen?",42\nHow?,\n')
    assert list(load_prompts(str(path), chat=False)) == [
        {"prompt": "Why,\nthen?", "answer": "42"},
        {"prompt": "How?", "answer": ""},
    ]


def test_parquet_keeps_every_column_of_text_and_of_messages(tmp_path):
    table = pyarrow.table({"prompt": [[USER], [USER, USER]], "answer": [1.5, None]})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    assert list(load_prompts(tmp_path / "p.parquet")) == [
        {"prompt": [USER], "answer": 1.5},
        {"prompt": [USER, USER], "answer": None},
    ]


@pytest.mark.parametrize(
    ("name", "text"), [("p.jsonl", '{"prompt": "Why?"}'), ("p.csv", "prompt\nWhy?\n")]
)
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path, name, text):
    path = write(tmp_path, name, text, "utf-8-sig")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    assert list(load_prompts(path, chat=False)) == [{"prompt": "Why?"}]


def test_without_chat_text_stays_text(tmp_path):
    path = write(tmp_path, "p.jsonl", lines({"prompt": "Why?"}))
    assert load_prompts(path, chat=False)["prompt"][:] == ["Why?"]
    path = write(tmp_path, "m.jsonl", lines({"prompt": [USER]}))
    assert load_prompts(path, chat=False)["prompt"][:] == [[USER]]


def test_the_system_message_comes_first_and_never_twice(tmp_path):
    own = {"role": "system", "content": "Own."}
    path = write(tmp_path, "p.jsonl", lines({"prompt": "Why?"}, {"prompt": [own, USER]}))
    assert load_prompts(path, system="Think.")["prompt"][:] == [
        [{"role": "system", "content": "Think."}, USER],
        [own, USER],
    ]


def test_num_prompts_keeps_the_first(tmp_path):
    path = write(tmp_path, "p.jsonl", lines(*({"prompt": str(n)} for n in range(5))))
    assert load_prompts(path, num_prompts=2, chat=False)["prompt"][:] == ["0", "1"]
    assert len(load_prompts(path, num_prompts=50)) == 5
    assert len(load_prompts("arithmetic", num_prompts=7)) == 7


GOOD = '{"prompt": "Why?"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{prompt: Why?}", "not valid JSON (Expecting property name"),
        ('{"prompt": "Why?"', "not valid JSON"),
        ("[1]", 'holds a list, must be an object like {"prompt": "..."}'),
        ('"Why?"', "holds a str, must be an object"),
        ('{"question": "Why?", "answer": 1}', "has no `prompt`, only ['answer', 'question']: "
         "rename the column to prompt"),
        ('{"prompt": ""}', "prompt is '', must be text or a list of chat messages"),
        ('{"prompt": "  "}', "must be text or a list of chat messages"),
        ('{"prompt": null}', "prompt is None, must be text or a list of chat messages"),
        ('{"prompt": 3}', "prompt is 3, must be text or a list of chat messages"),
        ('{"prompt": []}', "prompt is [], must be text or a list of chat messages"),
        ('{"prompt": {"role": "user"}}', "must be text or a list of chat messages"),
        ('{"prompt": ["Why?"]}', "every message of prompt needs `role` and `content`"),
        ('{"prompt": [{"role": "user"}]}', "every message of prompt needs `role` and `content`"),
    ],
)  # fmt: skip
def test_a_bad_jsonl_line_is_named_with_its_number(tmp_path, line, message):
    path = write(tmp_path, "p.jsonl", GOOD + "\n" + line + "\n" + GOOD)
    with pytest.raises(DataError, match=re.escape(f"{path}, line 3: ") + ".*" + re.escape(message)):
        load_prompts(path)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("prompt,answer\nWhy?,1\nHow?\n", 3, "has not the 2 fields of line 1; mend it"),
        ("prompt,answer\nWhy?,1\nHow?,1,2\n", 3, "has not the 2 fields of line 1; mend it"),
        ('prompt,answer\n"a\nb",1\n,1\n', 4, "prompt is '', must be text"),
        ("question,answer\nWhy?,1\n", 2, "only ['answer', 'question']: rename the column to"),
    ],
)
def test_a_bad_csv_line_is_named_with_its_number(tmp_path, text, line, message):
    path = write(tmp_path, "p.csv", text)
    with pytest.raises(
        DataError, match=re.escape(f"{path}, line {line}: ") + ".*" + re.escape(message)
    ):
        load_prompts(path)


@pytest.mark.parametrize("text", ['prompt\nWhy?\n"How\n', 'prompt\nWhy?\n"How"x\n'])
def test_broken_csv_is_refused(tmp_path, text):
    with pytest.raises(DataError, match=r"not valid CSV \(.*\); mend it"):
        load_prompts(write(tmp_path, "p.csv", text))


def test_broken_csv_names_the_line_that_is_broken(tmp_path):
    with pytest.raises(DataError, match="line 3: not valid CSV"):
        load_prompts(write(tmp_path, "p.csv", 'prompt\nWhy?\n"How"x\n'))


def test_a_bad_parquet_row_is_named_with_its_number(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["Why?", None]}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match="row 2: prompt is None, must be text"):
        load_prompts(tmp_path / "p.parquet")


@pytest.mark.parametrize("text", ["", "not parquet at all"])
def test_a_broken_parquet_file_is_to_be_written_again(tmp_path, text):
    with pytest.raises(DataError, match=r"is not a whole Parquet file .*: write it again"):
        load_prompts(write(tmp_path, "p.parquet", text))


@pytest.mark.parametrize(("name", "text"), [("p.jsonl", ""), ("p.csv", ""), ("p.csv", "prompt\n")])
def test_an_empty_file_has_no_rows(tmp_path, name, text):
    with pytest.raises(DataError, match="has no rows: put at least one prompt in it"):
        load_prompts(write(tmp_path, name, text))


def test_an_empty_table_has_no_rows(tmp_path):
    table = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(DataError, match="has no rows"):
        load_prompts(tmp_path / "p.parquet")


def test_text_that_is_not_utf8_is_to_be_saved_as_such(tmp_path):
    path = write(tmp_path, "p.jsonl", '{"prompt": "Warum nicht über Nacht?"}', "latin-1")
    with pytest.raises(DataError, match=r"cannot be read: .*; save it as UTF-8 text"):
        load_prompts(path)


def test_a_missing_file_and_a_folder_are_not_looked_up_on_the_hub(tmp_path):
    with pytest.raises(DataError, match=r"does not exist: give the path of a \.jsonl, \.csv or"):
        load_prompts(tmp_path / "none")
    with pytest.raises(DataError, match="does not exist: give the path"):
        load_prompts("none.jsonl")
    with pytest.raises(DataError, match="is a folder: give the path"):
        load_prompts(tmp_path)


@pytest.mark.parametrize("name", ["p.json", "p.txt", "p.arrow", "p"])
def test_a_file_of_another_kind_is_to_be_converted(tmp_path, name):
    with pytest.raises(DataError, match=r"is none of .*: convert it to \.jsonl"):
        load_prompts(write(tmp_path, name, GOOD))


@pytest.mark.parametrize(
    ("first", "second"), [(1, "a"), ("a", 1), (True, 3), ([1], 2), ({"a": 1}, "x")]
)
def test_a_column_of_two_types_is_refused(tmp_path, first, second):
    rows = [{"prompt": "Why?", "answer": first}, {"prompt": "Why?", "answer": second}]
    with pytest.raises(DataError, match=r"different types .*: give each column one type"):
        load_prompts(write(tmp_path, "p.jsonl", lines(*rows)))


def test_a_hub_name_that_cannot_be_loaded_says_what_to_check():
    with pytest.raises(
        DataError,
        match=r"'nobody/nothing' is neither built in .arithmetic., a file here, nor a hub dataset "
        r".*check the name, its split 'test' and the network",
    ):
        load_prompts("nobody/nothing", split="test")


# --- held out -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts():
    return load_prompts("arithmetic", num_prompts=40)


@pytest.mark.parametrize(("wanted", "kept"), [(None, 5), (1, 1), (39, 39)])
def test_the_last_rows_are_held_out(prompts, wanted, kept):
    train, held_out = split_held_out(prompts, wanted)
    assert len(held_out) == kept
    assert [*train, *held_out] == list(prompts)


def test_zero_and_a_handful_hold_nothing_out(prompts):
    assert split_held_out(prompts, 0) == (prompts, None)
    few = prompts.select(range(7))
    assert split_held_out(few, None) == (few, None)


def test_at_most_256_are_held_out_by_default():
    large = load_prompts("arithmetic", num_prompts=8 * MAX_HELD_OUT + 80)
    train, held_out = split_held_out(large, None)
    assert len(held_out) == MAX_HELD_OUT == 256
    assert len(train) == len(large) - 256


@pytest.mark.parametrize("wanted", [40, 41, 1000])
def test_holding_everything_out_is_refused_with_the_largest_that_works(prompts, wanted):
    with pytest.raises(DataError, match="lower it to at most 39"):
        split_held_out(prompts, wanted)
