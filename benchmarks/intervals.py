"""Intervals over a few seeds."""

import math
import statistics
from collections.abc import Sequence

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # of Student's t, by the number of seeds


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of two to five seeds, and the ends of its 95% interval."""
    mean = statistics.fmean(values)
    half = T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half
