"""Start the libraries in the kit's order before any test module imports one of them."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it

from rloo_kit.environment import setup

setup()

LONGEST = (
    "test_run",
    "test_parity",
    "test_readme",
    "test_environment",
    "test_gradients",
    "test_cli",
)
"""Files that take minutes: begun first, so that no worker is left with one of them at the end."""


def pytest_collection_modifyitems(items):
    def place(item):
        name = item.path.stem
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)
