"""The modules of tests/reference are found by their names."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "reference"))
