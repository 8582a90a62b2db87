"""Start the libraries in the kit's order before any test module imports one of them."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it

from rloo_kit.environment import setup

setup()

import pytest  # noqa: E402
import torch  # noqa: E402

# Every training collects garbage several times: what the libraries made need not be walked again.
gc.collect()
gc.freeze()

LONGEST = (
    "test_run",
    "test_parity",
    "test_readme",
    "test_docs",
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
    if torch.cuda.is_available() or os.environ.get("RLOO_KIT_GPU_TESTS_ON_CPU") == "1":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
