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

from rloo_kit.config.run_file import make_run_config
from rloo_kit.data import files
from rloo_kit.data.gym_tasks import make_gym_rows
from rloo_kit.data.lengths import drop_long_prompts, prompt_ids, quantile_of_lengths
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

USER = {"role": "user", "content": "Why?"}


def write(folder, name, text, encoding="utf-8"):
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


def lines(*rows):
    return "\n".join(json.dumps(row) for row in rows)


# --- built-in tasks -------------------------------------------------------------------------------


def test_arithmetic_as_a_dataset():
    dataset = load_prompts("arithmetic")
    assert len(dataset) == NUM_BUILTIN_PROMPTS
    assert dataset.column_names == ["prompt", "answer", "task", "level"]
    plain = load_prompts("arithmetic", num_prompts=3, chat=False)
    assert plain["prompt"][:] == [row["prompt"] for row in make_rows("arithmetic", 3)]
    assert dataset[0]["prompt"] == [{"role": "user", "content": plain[0]["prompt"]}]
    with pytest.raises(DataError, match="'arithmetic' has no rows"):
        load_prompts("arithmetic", num_prompts=0)


@pytest.mark.parametrize("name", BUILTIN)
def test_every_task_loads_in_levels(name):
    dataset = load_prompts(name, num_prompts=6, level=[1, 2], split="held_out", chat=False)
    assert list(dataset) == make_rows(name, 6, split="held_out", level=[1, 2])


@pytest.mark.parametrize(
    ("source", "arguments", "remedy"),
    [
        ("p.jsonl", {"level": 2}, "level has no effect on the prompts 'p.jsonl'"),
        ("countdown", {"settings": {"a": 1}}, "settings has no effect"),
        ("countdown", {"columns": {"prompt": "q"}}, "columns has no effect"),
        ("gsm8k", {"skip_empty": True}, "skip_empty has no effect"),
        ("countdown", {"level": 9}, "countdown has the levels 1 to 5, not 9"),
    ],
)
def test_an_argument_that_would_have_no_effect_is_refused(source, arguments, remedy):
    with pytest.raises(DataError, match=re.escape(remedy)):
        load_prompts(source, **arguments)


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
        ('{"prompt": "Why?"', "not valid JSON"),
        ("[1]", "is a list, but must be a JSON object"),
        ('{"question": "Why?", "answer": 1}', "has no `prompt`, only ['answer', 'question']: "
         "rename the column to prompt"),
        ('{"prompt": 3}', "prompt is 3, must be text or a list of chat messages"),
        ('{"prompt": [{"role": "user"}]}', "every message of prompt needs `role` and `content`"),
        ('{"prompt": [{"role": "user", "content": 3}]}', "a message of prompt has the role"),
        ('{"prompt": [{"role": 5, "content": "a"}]}', "the role must be text"),
    ],
)  # fmt: skip
def test_a_bad_jsonl_line_is_named_with_its_number(tmp_path, line, message):
    path = write(tmp_path, "p.jsonl", GOOD + "\n" + line + "\n" + GOOD)
    with pytest.raises(DataError, match=re.escape(f"{path}, line 3: ") + ".*" + re.escape(message)):
        load_prompts(path)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("prompt,answer\nWhy?,1\nHow?\n", 3, "must have 2 fields, as many as the header"),
        ("prompt,answer\nWhy?,1\nHow?,1,2\n", 3, "must have 2 fields, as many as the header"),
        ("question,answer\nWhy?,1\n", 2, "only ['answer', 'question']: rename the column to"),
    ],
)
def test_a_bad_csv_line_is_named_with_its_number(tmp_path, text, line, message):
    path = write(tmp_path, "p.csv", text)
    with pytest.raises(
        DataError, match=re.escape(f"{path}, line {line}: ") + ".*" + re.escape(message)
    ):
        load_prompts(path)


def test_broken_csv_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"line 3: not valid CSV"):
        load_prompts(write(tmp_path, "p.csv", 'prompt\nWhy?\n"How\n'))


def test_a_bad_parquet_row_is_named_with_its_number(tmp_path):
    table = pyarrow.table({"prompt": [[USER], [{"role": "user", "content": None}]]})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(DataError, match="row 2: a message of prompt has the role 'user' and"):
        load_prompts(tmp_path / "p.parquet")


