"""Weights of stale updates: the staleness of an update counts the merges since its task was sent.

Xie, Koyejo and Gupta, "Asynchronous federated optimization", OPT 2020.
"""

from pliant.value import NonNegative, Value


class ConstantStaleness(Value, frozen=True, tag="constant"):
    """Weight all updates equally.

    >>> import pliant as pl
    >>> pl.ConstantStaleness().weigh(7)
    1.0
    """

    def weigh(self, staleness: int) -> float:
        """Return the weight of an update."""
        return 1.0


class PolynomialStaleness(Value, frozen=True, tag="polynomial"):
    """Weight updates by ``(staleness + 1) ** -exponent``.

    >>> import pliant as pl
    >>> [pl.PolynomialStaleness().weigh(staleness) for staleness in (0, 3)]
    [1.0, 0.5]
    """

    exponent: NonNegative = 0.5

    def weigh(self, staleness: int) -> float:
        return float((staleness + 1) ** -self.exponent)


class HingeStaleness(Value, frozen=True, tag="hinge"):
    """Weight updates up to a `limit` of staleness fully, others by their distance from it.

    >>> import pliant as pl
    >>> [pl.HingeStaleness(slope=10.0, limit=4.0).weigh(staleness) for staleness in (4, 5)]
    [1.0, 0.09090909090909091]
    """

    slope: NonNegative = 10.0
    limit: NonNegative = 4.0

    def weigh(self, staleness: int) -> float:
        return 1.0 / (self.slope * max(0.0, staleness - self.limit) + 1.0)


AnyStaleness = ConstantStaleness | PolynomialStaleness | HingeStaleness
