"""Prompts: every source gives what it has, and what is wrong is named with its place."""

import importlib.util
import json
import re
import sys
import weakref
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from rloo_kit.config.run_file import make_run_config
from rloo_kit.data import files
from rloo_kit.data.gym_tasks import make_gym_rows
from rloo_kit.data.lengths import drop_long_prompts, quantile_of_lengths
from rloo_kit.data.prompts import (
    BUILTIN,
    NUM_BUILTIN_PROMPTS,
    count_levels,
    load_prompts,
    split_held_out,
)
from rloo_kit.data.tasks import make_rows
from rloo_kit.errors import DataError
from rloo_kit.job import read_prompts

GOOD = '{"prompt": "Why?"}\n'
USER = {"role": "user", "content": "Why?"}


def write(folder, name, text):
    path = folder / name
    path.write_bytes(text.encode())
    return path


def table(folder, rows):
    path = folder / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def lines(*rows):
    return "\n".join(json.dumps(row) for row in rows)


def refused(source, message, **arguments):
    with pytest.raises(DataError, match=re.escape(message)):
        load_prompts(source, **arguments)


# --- built-in tasks -------------------------------------------------------------------------------


def test_arithmetic_as_a_dataset():
    dataset = load_prompts("arithmetic")
    assert len(dataset) == NUM_BUILTIN_PROMPTS
    assert dataset.column_names == ["prompt", "answer", "task", "level"]
    plain = load_prompts("arithmetic", num_prompts=3, chat=False)
    assert plain["prompt"][:] == [row["prompt"] for row in make_rows("arithmetic", 3)]
    assert dataset[0]["prompt"] == [{"role": "user", "content": plain[0]["prompt"]}]


@pytest.mark.parametrize("name", BUILTIN)
def test_every_task_loads_in_levels(name):
    dataset = load_prompts(name, num_prompts=6, level=[1, 2], split="held_out", chat=False)
    assert list(dataset) == make_rows(name, 6, split="held_out", level=[1, 2])


NO_EFFECT = {
    "p.jsonl level: 2": "level has no effect on the prompts 'p.jsonl'",
    "p.jsonl split: test": "split has no effect on the prompts 'p.jsonl'",
    "p.jsonl config: hard": "config has no effect on the prompts",
    "countdown settings: {a: 1}": "settings has no effect",
    "countdown columns: {prompt: q}": "columns has no effect",
    "countdown config: hard": "config has no effect on the prompts",
    "gsm8k skip_empty: true": "skip_empty has no effect",
    "countdown level: 9": "countdown has the levels 1 to 5, not 9",
    "arithmetic num_prompts: 0": "num_prompts is 0, must be at least 1",
    "arithmetic num_prompts: 1000000000": "lower data.num_prompts",
    "p.jsonl num_prompts: -1": "num_prompts is -1, must be at least 1",
    "reasoning_gym:chain_sum split: test": "has the splits train and held_out, not 'test'",
}


@pytest.mark.parametrize("case", NO_EFFECT)
def test_an_argument_that_would_have_no_effect_is_refused(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "p.jsonl", GOOD)
    source, _, arguments = case.partition(" ")
    refused(source, NO_EFFECT[case], **yaml.safe_load(arguments))


# --- files ----------------------------------------------------------------------------------------


READ = {
    ("p.jsonl", '{"prompt": "Why?", "answer": "42"}\n\n  \n{"prompt": "How?", "level": 3}'): """
        [{"prompt": "Why?", "answer": "42", "level": null},
         {"prompt": "How?", "answer": null, "level": 3}]""",
    ("p.csv", 'prompt,answer\n"Why,\nthen?",42\nHow?,\n'): """
        [{"prompt": "Why,\\nthen?", "answer": "42"}, {"prompt": "How?", "answer": ""}]""",
    ("p.csv", '\ufeffprompt;answer\n"1, 2; 3";2,5\nHow?;\n'): """
        [{"prompt": "1, 2; 3", "answer": "2,5"}, {"prompt": "How?", "answer": ""}]""",
    ("p.csv", 'prompt\tanswer\n"1, 2\t 3"\t2,5\n'): """
        [{"prompt": "1, 2\\t 3", "answer": "2,5"}]""",
    ("p.jsonl", '\ufeff{"prompt": "Why?"}'): '[{"prompt": "Why?"}]',
    ("p.csv", "\ufeffprompt\nWhy?\n"): '[{"prompt": "Why?"}]',
    ("p.jsonl", '{"prompt": [{"role": "assistant", "content": null, "tool_calls": ["add"]}]}'): """
        [{"prompt": [{"role": "assistant", "content": null, "tool_calls": ["add"]}]}]""",
}


