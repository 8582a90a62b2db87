"""``python -m rloo_kit`` is the ``rloo-kit`` command."""

import sys

from rloo_kit.cli import main

sys.exit(main())