EMPTY = [{"prompt": text, "answer": n} for n, text in enumerate(["Why?", " ", None, "", "How?"])]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_all_empty_prompts_come_in_one_message_or_are_left_out(tmp_path, kind):
    path = tmp_path / f"p.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(EMPTY), path)
    elif kind == "csv":
        path.write_text('prompt,answer\nWhy?,0\n ,1\n,2\n"",3\nHow?,4\n')
    else:
        path.write_text(lines(*EMPTY))
    first = 1 if kind == "csv" else 0
    unit = "row" if kind == "parquet" else "line"
    places = "; ".join(f"{path}, {unit} {first + number}" for number in (2, 3, 4))
    remedy = "data.skip_empty: true (skip_empty=True)"
    with pytest.raises(
        DataError, match=re.escape(f"3 in all, the first at {places}: ") + f".*{re.escape(remedy)}"
    ):
        load_prompts(path)
    with pytest.warns(UserWarning, match="3 empty prompts are left out"):
        kept = load_prompts(path, chat=False, skip_empty=True)
    assert kept["prompt"][:] == ["Why?", "How?"]
    assert [int(answer) for answer in kept["answer"]] == [0, 4]


def test_of_many_empty_prompts_the_first_are_named(tmp_path):
    path = write(tmp_path, "p.jsonl", lines(*[{"prompt": []}] * 7))
    with pytest.raises(DataError, match=r"7 in all, the first at .*, line 5: fill them in"):
        load_prompts(path)


@pytest.mark.parametrize("mark", [";", "\t"])
def test_a_csv_with_another_delimiter_is_read(tmp_path, mark):
    text = f'\ufeffprompt{mark}answer\n"1, 2{mark} 3"{mark}2,5\nHow?{mark}\n'
    assert list(load_prompts(write(tmp_path, "p.csv", text), chat=False)) == [
        {"prompt": f"1, 2{mark} 3", "answer": "2,5"},
        {"prompt": "How?", "answer": ""},
    ]


def test_a_broken_parquet_file_is_to_be_written_again(tmp_path):
    with pytest.raises(DataError, match=r"cannot be read as Parquet .*: write it again"):
        load_prompts(write(tmp_path, "p.parquet", "not parquet at all"))


@pytest.mark.parametrize(("name", "text"), [("p.jsonl", ""), ("p.csv", ""), ("p.csv", "prompt\n")])
def test_an_empty_file_has_no_rows(tmp_path, name, text):
    with pytest.raises(DataError, match="has no rows: put at least one prompt in it"):
        load_prompts(write(tmp_path, name, text))


def test_text_that_is_not_utf8_is_to_be_saved_as_such(tmp_path):
    path = write(tmp_path, "p.jsonl", '{"prompt": "Warum nicht über Nacht?"}', "latin-1")
    with pytest.raises(DataError, match=r"cannot be read: .*; save it as UTF-8 text"):
        load_prompts(path)


def test_a_missing_file_and_a_folder_are_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "sub" / "empty").mkdir(parents=True)
    write(tmp_path / "sub", "prompts.jsonl", GOOD)
    monkeypatch.chdir(tmp_path)
    where = f"'sub/promts.jsonl' does not exist in {tmp_path / 'sub'}"
    with pytest.raises(DataError, match=f"{where}; did you mean 'prompts.jsonl'\\?; give the path"):
        load_prompts("sub/promts.jsonl")
    with pytest.raises(
        DataError, match=re.escape(f"does not exist in {tmp_path / 'none'}; give the path")
    ):
        load_prompts("none/p.jsonl")
    with pytest.raises(DataError, match=r"nor a folder or hub dataset that can be loaded now"):
        load_prompts(tmp_path / "sub" / "empty")


@pytest.mark.parametrize("name", ["p.json", "p"])
def test_a_file_of_another_kind_is_to_be_converted(tmp_path, name):
    with pytest.raises(DataError, match=r"is not one of .*: convert it to \.jsonl"):
        load_prompts(write(tmp_path, name, GOOD))


@pytest.mark.parametrize(("first", "second"), [(1, "a"), ([1], 2), (2**70, 2**70)])
def test_a_column_that_cannot_be_stored_is_refused(tmp_path, first, second):
    rows = [{"prompt": "Why?", "answer": first}, {"prompt": "Why?", "answer": second}]
    with pytest.raises(
        DataError, match=r"the column 'answer' cannot be stored .*: give it values of one type"
    ):
        load_prompts(write(tmp_path, "p.jsonl", lines(*rows)))