@pytest.mark.parametrize(("name", "text"), READ)
def test_text_files_keep_every_column(tmp_path, name, text):
    found = load_prompts(write(tmp_path, name, text), chat=False)
    assert list(found) == json.loads(READ[name, text])


def test_a_field_of_a_csv_file_may_be_long(tmp_path):
    answer = "4" * 200_000
    (row,) = load_prompts(write(tmp_path, "p.csv", f"prompt,answer\nWhy?,{answer}\n"))
    assert row["answer"] == answer


def test_parquet_keeps_every_column_of_text_and_of_messages(tmp_path):
    rows = [{"prompt": [USER], "answer": 1.5}, {"prompt": [USER, USER], "answer": None}]
    assert list(load_prompts(table(tmp_path, rows))) == rows


def test_the_system_message_comes_first_and_never_twice(tmp_path):
    own = {"role": "system", "content": "Own."}
    path = write(
        tmp_path, "p.jsonl", lines(*({"prompt": one} for one in ("Why?", [USER], [own, USER])))
    )
    thinks = [{"role": "system", "content": "Think."}, USER]
    assert load_prompts(path, system="Think.")["prompt"][:] == [thinks, thinks, [own, USER]]


def test_num_prompts_keeps_the_first(tmp_path):
    path = write(tmp_path, "p.jsonl", lines(*({"prompt": str(n)} for n in range(5))))
    assert load_prompts(path, num_prompts=2, chat=False)["prompt"][:] == ["0", "1"]
    assert len(load_prompts(path, num_prompts=50)) == 5


BAD_LINES = {
    '{"prompt": "Why?"': "not valid JSON",
    '{"prompt": ' + "[" * 5000: "not valid JSON",
    "[1]": "is a list, but must be a JSON object",
    '{"question": "Why?", "answer": 1}': (
        "has no `prompt`, only ['answer', 'question']: rename the column to prompt"
    ),
    '{"prompt": 3}': "prompt is 3, must be text or a list of chat messages",
    '{"prompt": [{"role": "user"}]}': "a message of prompt is {'role': 'user'}: it needs a `role`",
    '{"prompt": [{"role": "user", "content": 3}]}': "a message of prompt is {'content': 3, ",
    '{"prompt": [{"role": 5, "content": "a"}]}': (
        "a message of prompt is {'content': 'a', 'role': 5}: it needs a `role`, which is text, and "
        "a `content`, which is text or a list"
    ),
    '{"prompt": [{"role": "user", "tool_calls": [], "name": "a"}]}': "a message of prompt is",
    '{"prompt": ["Why?"]}': "a message of prompt is 'Why?': it needs a `role`",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20])
def test_a_bad_jsonl_line_is_named_with_its_number(tmp_path, line):
    path = write(tmp_path, "p.jsonl", f"{GOOD}\n{line}\n{GOOD}")
    refused(path, f"{path}, line 3: {BAD_LINES[line]}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,answer\nWhy?,1\nHow?\n", "line 3: must have 2 fields, as many as the header"),
        ("prompt,answer\nWhy?,1\nHow?,1,2\n", "line 3: must have 2 fields, as many as the"),
        ("question\nWhy?\n", "line 2: has no `prompt`, only ['question']: rename the column to"),
        ('prompt\nWhy?\n"How\n', "line 3: not valid CSV"),
    ],
)
def test_a_bad_csv_line_is_named_with_its_number(tmp_path, text, message):
    path = write(tmp_path, "p.csv", text)
    refused(path, f"{path}, {message}")


def test_a_bad_parquet_row_is_named_with_its_number(tmp_path):
    rows = [{"prompt": [USER]}, {"prompt": [{"role": "user", "content": None}]}]
    refused(table(tmp_path, rows), "row 2: a message of prompt is {'")


