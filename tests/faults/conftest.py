"""A row for every fault, promised and seen: the source of docs/reference/reliability.md.

The rows go to the folder that RLOO_KIT_FAULTS names, else to pytest's cache.
"""

import json
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "scripts")]


def pytest_configure(config):
    config.addinivalue_line("markers", "fault(name, promise): a fault made on purpose")
    config.addinivalue_line("markers", "faults: trains through faults; make test-faults")


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents and item.path.stem != "test_page":
            item.add_marker(pytest.mark.faults)


@pytest.fixture(scope="session")
def rows(pytestconfig):
    """The folder of the rows."""
    named = os.environ.get("RLOO_KIT_FAULTS")
    folder = Path(named) if named else pytestconfig.cache.mkdir("faults")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def seen(request, rows):
    """Call it with what was seen, at the end of a test marked ``fault``: that makes its row."""
    mark = request.node.get_closest_marker("fault")
    file = rows / f"{request.node.path.stem}.{request.node.name}.json"
    file.unlink(missing_ok=True)

    def note(text, tries=1, lost=0):
        name, promise = mark.args
        row = {"fault": name, "promise": promise, "seen": text, "tries": tries, "lost": lost}
        file.write_text(json.dumps(row, indent=1) + "\n")

    return note


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The folder of an uninterrupted run."""
    from trials import Trial

    trial = Trial(tmp_path_factory.mktemp("reference"))
    life = trial.begin()
    assert life.finish() == 0, life.text
    return trial.run


@pytest.fixture
def trial(tmp_path, reference):
    from trials import Trial

    return Trial(tmp_path, reference)
