"""Memory of a training step: parameters, gradients, optimiser state and activations.

Activations are the outputs of all operations that write one (neither views nor in-place ones), as
`Elastic.count_activations` counts them. Autograd saves no others, except within an operation that
PyTorch composes of several, such as a local response norm. The input, buffers, rescaling, the loss
and the workspace of kernels are not counted.
"""

from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from pliant.nn.compiler import channels
from pliant.nn.compiler.channels import AnyOf, ChannelSpans, Expression, SiteFilter
from pliant.nn.elastic import Elastic
from pliant.nn.optimisers import Optimiser

FLOAT_BYTES = 4
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MemoryBounds:
    """The most that any subnet with at most these numbers of filters has; one entry per row.

    >>> import numpy as np, torch
    >>> import pliant as pl
    >>> from pliant.nn.memory import bound_memory
    >>> net = pl.elastic(pl.models.digits_cnn(), torch.zeros(1, 1, 28, 28))
    >>> bounds = bound_memory(net, np.array([[6, 12], [12, 24]]))
    >>> bounds.step_bytes(pl.Sgd(momentum=0.9), np.array([32])).tolist()
    [[1029048.0, 2066616.0]]
    """

    params: FloatArray  # trainable
    activations: FloatArray  # per sample

    def step_bytes(self, optimiser: Optimiser, batch: FloatArray) -> FloatArray:
        """Return the bytes of a training step for each batch size and row."""
        tensors = 2 + optimiser.num_state_tensors  # the parameters and their gradients, too
        numbers = self.params * tensors + self.activations * np.asarray(batch)[:, None]
        return np.asarray(FLOAT_BYTES * numbers, np.float64)


def bound_memory(net: Elastic, counts: IntArray) -> MemoryBounds:
    """Return the memory bounds of subnets that keep at most `counts[row, site]` filters."""
    program = net.program
    counts = np.array(counts, np.int64).reshape(-1, len(net.sizes))
    for spans in program.fragile_spans:  # drawing may restore filters there
        for site in {site for span in spans for site in channels.collect_sites(span.expression)}:
            counts[:, site] = net.sizes[site]

    def bound(spans: ChannelSpans) -> IntArray:
        kept = [np.minimum(_bound_filters(span.expression, counts), span.size) for span in spans]
        return np.asarray(sum(n * span.repeat for n, span in zip(kept, spans, strict=True)))

    params = np.zeros(len(counts))
    for name in net.trainable_names & program.param_shapes.keys():
        dims = zip_longest(program.slicings.get(name, ()), program.param_shapes[name])
        sizes = [np.full(len(counts), size) if s is None else bound(s) for s, size in dims]
        params += np.prod(sizes, axis=0, dtype=np.float64)
    activations = np.zeros(len(counts))
    for tensor in program.activations:
        activations += tensor.unit_size * bound(tensor.spans)
    return MemoryBounds(params, activations)


def _bound_filters(expression: Expression, counts: IntArray) -> IntArray:
    """Return a bound on the present channels of a long span, for each row of filter counts."""
    if expression is None:
        return np.full(len(counts), np.iinfo(np.int64).max)
    if isinstance(expression, SiteFilter):
        return counts[:, expression.site]
    parts = [_bound_filters(part, counts) for part in expression.parts]
    return np.asarray(sum(parts) if isinstance(expression, AnyOf) else np.min(parts, axis=0))
