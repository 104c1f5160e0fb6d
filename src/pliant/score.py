"""The C3-Score: accuracy under budgets of bandwidth and of the clients' compute, as one number.

Chopra et al., AdaSplit, 2021, name such a score with a temperature and two budgets; no source that
could be read gives its formula. This is a reconstruction, ``A · exp(-(B/Bmax + C/Cmax) / T)``.
"""

import math

TEMPERATURE = 8.0


def c3(
    accuracy: float,
    sent: float,
    macs: float,
    *,
    most_sent: float,
    most_macs: float,
    temperature: float = TEMPERATURE,
) -> float:
    """Return the score of a run: higher is better, and it is never above the accuracy.

    Budgets are what is tolerable of bytes and of MACs; by custom the largest among the compared.

    >>> from pliant.score import c3
    >>> round(c3(0.8888, 9.71, 5.38, most_sent=84.64, most_macs=17.13), 3)
    0.842
    """
    if not temperature > 0:
        raise ValueError(f"Expected a temperature above 0, got {temperature}")
    if sent < 0 or macs < 0 or most_sent < 0 or most_macs < 0:
        raise ValueError(
            f"Expected bytes and MACs of at least 0, got {sent}, {macs}, {most_sent}, {most_macs}"
        )
    spent = _share(sent, most_sent) + _share(macs, most_macs)
    return accuracy * math.exp(-spent / temperature)


def _share(value: float, most: float) -> float:
    if most == 0 and value > 0:
        raise ValueError(f"Expected a budget above 0 for a cost of {value}, got 0")
    return value / most if most else 0.0
