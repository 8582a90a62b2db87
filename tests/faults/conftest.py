"""Faults made on purpose; docs/reference/reliability.md lists the marks ``fault``."""

from pathlib import Path

import pytest
from trials import Trial

HERE = Path(__file__).resolve().parent


def pytest_configure(config):
    config.addinivalue_line("markers", "fault(name, promise): a fault made on purpose")
    config.addinivalue_line("markers", "faults: trains through faults; make test-faults")


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.faults)


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The folder of an uninterrupted run."""
    trial = Trial(tmp_path_factory.mktemp("reference") / "trial")
    trial.finish()
    return trial.run


@pytest.fixture
def trial(tmp_path, reference):
    return Trial(tmp_path / "trial", reference)
