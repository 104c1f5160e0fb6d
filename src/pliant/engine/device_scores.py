"""What devices report after testing the network on their own images.

Pages and tables read it too, so importing this does not load torch.
"""

from statistics import pstdev

from pliant.value import Value


class DeviceScores(Value, frozen=True):
    """Results on the test images of devices, as the devices report them.

    >>> from pliant.engine.device_scores import DeviceScores
    >>> scores = DeviceScores((0, 4), correct=(90, 5), tests=(100, 10))
    >>> round(scores.accuracy, 3), round(scores.spread, 3), scores.worst_decile
    (0.864, 0.2, 0.5)
    """

    devices: tuple[int, ...]
    correct: tuple[int, ...]
    tests: tuple[int, ...]
    sent: int = 0  # bytes, in both directions

    @property
    def accuracy(self) -> float:
        """Return the mean over test images, so that devices count by how many they have."""
        return sum(self.correct) / sum(self.tests)

    @property
    def spread(self) -> float:
        """Return the standard deviation over devices."""
        return pstdev(self._list_accuracies())

    @property
    def worst_decile(self) -> float:
        """Return the mean of the worst tenth of the devices, at least one."""
        worst = sorted(self._list_accuracies())[: -(-len(self.tests) // 10)]
        return sum(worst) / len(worst)

    def _list_accuracies(self) -> list[float]:
        return [right / count for right, count in zip(self.correct, self.tests, strict=True)]
