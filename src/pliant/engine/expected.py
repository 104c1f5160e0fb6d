"""What the server expects back of every task that it has dispatched: the manifests of a round."""

from collections.abc import Sequence

from pliant.engine.job import Job, sent
from pliant.methods.base import Method, Task, Update
from pliant.methods.guard import Manifest, Specs, specs, variances
from pliant.nn.elastic import Elastic
from pliant.params import Params


class Expected:
    """The manifests of a run's tasks.

    What a method sends and keeps beside the change is its own affair: training on no mini-batch at
    all shows it. That is done once where nothing or no sub-network is sent beside it.
    """

    def __init__(self, method: Method, net: Elastic) -> None:
        self._method = method
        self._net = net
        self._shown: Update | None = None
        self._whole: Specs | None = None  # of the network, whose shapes never change

    def manifest(
        self, shared: Params, job: Job, batches: Sequence[int], macs: Sequence[float]
    ) -> Manifest:
        """Return what a valid update to one job looks like.

        `batches` are the samples of its mini-batches, `macs` the most that each can cost.
        """
        task = sent(self._method, self._net, shared, job)
        shown = self._example(task)
        return Manifest(
            job.place.device,
            tuple(batches),
            tuple(macs),
            self._sent(task),
            specs(shown.extra),
            specs(shown.memory),
            None if shown.subnet is None else task.subnet,
            variances(task.params),
            task.owned if shown.owned else 0,
            self._net,
        )

    def _sent(self, task: Task) -> Specs:
        if task.subnet is not None:
            return specs(task.params)
        if self._whole is None:
            self._whole = specs(task.params)
        return self._whole

    def _example(self, task: Task) -> Update:
        shown = self._shown
        if shown is None or (task.subnet is not None and (shown.extra or shown.memory)):
            shown = self._shown = self._method.train(self._net, task, ())
        return shown
