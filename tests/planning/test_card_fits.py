"""What fits a card, without a run file: the shipped models, the largest first."""

import re

import pytest
from fresh_python import run_python

from rloo_kit.cli import main
from rloo_kit.config.run_file import read_run_file
from rloo_kit.machine.hardware import find_card
from rloo_kit.planning.card_fits import LENGTHS, is_model, longest_fit
from rloo_kit.planning.planner import Plan


def test_the_largest_model_that_fits_comes_first(capsys):
    assert main(["plan", "--gpu", "RTX 3060"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("on RTX 3060 (12 GB)")
    models = re.findall(r"Qwen3-([0-9.]+)B", " ".join(lines))
    assert list(map(float, models)) == sorted(map(float, models), reverse=True)
    assert models[0] == "4"
    commands = [line.strip() for line in lines if "rloo-kit train" in line]
    assert len(commands) == len(models)


@pytest.mark.parametrize(
    ("name", "gpu"), [("qwen3-4b-thinking-12gb", "8GB"), ("qwen3-8b-16gb", "16GB")]
)
def test_the_command_fits_and_the_next_length_does_not(name, gpu):
    fit = longest_fit(name, find_card(gpu))
    config = read_run_file(name, fit.overrides)
    assert Plan(config, fit.plan.facts).memory == fit.plan.memory
    length = config.trainer["max_completion_length"]
    prompt = config.model.max_seq_length - length
    assert length < max(LENGTHS)
    for longer in (one for one in LENGTHS if one > length):
        settings = [
            f"trainer.max_completion_length={longer}",
            f"model.max_seq_length={longer + prompt}",
        ]
        assert not Plan(read_run_file(name, settings), fit.plan.facts).fits


def test_a_card_for_none_of_them_says_so(capsys):
    assert main(["plan", "--gpu", "1GB"]) == 0
    assert "none of the run files" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--set", "trainer.beta=0"], ["--cards", "2"]])
def test_an_option_without_a_run_file_is_refused(words, capsys):
    assert main(["plan", "--gpu", "12GB", *words]) == 2
    assert "need a run file" in capsys.readouterr().err


def test_a_model_takes_the_place_of_a_run_file(tmp_path, capsys):
    assert main(["plan", "unsloth/Qwen3-8B-unsloth-bnb-4bit", "--gpu", "24GB"]) == 0
    assert "unsloth/Qwen3-8B-unsloth-bnb-4bit on a card of 24 GB: fits" in capsys.readouterr().out
    (tmp_path / "config.json").touch()
    assert is_model(str(tmp_path))
    (tmp_path / "run.yaml").touch()
    assert not is_model(str(tmp_path))
    assert not is_model("mine/run.yaml")
    assert is_model("tiny-thinker")


def test_torch_is_not_imported():
    code = (
        "import sys; from rloo_kit.cli import main; main(['plan', '--gpu', '12']); "
        "print({'torch', 'transformers'} & {*sys.modules})"
    )
    printed = run_python(code)
    assert "Qwen3-4B" in printed
    assert printed.endswith("set()\n")
