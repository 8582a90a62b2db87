"""Start the libraries in the kit's order before any test module imports one of them."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it

from rloo_kit.environment import setup

setup()
# Every training collects garbage several times: what the libraries made need not be walked again.
gc.collect()
gc.freeze()

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