def test_a_hub_name_that_cannot_be_loaded_says_what_to_check():
    with pytest.raises(
        DataError,
        match=r"'nobody/nothing' is neither built in \(arithmetic, countdown, sums, "
        r"gsm8k, dapo-math, math500, reasoning_gym:TASK\), a file here, nor a folder or "
        r"hub dataset .*check the name, its split 'test', its configuration",
    ):
        load_prompts("nobody/nothing", split="test")


def test_folders_of_save_to_disk_are_read(tmp_path):
    def rows(text):
        return datasets.Dataset.from_list([{"prompt": text, "answer": "1"}]).with_format("numpy")

    rows("only").save_to_disk(tmp_path / "one")
    both = datasets.DatasetDict(train=rows("first"), test=rows("second"))
    both.save_to_disk(tmp_path / "several")
    for folder, split, text in (("one", "train", "only"), ("several", "test", "second")):
        (row,) = load_prompts(str(tmp_path / folder), split=split, chat=False)
        assert row == {"prompt": text, "answer": "1"}
    with pytest.raises(DataError, match="check the name, its split 'test'"):
        load_prompts(str(tmp_path / "one"), split="test")


# --- columns --------------------------------------------------------------------------------------

MAP = {"prompt": "question", "answer": "solution"}


def source_file(folder, kind, rows):
    if kind == "parquet":
        path = folder / "p.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    if kind == "csv":
        body = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        return write(folder, "p.csv", "\n".join(body))
    return write(folder, "p.jsonl", lines(*rows))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_columns_gives_a_sources_columns_the_kits_names(tmp_path, kind):
    path = source_file(tmp_path, kind, [{"question": "Why?", "id": "7", "solution": "42"}] * 2)
    expected = {"prompt": "Why?", "id": "7", "answer": "42"}
    assert list(load_prompts(path, columns=MAP, chat=False)) == [expected] * 2


def test_two_columns_may_change_names_with_each_other(tmp_path):
    path = source_file(tmp_path, "jsonl", [{"prompt": "Why?", "question": "How?"}])
    swap = {"prompt": "question", "question": "prompt"}
    assert list(load_prompts(path, columns=swap, chat=False)) == [
        {"prompt": "How?", "question": "Why?"}
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "text"}, "has no `text`, only ['id', 'question', 'solution']: rename the "
         "column to prompt, or name it with columns, as in {prompt: question}"),
        ({"prompt": "question", "answer": "text"}, "columns names 'text' as the source of "
         "'answer', but there are only ['id', 'question', 'solution']: name one of these"),
        ({"prompt": "question", "answer": "question"}, "columns leaves no column 'prompt': write"),
        ({"prompt": "question", "id": "solution"}, "but the data already has a column 'id'"),
        ({"answer": "solution"}, "has no `prompt`, only ['id', 'question', 'solution']: rename the "
         "column to prompt, or name it with columns, as in {prompt: question}"),
    ],
)  # fmt: skip
def test_a_wrong_column_map_says_what_there_is(tmp_path, kind, columns, message):
    path = source_file(tmp_path, kind, [{"question": "Why?", "id": "7", "solution": "42"}])
    with pytest.raises(DataError, match=re.escape(message)):
        load_prompts(path, columns=columns)


# --- tables that are datasets ---------------------------------------------------------------------


def table_of(folder, dataset):
    dataset.to_parquet(folder / "p.parquet")
    return folder / "p.parquet"


def picture(colour):
    from PIL import Image

    return Image.new("RGB", (4, 3), colour)


@pytest.fixture
def pictures(tmp_path):
    """A Parquet file as datasets writes it, with a column of images."""
    pytest.importorskip("PIL")
    features = datasets.Features(
        {
            "question": datasets.Value("string"),
            "image": datasets.Image(),
            "n": datasets.Value("int8"),
        }
    )
    dataset = datasets.Dataset.from_dict(
        {"question": ["Red?", "Blue?"], "image": [picture("red"), picture("blue")], "n": [1, 2]},
        features=features,
    )
    return table_of(tmp_path, dataset)