EMPTY = [{"prompt": text, "answer": n} for n, text in enumerate(["Why?", " ", None, "", "How?"])]


@pytest.mark.parametrize(("kind", "unit", "first"), [("jsonl", "line", 0), ("csv", "line", 1),
                                                     ("parquet", "row", 0)])  # fmt: skip
def test_all_empty_prompts_come_in_one_message_or_are_left_out(tmp_path, kind, unit, first):
    if kind == "parquet":
        path = table(tmp_path, EMPTY)
    else:
        of_csv = 'prompt,answer\nWhy?,0\n ,1\n,2\n"",3\nHow?,4\n'
        path = write(tmp_path, f"p.{kind}", of_csv if kind == "csv" else lines(*EMPTY))
    places = "; ".join(f"{path}, {unit} {first + number}" for number in (2, 3, 4))
    refused(path, f"3 in all, the first at {places}: ")
    refused(path, "data.skip_empty: true (skip_empty=True)")
    with pytest.warns(UserWarning, match="3 empty prompts are left out"):
        kept = load_prompts(path, chat=False, skip_empty=True)
    assert kept["prompt"][:] == ["Why?", "How?"]
    assert [int(answer) for answer in kept["answer"]] == [0, 4]


def test_of_many_empty_prompts_the_first_are_named(tmp_path):
    path = write(tmp_path, "p.jsonl", lines(*[{"prompt": []}] * 7))
    with pytest.raises(DataError, match=r"7 in all, the first at .*, line 5: fill them in"):
        load_prompts(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b"", "has no rows: put at least one prompt in it"),
        ("p.csv", b"", "has no rows: put at least one prompt in it"),
        ("p.csv", b"prompt\n", "has no rows: put at least one prompt in it"),
        ("p.parquet", b"not parquet at all", "cannot be read as Parquet .*: write it again"),
        ("p.jsonl", b'{"prompt": "\xfcber"}', "cannot be read: .*; save it as UTF-8 text"),
        ("p.json", b"{}", r"is not one of .*: convert it to \.jsonl"),
        ("p", b"{}", r"is not one of .*: convert it to \.jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_says_what_to_do(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_prompts(tmp_path / name)


def test_a_missing_file_and_a_folder_are_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "sub" / "empty").mkdir(parents=True)
    write(tmp_path / "sub", "prompts.jsonl", GOOD)
    monkeypatch.chdir(tmp_path)
    where = f"'sub/promts.jsonl' does not exist in {tmp_path / 'sub'}"
    refused("sub/promts.jsonl", f"{where}; did you mean 'prompts.jsonl'?; give the path")
    refused("none/p.jsonl", f"does not exist in {tmp_path / 'none'}; give the path")
    refused(tmp_path / "sub" / "empty", "cannot be loaded now as a folder or hub dataset")


@pytest.mark.parametrize("answers", ['1, "a"', "[1], 2", f"{2**70}, {2**70}"])
def test_a_column_that_cannot_be_stored_is_refused(tmp_path, answers):
    rows = [{"prompt": "Why?", "answer": answer} for answer in json.loads(f"[{answers}]")]
    said = r"the column 'answer' cannot be stored .*: give all its values the same type"
    with pytest.raises(DataError, match=said):
        load_prompts(write(tmp_path, "p.jsonl", lines(*rows)))


def test_a_hub_name_that_cannot_be_loaded_says_what_to_check():
    what = "'nobody/nothing' is not one of arithmetic, countdown, sums, gsm8k, dapo-math, "
    what += "math500, reasoning_gym:TASK, is not a file here, and cannot be loaded now as a folder "
    for message in (what, "check the name, the split 'test', the configuration"):
        refused("nobody/nothing", message, split="test")


def test_rows_are_not_the_name_of_prompts():
    refused([{"prompt": "a"}], "not a list: make a dataset of rows with")


