"""Run files and prompts that ship with the kit; `rloo-kit train NAME` finds them by name."""