def test_images_stay_images_beside_a_text_prompt(pictures):
    dataset = load_prompts(pictures, columns={"prompt": "question"}, system="Look.", num_prompts=1)
    assert dataset.column_names == ["prompt", "image", "n"]
    assert isinstance(dataset.features["image"], datasets.Image)
    assert dataset.features["n"] == datasets.Value("int8")
    assert dataset[0]["image"].getpixel((0, 0)) == (255, 0, 0)
    assert dataset[0]["prompt"] == [
        {"role": "system", "content": "Look."}, {"role": "user", "content": "Red?"}
    ]  # fmt: skip
    train, held_out = split_held_out(load_prompts(pictures, columns={"prompt": "question"}), 1)
    assert train[0]["image"].size == held_out[0]["image"].size == (4, 3)


def test_parts_of_a_message_in_jsonl_get_a_system_message_in_parts(tmp_path):
    pytest.importorskip("PIL").Image.new("RGB", (4, 3), "red").save(tmp_path / "red.png")
    content = [{"type": "image"}, {"type": "text", "text": "Red?"}]
    row = {"prompt": [{"role": "user", "content": content}], "images": ["red.png"]}
    (loaded,) = load_prompts(write(tmp_path, "p.jsonl", lines(row)), system="Look.")
    system, user = loaded["prompt"]
    assert system["content"] == [{"type": "text", "text": "Look."}]
    assert [part["type"] for part in user["content"]] == ["image", "text"]
    assert loaded["images"][0].getpixel((0, 0)) == (255, 0, 0)


def test_a_hub_dataset_keeps_its_features_and_only_what_is_used_is_checked(pictures, monkeypatch):
    whole = datasets.Dataset.from_parquet(str(pictures))
    rows = {"question": ["Red?", "Blue?", ""], "image": [*whole["image"], None], "n": [1, 2, 3]}
    hub = datasets.Dataset.from_dict(rows, features=whole.features)
    asked = []

    def from_hub(name, config, split):
        assert config is None
        asked.append((name, split))
        return hub

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    common = {"split": "test", "columns": {"prompt": "question"}}
    dataset = load_prompts("someone/pictures", num_prompts=2, **common)
    assert asked == [("someone/pictures", "test")]
    assert isinstance(dataset.features["image"], datasets.Image)
    assert dataset[1]["image"].getpixel((0, 0)) == (0, 0, 255)
    with pytest.raises(DataError, match="1 in all, the first at someone/pictures, row 3: "):
        load_prompts("someone/pictures", **common)


# --- prompts that are too long --------------------------------------------------------------------


class Tokenizer:
    """One token a word; a template adds one a message, and one for each of its settings."""

    def __call__(self, text):
        if isinstance(text, list):
            return {"input_ids": [one.split() for one in text]}
        return {"input_ids": text.split()}

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, return_dict,
                            **settings):  # fmt: skip
        assert add_generation_prompt
        assert tokenize
        return {
            "input_ids": [
                [word for m in one for word in ["role", *m["content"].split()]] + list(settings)
                for one in messages
            ]
        }


def test_long_prompts_are_left_out_and_counted(tmp_path):
    rows = [{"prompt": "a " * n, "n": n} for n in (1, 5, 3, 9)]
    dataset = load_prompts(write(tmp_path, "p.jsonl", lines(*rows)))
    kept, dropped = drop_long_prompts(dataset, Tokenizer(), 6)
    assert kept["n"][:] == [1, 5, 3]
    assert dropped == 1
    assert drop_long_prompts(dataset, Tokenizer(), 6, {"enable_thinking": False})[1] == 2
    assert drop_long_prompts(dataset, Tokenizer(), 10)[1] == 0
    plain = load_prompts(write(tmp_path, "p.jsonl", lines(*rows)), chat=False)
    assert drop_long_prompts(plain, Tokenizer(), 5)[0]["n"][:] == [1, 5, 3]


def test_leaving_out_every_prompt_is_refused(tmp_path):
    dataset = load_prompts(write(tmp_path, "p.jsonl", lines({"prompt": "a b c"})))
    with pytest.raises(DataError, match="leaves out all 1 prompts: raise it to at least 4"):
        drop_long_prompts(dataset, Tokenizer(), 3)


def test_prompt_ids_says_what_to_do_about_a_template_that_fails():
    class Bare(Tokenizer):
        def apply_chat_template(self, *_, **__):
            raise ValueError("no template\nat all")

    with pytest.raises(DataError, match=r"\(no template\): .*set data\.chat: false"):
        prompt_ids(Bare(), [USER])


# --- reasoning-gym --------------------------------------------------------------------------------