def test_folders_of_save_to_disk_are_read(tmp_path):
    one = datasets.Dataset.from_list([{"prompt": "Why?", "answer": "1"}]).with_format("numpy")
    other = one.map(lambda row: {"answer": "2"})
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=one, test=other).save_to_disk(tmp_path / "several")
    for folder, split, answer in (("one", "train", "1"), ("several", "test", "2")):
        (row,) = load_prompts(str(tmp_path / folder), split=split, chat=False)
        assert row == {"prompt": "Why?", "answer": answer}
    refused(str(tmp_path / "one"), "check the name, the split 'test'", split="test")


# --- columns --------------------------------------------------------------------------------------

ROW = {"question": "Why?", "id": "7", "solution": "42"}


@pytest.fixture(params=["jsonl", "csv", "parquet"])
def rows_of_questions(tmp_path, request):
    """A file of each kind with two rows."""
    if request.param == "parquet":
        return table(tmp_path, [ROW] * 2)
    texts = {"jsonl": lines(ROW, ROW), "csv": "question,id,solution\nWhy?,7,42\nWhy?,7,42\n"}
    return write(tmp_path, f"p.{request.param}", texts[request.param])


def test_columns_gives_a_sources_columns_the_kits_names(rows_of_questions):
    columns = {"prompt": "question", "answer": "solution", "question": "id"}
    expected = {"prompt": "Why?", "question": "7", "answer": "42"}
    assert list(load_prompts(rows_of_questions, columns=columns, chat=False)) == [expected] * 2


WRONG_COLUMNS = {
    "{prompt: text}": (
        "has no `text`, only ['id', 'question', 'solution']: rename the column to prompt, or name "
        "it in data.columns, as in {prompt: question}"
    ),
    "{prompt: question, answer: text}": (
        "columns: 'answer' should come from the column 'text', but the data has only ['id', "
        "'question', 'solution']: name one of these"
    ),
    "{prompt: question, answer: question}": "leaves no column prompt",
    "{prompt: question, answer: solution, reference: solution}": "uses a column twice",
    "{prompt: question, id: solution}": "but the data already has a column 'id'",
    "{answer: solution}": (
        "has no `prompt`, only ['id', 'question', 'solution']: rename the column to prompt, or "
        "name it in data.columns, as in {prompt: question}"
    ),
}


@pytest.mark.parametrize("columns", WRONG_COLUMNS)
def test_a_wrong_column_map_says_what_there_is(rows_of_questions, columns):
    refused(rows_of_questions, WRONG_COLUMNS[columns], columns=yaml.safe_load(columns))


# --- tables that are datasets ---------------------------------------------------------------------


def test_a_hub_dataset_keeps_its_features_and_only_what_is_used_is_checked(monkeypatch):
    features = datasets.Features(
        {"question": datasets.Value("string"), "n": datasets.Value("int8")}
    )
    rows = {"question": ["Red?", "Blue?", ""], "n": [1, 2, 3]}
    hub = datasets.Dataset.from_dict(rows, features=features)
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or hub)
    common = {"split": "test", "columns": {"prompt": "question"}}
    dataset = load_prompts("someone/questions", num_prompts=2, **common)
    assert asked == [(("someone/questions", None), {"split": "test"})]
    assert dataset.features["n"] == datasets.Value("int8")
    assert dataset["n"][:] == [1, 2]
    refused("someone/questions", "1 in all, the first at someone/questions, row 3: ", **common)


# --- prompts that are too long --------------------------------------------------------------------


class Tokenizer:
    """One token a word; a template adds one a message, and one for each of its settings."""

    def __call__(self, text):
        return {"input_ids": [one.split() for one in text]}

    def apply_chat_template(
        self, chats, *, add_generation_prompt, tokenize, return_dict, **settings
    ):
        assert add_generation_prompt
        assert tokenize
        texts = ["".join(f"role {message['content']}" for message in chat) for chat in chats]
        return self([" ".join([text, *settings]) for text in texts])


