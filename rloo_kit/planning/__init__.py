"""The memory plan of a run: will it fit on a card, and what to change.

Reads configs, never weights.
"""