needs_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)
"""Without the package the kit still says what to install: that test runs everywhere."""


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
def test_gym_prompts_of_two_splits_differ_whatever_the_seeds():
    def prompts(split, seed):
        settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        rows = make_gym_rows(
            "reasoning_gym:chain_sum", 40, split=split, seed=seed, settings=settings
        )
        return [row["prompt"] for row in rows]

    train = prompts("train", 0)
    held_out = prompts("held_out", 1)
    assert len(set(train)) == len(train) == 40
    assert len(set(held_out)) == len(held_out) == 40
    assert not set(train) & set(held_out)
    assert prompts("train", 0) == train
    assert prompts("train", 0)[:7] == train[:7]
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
@pytest.mark.parametrize(
    ("name", "level", "message"),
    [
        ("chain_sum", 12, "reasoning_gym:chain_sum has the levels 1 to 11, not 12"),
        ("chain_sum", [1, True], "has the levels 1 to 11, not True"),
        ("composite", 1, "reasoning-gym has no task 'composite'"),
    ],
)
def test_a_level_that_a_gym_task_has_not_is_refused(name, level, message):
    with pytest.raises(DataError, match=re.escape(message)):
        load_prompts(f"reasoning_gym:{name}", level=level)


@needs_gym
def test_a_gym_task_that_runs_out_of_questions_says_so():
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    settings |= {"allow_negation": False}
    with pytest.warns(UserWarning, match=r"chain_sum has only (\d+) different prompts of the 5000"):
        rows = make_gym_rows("reasoning_gym:chain_sum", 5000, settings=settings)
    assert 100 < len(rows) == len({row["prompt"] for row in rows}) < 5000


@needs_gym
def test_a_gym_task_that_prints_is_kept_from_it(capsys):
    make_gym_rows("reasoning_gym:bf", 3)
    assert capsys.readouterr().out == ""


@needs_gym
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "chain_sums",
            {},
            "reasoning-gym has no task 'chain_sums'; did you mean 'chain_sum'?",
        ),
        ("chain_sum", {"max_term": 3}, "unexpected keyword argument 'max_term'"),
        ("chain_sum", {"seed": 3}, "data.settings has 'seed': leave it out"),
        ("chain_sum", {"max_terms": 1}, "cannot make prompts with the settings {'max_terms': 1}"),
    ],
)
def test_a_wrong_gym_task_or_setting_says_what_there_is(name, settings, message):
    with pytest.raises(DataError, match=re.escape(message)):
        load_prompts(f"reasoning_gym:{name}", settings=settings)


def test_a_gym_task_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match="pip install reasoning-gym"):
        load_prompts("reasoning_gym:chain_sum")


def test_a_gym_task_has_two_splits():
    with pytest.raises(DataError, match="has the splits train and held_out, not 'test'"):
        load_prompts("reasoning_gym:chain_sum", split="test")


# --- from a run file ------------------------------------------------------------------------------


def config_of(trainer=None, **data):
    return make_run_config({"data": data, "trainer": trainer or {}})


def test_a_runs_task_has_both_splits_at_the_levels_asked_for():
    config = config_of(prompts="countdown", level=[1, 2], num_prompts=40, held_out=10, chat=False)
    train, held_out = read_prompts(config, Path())
    assert list(train) == make_rows("countdown", 40, level=[1, 2])
    assert list(held_out) == make_rows("countdown", 10, split="held_out", level=[1, 2])
    assert read_prompts(config_of(prompts="countdown", held_out=0), Path())[1] is None


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
        ([{"a": 1}, {"a": 2}, {"b": "x"}], [{"a": 1, "b": None}] * 1),
        ([[], [], ["a"]], [[], [], ["a"]]),
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
    kept, dropped = drop_long_prompts(dataset, Tokenizer(), 9)
    assert (len(kept), dropped) == (9, 1)


def test_a_configuration_of_a_dataset_is_chosen_by_name(tmp_path):
    for name, word in (("easy", "one"), ("hard", "many")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": word}) + "\n")
    configs = [{"config_name": one, "data_files": f"{one}.jsonl"} for one in ("easy", "hard")]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    found = load_prompts(tmp_path, config="hard", chat=False)
    assert found["prompt"][:] == ["many"]
    with pytest.raises(DataError, match="Config name is missing"):
        load_prompts(tmp_path, chat=False)
    for name in ("arithmetic", tmp_path / "easy.jsonl"):
        with pytest.raises(DataError, match="config has no effect on the prompts"):
            load_prompts(name, config="hard")