def test_long_prompts_are_left_out_and_counted(tmp_path):
    rows = [{"prompt": "a " * n, "n": n} for n in (1, 5, 3, 9)]
    path = write(tmp_path, "p.jsonl", lines(*rows))
    dataset = load_prompts(path)
    kept, dropped = drop_long_prompts(dataset, Tokenizer(), 6)
    assert kept["n"][:] == [1, 5, 3]
    assert dropped == 1
    assert drop_long_prompts(dataset, Tokenizer(), 6, {"enable_thinking": False})[1] == 2
    assert drop_long_prompts(dataset, Tokenizer(), 10)[1] == 0
    plain = load_prompts(path, chat=False)
    assert drop_long_prompts(plain, Tokenizer(), 5)[0]["n"][:] == [1, 5, 3]
    with pytest.raises(DataError, match="leaves out all 4 prompts: raise it to at least 2"):
        drop_long_prompts(dataset, Tokenizer(), 1)


# --- reasoning-gym --------------------------------------------------------------------------------

needs_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)
"""Without the package the kit still says what to install: that test runs everywhere."""


FEW = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@needs_gym
def test_a_gym_task_has_prompts_answers_and_entries():
    dataset = load_prompts("reasoning_gym:chain_sum", num_prompts=20, settings={"max_terms": 3})
    assert set(dataset.column_names) == {"prompt", "answer", "task", "entry"}
    assert set(dataset["task"]) == {"reasoning_gym:chain_sum"}
    for row in dataset:
        entry = json.loads(row["entry"])
        assert row["prompt"] == [{"role": "user", "content": entry["question"]}]
        assert row["answer"] == entry["answer"]
        assert entry["settings"] == {"max_terms": 3}
        assert entry["metadata"]["num_terms"] <= 3


@needs_gym
def test_no_more_gym_problems_are_made_than_needed(monkeypatch):
    from reasoning_gym.factory import DATASETS

    kind, _ = DATASETS["chain_sum"]
    make = kind.__getitem__
    made = []
    monkeypatch.setattr(kind, "__getitem__", lambda self, at: made.append(at) or make(self, at))
    assert len(make_gym_rows("reasoning_gym:chain_sum", 4)) == 4
    assert len(made) < 20  # of which a quarter is held out


@needs_gym
def test_gym_prompts_of_two_splits_differ_whatever_the_seeds():
    def prompts(split, seed):
        rows = make_gym_rows("reasoning_gym:chain_sum", 40, split=split, seed=seed, settings=FEW)
        return [row["prompt"] for row in rows]

    train = prompts("train", 0)
    held_out = prompts("held_out", 1)
    assert len(set(train)) == len(train) == 40
    assert len(set(held_out)) == len(held_out) == 40
    assert not set(train) & set(held_out)
    assert prompts("train", 0) == train
    assert prompts("train", 5) != train


