"""Progress of a run while it trains: a line a step, or a figure in a notebook.

``select.live_progress`` chooses the view. Views are callbacks of the trainer: they receive its
events and change nothing in the run. ``series.CHARTS`` defines the charts, which the report draws
too.
"""
