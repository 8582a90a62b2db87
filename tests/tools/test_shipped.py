"""Tools and environments that come with the kit, and how a run file names others."""

import json

import pytest
import yaml
from transformers.utils import get_json_schema

from rloo_kit.errors import ConfigError, KitError
from rloo_kit.tools.calculator import calculator
from rloo_kit.tools.games import DIRECTIONS, GuessNumber, Maze
from rloo_kit.tools.python import python
from rloo_kit.tools.specs import ENVIRONMENTS, load_environment, load_tools


def test_the_calculator_is_exact_and_runs_no_code():
    assert calculator("(12 + 30) * 7") == "294"
    assert calculator("1 / 3 + 1 / 6") == "1/2"
    for text in ("2 ** 9", "__import__('os')", "1 / 0", "", "9" * 300):
        with pytest.raises(ValueError, match="not an expression"):
            calculator(text)


@pytest.mark.long
def test_python_returns_what_a_program_prints_and_its_error():
    assert python("print(6 * 7)") == "42\n"
    assert "ZeroDivisionError" in python("1 / 0")
    assert "SyntaxError" in python("print(")
    assert (
        python("print(1, flush=True)\nwhile True: pass") == "1\n\nThe program was ended: timeout."
    )


def test_a_number_is_found_by_halves():
    game = GuessNumber()
    assert "from 1 to 100" in game.reset(prompt="first game", extra=1)
    low, high = 1, 100
    for _ in range(7):
        middle = (low + high) // 2
        said = game.guess(middle)
        if said == "right":
            break
        low, high = (middle + 1, high) if said == "higher" else (low, middle - 1)
    assert said == "right"
    assert 0.3 <= game.get_reward() <= 1.0
    assert "over" in game.guess(1)
    other = GuessNumber()
    other.reset(prompt="first game")
    assert other.get_reward() == 0.0
    assert other.guess(middle) == "right"
    assert other.get_reward() == 1.0


@pytest.mark.parametrize("number", range(20))
def test_every_maze_has_a_way_out(number):
    maze = Maze()
    view = maze.reset(prompt=f"maze {number}")
    assert maze.get_reward() == 0.0
    before = "north"
    order = [*DIRECTIONS]
    for _ in range(200):  # along the wall on the right
        if "exit." in view:
            break
        turn = order.index(before)
        doors = view.rpartition("Doors: ")[2].strip(".").split(", ")
        before = next(order[(turn + k) % 4] for k in (1, 0, 3, 2) if order[(turn + k) % 4] in doors)
        view = maze.move(before)
    assert "exit." in view
    assert maze.get_reward() == 1.0


def test_a_wall_and_a_wrong_direction_are_told():
    maze = Maze()
    maze.reset(prompt="a")
    assert maze.move("north").startswith("There is a wall.")
    with pytest.raises(ValueError, match="north, east, south or west"):
        maze.move("up")


def test_a_run_file_names_tools_and_environments(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def say(word: str) -> str:\n    return word\n\n\nclass Game:\n    pass\n"
    )
    said = []
    tools = load_tools(["calculator", "mine.py:say"], tmp_path, said.append)
    assert [tool.__name__ for tool in tools] == ["calculator", "say"]
    assert len(said) == 1
    assert load_environment("mine.py:Game", tmp_path).__name__ == "Game"
    assert load_environment({"a": "maze", "b": "mine.py:Game"}, tmp_path)["a"] is Maze
    assert load_environment(None) is None
    with pytest.raises(ConfigError, match=r"guess_number, maze, python_session, file\.py:NAME"):
        load_environment("chess")


WRONG = {
    "calculater": "did you mean 'calculator'",
    "mine.py:number": "cannot be called",
    "other.py:say": "tool file",
    "mine.py:sey": "its file or module has no object named 'sey'",
    "search": "tool search needs a table",
    "{name: search, file: no.jsonl, results: 0}": "results is 0; give a whole number of at least 1",
    "{name: search}": "cannot be made from",
    "{name: null}": "unknown tool None",
    "{name: [search]}": "cannot be called",
    "{name: calculator}": "tool calculator has no parameters",
    "{name: serch, file: no.jsonl}": "unknown tool 'serch'",
    "{name: search, file: none.jsonl}": "does not exist",
    "{name: search, file: no.jsonl}": "has no words",
    "{name: search, file: empty.jsonl}": "line 1: the column .text. must be a non-empty string",
    "{name: mine.py:nothing}": "must return the tool",
}


@pytest.mark.parametrize("spec", WRONG)
def test_a_tool_that_cannot_be_used_is_refused(tmp_path, spec):
    (tmp_path / "mine.py").write_text("number = 3\n\n\ndef nothing():\n    pass\n")
    (tmp_path / "no.jsonl").write_text('{"text": "the of a"}')
    (tmp_path / "empty.jsonl").write_text('{"text": ""}')
    with pytest.raises(KitError, match=WRONG[spec]):
        load_tools([yaml.safe_load(spec)], tmp_path)


def test_a_session_of_python_knows_earlier_programs():
    session = ENVIRONMENTS["python_session"]()
    session.reset(prompt="a")
    assert session.python("numbers = [1, 2]\nprint('first')") == "first\n"
    assert "ZeroDivisionError" in session.python("numbers.append(3)\n1 / 0")
    assert "The program was ended" in session.python("import os\nos._exit(3)")
    assert session.python("import random, sys\nlucky = random.random()\nsys.exit(0)") == ""
    assert session.python("import sys\nsys.stdout.buffer.write(b'x\\n')\nafter = 1") == "x\n"
    assert session.python("print(numbers)") == "[1, 2, 3]\n"
    assert session.python("print(lucky, after)") == session.python("print(lucky, after)") != ""
    other = ENVIRONMENTS["python_session"]()
    other.reset(prompt="a")
    assert "NameError" in other.python("print(numbers)")
    session.reset(prompt="a")
    assert "NameError" in session.python("print(numbers)")


def test_search_finds_texts_by_their_words(tmp_path):
    texts = [
        "The heron stands in shallow water and waits for fish.",
        "Basalt is a dark rock that forms when lava cools fast.",
        "A heron builds its nest in high trees.",
    ]
    (tmp_path / "notes.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (search,) = load_tools([{"name": "search", "file": "notes.jsonl", "results": 2}], tmp_path)
    assert search("lava") == texts[1]
    assert set(search("Where does a heron live?").split("\n\n")) == {texts[0], texts[2]}
    assert search("heron nest").startswith(texts[2])
    assert search("sonata") == search("") == "Nothing was found: try other words."
    assert get_json_schema(search)["function"]["name"] == "search"


def test_a_table_calls_what_it_names_with_its_keys(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def adds(number):\n"
        "    def add(value: int) -> int:\n        return value + number\n\n    return add\n"
    )
    (add,) = load_tools([{"name": "mine.py:adds", "number": 3}], tmp_path)
    assert add(4) == 7
