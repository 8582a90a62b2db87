"""What `rewards list` and `rewards show` say."""

import pytest
import yaml
from rloo_kit.rewards import BUILTIN

from rloo_kit.cli import main
from rloo_kit.scoring.catalogue import describe_reward, entry_text
from rloo_kit.scoring.specs import load_reward


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_every_built_in_reward_is_described_in_full(name):
    entry = describe_reward(name)
    assert entry.summary.endswith(".")
    assert len(entry.summary) > 20
    assert ">>>" in entry.text, "no example"
    assert [p.name for p in entry.parameters if not p.text] == []
    table = entry_text(entry).rpartition("- ")[2]
    assert table.startswith(f"{{name: {name}, weight: 0.5")
    if "..." not in table:
        assert load_reward(yaml.safe_load(table)).weight == 0.5


def test_the_list_has_every_built_in_reward(capsys):
    assert main(["rewards", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == set(BUILTIN)


def test_an_unknown_name_offers_the_nearest(capsys):
    assert main(["rewards", "show", "thinkign"]) == 2
    assert "did you mean 'thinking'" in capsys.readouterr().err
