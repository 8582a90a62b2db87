"""Tools and environments that come with the kit, and how a run file names others."""

import pytest
from transformers.utils import get_json_schema

from rloo_kit.errors import ConfigError, RewardLoadError
from rloo_kit.tools.calculator import calculator
from rloo_kit.tools.games import DIRECTIONS, GuessNumber, Maze
from rloo_kit.tools.python import python
from rloo_kit.tools.specs import TOOLS, load_environment, load_tools


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
    assert python("print(1, flush=True)\nwhile True: pass").startswith("1\n")
    assert python("while True: pass").endswith("The program was ended: timeout.")


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_a_tool_has_a_description_for_the_model(tool):
    schema = get_json_schema(tool)["function"]
    assert all(one["description"] for one in schema["parameters"]["properties"].values())


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
        "def say(word: str) -> str:\n    return word\n\n\nclass Game:\n    pass\n\n\nnumber = 3\n"
    )
    said = []
    tools = load_tools(["calculator", "mine.py:say"], tmp_path, said.append)
    assert [tool.__name__ for tool in tools] == ["calculator", "say"]
    assert len(said) == 1
    assert load_environment("mine.py:Game", tmp_path).__name__ == "Game"
    assert load_environment({"a": "maze", "b": "mine.py:Game"}, tmp_path)["a"] is Maze
    assert load_environment(None) is None
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        load_tools(["calculater"])
    with pytest.raises(ConfigError, match=r"guess_number, maze, file\.py:NAME"):
        load_environment("chess")
    with pytest.raises(ConfigError, match="cannot be called"):
        load_tools(["mine.py:number"], tmp_path)
    with pytest.raises(RewardLoadError, match="tool file"):
        load_tools(["other.py:say"], tmp_path)
    with pytest.raises(RewardLoadError, match="there is no 'sey' in it"):
        load_tools(["mine.py:sey"], tmp_path)
