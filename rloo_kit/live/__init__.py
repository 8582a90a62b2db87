"""Progress of a run while it trains: one line per step, or a figure in a notebook.

``select.live_progress`` chooses the view. Views are callbacks of the trainer: they receive its
events and change nothing in the run. ``series.CHARTS`` defines the charts of the notebook's figure
and of the report.
"""
