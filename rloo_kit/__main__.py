"""Run the ``rloo-kit`` command with ``python -m rloo_kit``."""

import sys

from rloo_kit.cli import main

sys.exit(main())
