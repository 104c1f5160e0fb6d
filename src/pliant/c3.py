"""The C3-Score: accuracy under bandwidth and client-compute budgets, as one number.

Chopra et al., AdaSplit, 2021, describe a score with a temperature and two budgets, but we found no
source that gives its formula. This is a reconstruction: ``A · exp(-(B/Bmax + C/Cmax) / T)``.
"""

import math

TEMPERATURE = 8.0


def c3_score(
    accuracy: float,
    traffic: float,
    macs: float,
    *,
    max_traffic: float,
    max_macs: float,
    temperature: float = TEMPERATURE,
) -> float:
    """Return the score of a run: higher is better, and never above the accuracy.

    The budgets are usually the largest traffic and compute among the runs being compared.

    >>> from pliant.c3 import c3_score
    >>> round(c3_score(0.8888, 9.71, 5.38, max_traffic=84.64, max_macs=17.13), 3)
    0.842
    """
    if not temperature > 0:
        raise ValueError(f"Expected a temperature above 0, got {temperature}")
    costs = (traffic, macs, max_traffic, max_macs)
    if any(value < 0 for value in costs):
        raise ValueError(f"Expected bytes and MACs of at least 0, got {costs}")
    cost = _compute_share(traffic, max_traffic) + _compute_share(macs, max_macs)
    return accuracy * math.exp(-cost / temperature)


def _compute_share(value: float, budget: float) -> float:
    if budget == 0 and value > 0:
        raise ValueError(f"Expected a budget above 0 for a cost of {value}, got 0")
    return value / budget if budget else 0.0
