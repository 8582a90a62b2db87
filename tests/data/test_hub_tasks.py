"""Known datasets: rows in exactly their schema from files and folders, what the hub is asked."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloo_kit.config.run_file import TASK_REWARDS, DataSection, RunConfig, make_run_config
from rloo_kit.data.hub_tasks import HUB_TASKS, SYSTEM
from rloo_kit.data.prompts import load_prompts
from rloo_kit.errors import DataError
from rloo_kit.evaluation.held_out import _prompts
from rloo_kit.job import PreparedJob, read_prompts, with_whole_paths

INSTRUCTION = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    '{}\n\nRemember to put your answer on its own line after "Answer:".'
)
PROBLEM = "Find $x$.\n\nIt is larger than 2."


def gsm8k(first, num):
    worked = "He has 1,000+{0}=<<1000+{0}=1{0:03}>>1,{0:03} eggs.\n#### 1,{0:03}"
    numbers = range(first, first + num)
    return {
        "question": [f"How many eggs are 1,000 and {n}?" for n in numbers],
        "answer": [worked.format(n) for n in numbers],
    }


DAPO = json.loads("""{
    "data_source": "math_dapo", "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"}
}""")


def write(path, columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def copy(tmp_path):
    """A download of openai/gsm8k: two subsets of two splits."""
    for split, first, num in (("train", 0, 20), ("test", 100, 6)):
        for subset, start in (("main", first), ("another", first + 500)):
            name = f"{split}-00000-of-00001.parquet"
            write(tmp_path / "gsm8k" / subset / name, gsm8k(start, num))
    return tmp_path / "gsm8k"


def test_gsm8k_answers_are_the_numbers_after_the_mark(tmp_path):
    file = write(tmp_path / "train.parquet", gsm8k(7, 3))
    dataset = load_prompts(f"gsm8k:{file}")
    assert dataset["answer"] == ["1007", "1008", "1009"]
    assert dataset["prompt"][0] == [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "How many eggs are 1,000 and 7?"},
    ]
    assert len(load_prompts(f"gsm8k:{file}", num_prompts=2)) == 2


def test_gsm8k_in_a_folder_has_its_own_held_out_split(copy):
    data = DataSection(prompts=f"gsm8k:{copy}", num_prompts=12, held_out=4)
    train, held_out = read_prompts(RunConfig(data=data), copy)
    assert train["answer"] == [str(1000 + n) for n in range(12)]
    assert held_out["answer"] == ["1100", "1101", "1102", "1103"]


def test_gsm8k_in_one_file_holds_out_its_last_rows(copy):
    data = DataSection(prompts="gsm8k:train-00000-of-00001.parquet", held_out=5)
    train, held_out = read_prompts(RunConfig(data=data), copy / "main")
    assert train["answer"] == [str(1000 + n) for n in range(15)]
    assert held_out["answer"] == [str(1000 + n) for n in range(15, 20)]


def asked(config, name, most=None):
    return _prompts(PreparedJob(config), name, most, {})["answer"]


def test_a_run_with_columns_is_evaluated_on_a_known_dataset(copy):
    file = write(copy / "one.parquet", gsm8k(7, 3))
    data = DataSection(prompts="mine.jsonl", columns={"prompt": "question"}, split="mine")
    assert asked(RunConfig(data=data), f"gsm8k:{file}") == ["1007", "1008", "1009"]
    assert asked(RunConfig(data=data), f"gsm8k:{copy}", 2) == ["1100", "1101"]


def test_split_and_config_of_a_run_are_not_those_of_another_file(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "1 + 1?", "answer": "2"}')
    data = DataSection(prompts="org/data", split="train[:9]", config="main")
    assert asked(RunConfig(data=data), str(file)) == ["2"]


def test_a_run_on_one_file_is_evaluated_on_the_rows_that_it_held_out(copy):
    name = f"gsm8k:{copy / 'main' / 'train-00000-of-00001.parquet'}"
    config = RunConfig(data=DataSection(prompts=name, held_out=5))
    assert asked(config, name) == [str(1000 + n) for n in range(15, 20)]
    assert asked(config, name, 3) == ["1015", "1016", "1017"]


@pytest.mark.parametrize(
    "prompt", [[{"content": INSTRUCTION.format(PROBLEM), "role": "user"}], PROBLEM]
)
def test_dapo_math_is_the_problem_alone_and_once(prompt, tmp_path):
    file = tmp_path / "dapo.parquet"
    pq.write_table(pa.Table.from_pylist([DAPO | {"prompt": prompt}] * 3), file)
    dataset = load_prompts(f"dapo-math:{file}")
    assert [prompt[-1]["content"] for prompt in dataset["prompt"]] == [PROBLEM]
    assert dataset["answer"] == ["34"]


MATH500 = r"""{
    "problem": "Convert $(0,3)$ to polar coordinates.", "subject": "Precalculus", "level": 2,
    "solution": "We have $r = 3.$ So \\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}.",
    "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "unique_id": "test/precalculus/807.json"
}""".replace("\n", "")


def test_math500_keeps_levels_and_is_not_trained_on(tmp_path):
    (tmp_path / "test.jsonl").write_text(MATH500)
    row = json.loads(MATH500)
    name = f"math500:{tmp_path}"
    [read] = load_prompts(name)
    assert read["prompt"][-1]["content"] == row["problem"]
    kept = ("answer", "level", "subject")
    assert [read[key] for key in kept] == [row[key] for key in kept]
    with pytest.raises(DataError, match=r"math500:.* is for evaluation"):
        read_prompts(RunConfig(data=DataSection(prompts=name)), tmp_path)


@pytest.mark.parametrize(("system", "roles"), [("", ["user"]), ("Be brief.", ["system", "user"])])
def test_another_system_message_or_none(system, roles, copy):
    [prompt] = load_prompts(f"gsm8k:{copy}", system=system, num_prompts=1)["prompt"]
    assert [message["role"] for message in prompt] == roles
    assert prompt[0]["content"].startswith(system)
    [plain] = load_prompts(f"gsm8k:{copy}", chat=False, num_prompts=1)["prompt"]
    assert plain == prompt[-1]["content"]


WRONG_ROWS = {
    '{"problem": "1 + 1?", "answer": "#### 2"}': (
        "line 1 is not a row of gsm8k, whose rows have question"
    ),
    '{"question": "1 + 1?", "answer": "2"}': "the answer '2' has no ####",
    '{"question": "1 + 1?", "answer": null}': "line 1 is not a row of gsm8k",
    '{"question": null, "answer": "#### 2"}': "line 1 is not .* the question is empty",
    '{"question": " ", "answer": "#### 2"}': "line 1 is not .* the question is empty",
}


@pytest.mark.parametrize("row", WRONG_ROWS)
def test_a_row_of_another_dataset_is_named(row, tmp_path):
    (tmp_path / "mine.jsonl").write_text(row)
    with pytest.raises(DataError, match=WRONG_ROWS[row]):
        load_prompts(f"gsm8k:{tmp_path / 'mine.jsonl'}")


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("gsm8k:nothing.jsonl", "train", "'nothing.jsonl' does not exist"),
        ("dapo-math", "held_out", "dapo-math has no held-out split"),
        ("gsm8k:one.jsonl", "held_out", "gsm8k has no held-out split"),
        ("gsm8k", "test", "gsm8k has the splits train and held_out, not 'test'"),
    ],
)
def test_a_split_that_a_known_dataset_has_not_is_refused(name, split, message):
    with pytest.raises(DataError, match=message):
        load_prompts(name, split=split)


def test_a_folder_without_the_split_says_which_files_are_missing(tmp_path):
    with pytest.raises(DataError, match=r"has no file train\*\.parquet"):
        load_prompts(f"gsm8k:{tmp_path}")


def test_the_hub_is_asked_for_a_fixed_commit(monkeypatch):
    asked = []
    tasks = {task.revision: name for name, task in HUB_TASKS.items()}

    def load_dataset(name, config, split, revision):
        assert len(revision) == 40
        asked.append((tasks[revision], name, config, split))
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name, split in (("gsm8k", "held_out"), ("dapo-math", "train"), ("math500", "train")):
        with pytest.raises(DataError, match=rf"no network.* as {name}:PATH"):
            load_prompts(name, split=split)
    assert asked == [
        ("gsm8k", "openai/gsm8k", "main", "test"),
        ("dapo-math", "open-r1/DAPO-Math-17k-Processed", "en", "train"),
        ("math500", "HuggingFaceH4/MATH-500", None, "test"),
    ]


def test_paths_start_at_the_run_file(copy, monkeypatch):
    def whole(**sections):
        return with_whole_paths(RunConfig(**sections), copy.parent, copy.parent)

    assert whole(data=DataSection(prompts="gsm8k:gsm8k")).data.prompts == f"gsm8k:{copy}"
    monkeypatch.chdir(copy.parent)  # a folder of the task's name is not what is meant
    assert whole(data=DataSection(prompts="gsm8k")).data.prompts == "gsm8k"
    tools = whole(tools=[{"name": "search", "file": "gsm8k"}, "calculator"]).tools
    assert tools == [{"name": "search", "file": str(copy)}, "calculator"]


def test_a_task_brings_its_reward_unless_the_run_file_has_one():
    for prompts in ("gsm8k", "dapo-math:copy.parquet"):
        made = make_run_config({"data": {"prompts": prompts}})
        assert made.rewards == [{"name": "accuracy", "match": "number"}]
    assert make_run_config({"data": {"prompts": "countdown"}}).rewards == ["countdown"]
    assert make_run_config({}, ["data.prompts=gsm8k", "rewards=[math]"]).rewards == ["math"]
    assert make_run_config({}).rewards == ["accuracy"]
    made = make_run_config({"data": {"prompts": "reasoning_gym:chain_sum"}})
    assert made.rewards == ["reasoning_gym"]
    assert set(TASK_REWARDS) <= {*HUB_TASKS, "countdown", "reasoning_gym"}
