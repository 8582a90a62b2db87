"""Start the libraries in the kit's order before any test module imports one of them."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it

from rloo_kit.environment import setup

setup()
