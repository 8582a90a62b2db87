"""Progress of a run while it trains: a terminal panel, a notebook figure or plain lines.

``view.live_progress`` chooses the view. Views are callbacks of the trainer: they receive its
events and change nothing in the run. ``view.METRICS`` names the series that are followed; the
report draws the same.
"""