@needs_gym
def test_a_gym_task_has_the_levels_of_its_curriculum():
    name = "reasoning_gym:chain_sum"
    assert count_levels(name) == 11
    rows = load_prompts(name, num_prompts=7, level=[1, 3], settings={"max_terms": 5})
    assert rows["level"] == [1, 3, 1, 3, 1, 3, 1]  # so that the first of them are of all levels
    settings = [json.loads(entry)["settings"] for entry in rows["entry"]]
    assert settings[0] == {"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 1}
    assert settings[1] == {"min_terms": 4, "max_terms": 5, "min_digits": 3, "max_digits": 3}


@needs_gym
def test_a_gym_task_that_runs_out_of_questions_says_so():
    settings = FEW | {"allow_negation": False}
    with pytest.warns(UserWarning, match=r"chain_sum has only (\d+) different prompts of the 5000"):
        rows = make_gym_rows("reasoning_gym:chain_sum", 5000, settings=settings)
    assert 100 < len(rows) == len({row["prompt"] for row in rows}) < 5000


@needs_gym
def test_a_gym_task_that_prints_is_kept_from_it(capsys):
    make_gym_rows("reasoning_gym:bf", 3)
    assert capsys.readouterr().out == ""


WRONG_GYM = {
    "{name: reasoning_gym:chain_sums}": "no task 'chain_sums'; did you mean 'chain_sum'?",
    "{name: reasoning_gym:composite, level: 1}": "reasoning-gym has no task 'composite'",
    "{level: 12}": "reasoning_gym:chain_sum has the levels 1 to 11, not 12",
    "{level: [1, true]}": "has the levels 1 to 11, not True",
    "{settings: {max_term: 3}}": "unexpected keyword argument 'max_term'",
    "{settings: {seed: 3}}": "data.settings has 'seed': leave it out; the run's seed replaces seed",
    "{settings: {max_terms: 1}}": "cannot make prompts with the settings {'max_terms': 1}",
}


@needs_gym
@pytest.mark.parametrize("arguments", WRONG_GYM)
def test_a_wrong_gym_task_level_or_setting_says_what_there_is(arguments):
    given = {"name": "reasoning_gym:chain_sum"} | yaml.safe_load(arguments)
    refused(given.pop("name"), WRONG_GYM[arguments], **given)


def test_a_gym_task_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    refused("reasoning_gym:chain_sum", "pip install reasoning-gym")


# --- from a run file ------------------------------------------------------------------------------


def test_a_runs_task_has_both_splits_at_the_levels_asked_for():
    data = {"prompts": "countdown", "level": [1, 2], "num_prompts": 40, "chat": False}
    train, held_out = read_prompts(make_run_config({"data": data | {"held_out": 10}}), Path())
    assert list(train) == make_rows("countdown", 40, level=[1, 2])
    assert list(held_out) == make_rows("countdown", 10, split="held_out", level=[1, 2])
    assert read_prompts(make_run_config({"data": data | {"held_out": 0}}), Path())[1] is None


# --- held out -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts():
    return load_prompts("arithmetic", num_prompts=40)


@pytest.mark.parametrize(("wanted", "kept"), [(None, 5), (39, 39)])
def test_the_last_rows_are_held_out(prompts, wanted, kept):
    train, held_out = split_held_out(prompts, wanted)
    assert len(held_out) == kept
    assert [*train, *held_out] == list(prompts)


def test_holding_everything_out_is_refused_with_the_largest_that_works(prompts):
    with pytest.raises(DataError, match="lower it to at most 39"):
        split_held_out(prompts, 40)


# --- rows in chunks ------------------------------------------------------------------------------


def test_rows_are_not_all_in_memory(monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 10)
    alive = weakref.WeakSet()
    most = 0

    class Row(dict):
        __hash__ = object.__hash__

    def rows():
        nonlocal most
        for number in range(200):
            row = Row(prompt=str(number))
            alive.add(row)
            most = max(most, len(alive))
            yield row

    assert len(files.as_dataset(rows())) == 200
    assert most <= 20


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        ([1, 2, 3.5], [1.0, 2.0, 3.5]),
        ([None, None, "a"], [None, None, "a"]),
        ([{"a": 1}, {"a": 2}, {"b": "x"}], [{"a": 1, "b": None}]),
    ],
)
def test_columns_whose_chunks_differ_are_joined(monkeypatch, values, stored):
    monkeypatch.setattr(files, "CHUNK", 2)
    column = files.as_dataset({"prompt": "a", "extra": value} for value in values)["extra"][:]
    assert column[: len(stored)] == stored


def test_a_column_of_two_types_is_named(monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 2)
    rows = [{"prompt": "a", "answer": value} for value in (1, 2, "three")]
    with pytest.raises(DataError, match=r"a column cannot be stored \(.* answer has incompatible"):
        files.as_dataset(rows)


def test_a_column_that_begins_late(monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 2)
    rows = [{"prompt": "a"}] * 3 + [{"prompt": "b", "answer": "4"}]
    assert files.as_dataset(rows)["answer"][:] == [None, None, None, "4"]


def test_a_share_of_the_prompts_is_kept_by_their_length():
    dataset = files.as_dataset({"prompt": "x " * n} for n in (9, 2, 7, 4, 5, 1, 3, 8, 6, 10))
    assert quantile_of_lengths(dataset, Tokenizer(), 0.9) == 9
    assert quantile_of_lengths(dataset, Tokenizer(), 0.55) == 6


def test_a_configuration_of_a_dataset_is_chosen_by_name(tmp_path):
    for name, word in (("easy", "one"), ("hard", "many")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": word}) + "\n")
    configs = [{"config_name": one, "data_files": f"{one}.jsonl"} for one in ("easy", "hard")]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    found = load_prompts(tmp_path, config="hard", chat=False)
    assert found["prompt"][:] == ["many"]
    refused(tmp_path, "Config name is missing")
