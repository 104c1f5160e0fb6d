"""Manifests: what the server expects back for each task."""

from collections.abc import Sequence
from dataclasses import replace

from pliant.engine.local_work import EXTRA_PREFIX, Job, make_task
from pliant.engine.worker_context import WorkerContext
from pliant.methods.base import Task, Update
from pliant.methods.state import init_device_state
from pliant.methods.validation import (
    TensorSpec,
    TensorSpecs,
    UpdateManifest,
    make_specs,
    select_variances,
)
from pliant.nn.subnet import Subnet
from pliant.params import Params


class ManifestBuilder:
    """Builds the manifests of a run's tasks.

    Which tensors an update holds besides the delta depends on the method. Training on zero
    mini-batches shows them: once per run, or once per size of subnet if there are any. No subnet is
    taken out of the network for a manifest.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._examples: dict[
            tuple[TensorSpec, ...] | None, Update
        ] = {}  # without deltas, by size of subnet
        self._full_specs: TensorSpecs | None = None  # its shapes never change
        self._round_params: tuple[Params, Params, Params] | None = None  # shared, own, variances

    def build(
        self, shared: Params, job: Job, batch_sizes: Sequence[int], max_macs: Sequence[float]
    ) -> UpdateManifest:
        """Return what a valid update for one job looks like.

        `batch_sizes` are the samples of its mini-batches, `max_macs` the most that each may cost.
        """
        net = self._context.net
        params, variances = self._select_params(shared)
        subnet = self._context.subnet_to_send(job.rows[0], job.key)
        specs = self._make_sent_specs(params, subnet)
        example = self._get_example_update(shared, job, subnet, specs)
        return UpdateManifest(
            job.key.device,
            tuple(batch_sizes),
            tuple(max_macs),
            specs,
            make_specs(example.extra),
            example.device_state,
            None if example.subnet is None else subnet,
            net.take(variances, subnet) if subnet is not None and variances else variances,
            job.num_samples if example.num_samples else 0,
            net,
        )

    def _select_params(self, shared: Params) -> tuple[Params, Params]:
        """Return the network and its variances: once for all jobs of a round."""
        if self._round_params is None or self._round_params[0] is not shared:
            params = {n: tensor for n, tensor in shared.items() if not n.startswith(EXTRA_PREFIX)}
            self._round_params = shared, params, select_variances(params)
        return self._round_params[1:]

    def _make_sent_specs(self, params: Params, subnet: Subnet | None) -> TensorSpecs:
        if self._full_specs is None:
            self._full_specs = make_specs(params)
        if subnet is None:
            return self._full_specs
        shapes = self._context.net.compute_shapes(subnet)
        return {
            name: spec._replace(shape=shapes.get(name, spec.shape))
            for name, spec in self._full_specs.items()
        }

    def _get_example_update(
        self, shared: Params, job: Job, subnet: Subnet | None, specs: TensorSpecs
    ) -> Update:
        examples = self._examples.values()
        has_more = any(example.extra or example.device_state is not None for example in examples)
        size = None if subnet is None else tuple(specs.values()) if has_more else ()
        if size not in self._examples:
            task = make_task(self._context, shared, job)
            example = self._context.train(task, ())
            self._check_device_state(task, example)
            self._examples[size] = replace(example, delta={})
        return self._examples[size]

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
