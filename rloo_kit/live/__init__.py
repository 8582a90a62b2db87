"""Progress of a run while it trains: terminal panel, notebook figure.

Takes events; changes nothing in the run.
"""
