"""The files of accelerate that docs/explanation/scale.md names."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "explanation" / "scale.md").read_text()
FILES = sorted((ROOT / "examples" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_accelerate_knows_every_setting_of_its_files(file):
    from accelerate.commands.config.config_args import load_config_from_file

    load_config_from_file(str(file))  # refuses unknown names at the top
    assert yaml.safe_load(file.read_text())["num_processes"] == 2
    assert f"accelerate/{file.name}" in PAGE
