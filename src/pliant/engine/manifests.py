"""Manifests: what the server expects back for each task."""

from collections.abc import Sequence

from pliant.engine.local_work import Job, WorkerContext, make_task
from pliant.methods.base import Task, Update
from pliant.methods.state import init_device_state
from pliant.methods.validation import TensorSpecs, UpdateManifest, make_specs, select_variances
from pliant.params import Params


class ManifestBuilder:
    """Builds the manifests of a run's tasks.

    Which tensors an update holds besides the delta depends on the method. Training on zero
    mini-batches shows them: once per run, or for each subnet if their shapes depend on it.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._example_update: Update | None = None
        self._full_specs: TensorSpecs | None = None  # its shapes never change

    def build(
        self, shared: Params, job: Job, batch_sizes: Sequence[int], max_macs: Sequence[float]
    ) -> UpdateManifest:
        """Return what a valid update for one job looks like.

        `batch_sizes` are the samples of its mini-batches, `max_macs` the most that each may cost.
        """
        task = make_task(self._context, shared, job)
        example = self._get_example_update(task)
        return UpdateManifest(
            job.key.device,
            tuple(batch_sizes),
            tuple(max_macs),
            self._get_sent_specs(task),
            make_specs(example.extra),
            example.device_state,
            None if example.subnet is None else task.subnet,
            select_variances(task.params),
            task.num_samples if example.num_samples else 0,
            self._context.net,
        )

    def _get_sent_specs(self, task: Task) -> TensorSpecs:
        if task.subnet is not None:
            return make_specs(task.params)
        if self._full_specs is None:
            self._full_specs = make_specs(task.params)
        return self._full_specs

    def _get_example_update(self, task: Task) -> Update:
        example = self._example_update
        has_more = example is not None and (example.extra or example.device_state is not None)
        if example is None or (task.subnet is not None and has_more):
            example = self._example_update = self._context.train(task, ())
            self._check_device_state(task, example)
        return example

    def _check_device_state(self, task: Task, example: Update) -> None:
        """Refuse a state that was not declared: it could not be resumed."""
        method = self._context.method
        declared = type(init_device_state(method, task.params)).__name__
        returned = type(example.device_state).__name__
        if declared != returned:
            raise ValueError(
                f"{type(method).__name__}: expected `train` to return the device state that "
                f"`init_device_state` returns, {declared}, got {returned}"
            )
