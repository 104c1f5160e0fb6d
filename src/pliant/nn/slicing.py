"""Copy a subnet's entries out of full-size parameters and back."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pliant.nn.compiler.program import CompactProgram, Slice
from pliant.nn.cost import SubnetCounts
from pliant.nn.subnet import Subnet
from pliant.params import Params


def compute_shapes(program: CompactProgram, subnet: Subnet) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a subnet's parameters and buffers."""
    kept, shapes = SubnetCounts(subnet), {}
    for name, shape in program.param_shapes.items():
        sizes = list(shape)
        for dim, spans in enumerate(program.slicings.get(name, ())):
            if spans is not None:
                sizes[dim] = kept.count(spans)
        shapes[name] = tuple(sizes)
    return shapes


def take(params: Mapping[str, Tensor], slices: Mapping[str, Slice]) -> Params:
    """Return copies of the kept entries of every tensor."""
    return {name: _copy_rows(tensor.detach(), slices.get(name)) for name, tensor in params.items()}


def _copy_rows(tensor: Tensor, param_slice: Slice | None) -> Tensor:
    if param_slice is None or param_slice.rows is None:
        return tensor.clone()
    rows = tensor.reshape(-1, param_slice.block).index_select(0, param_slice.rows)
    return rows.view(param_slice.shape)


def _overwrite_rows(full: Tensor, param_slice: Slice | None, values: Tensor) -> None:
    if param_slice is None or param_slice.rows is None:
        if full is not values:
            full.copy_(values)
        return
    rows = full.reshape(-1, param_slice.block)  # a copy if the tensor has another memory format
    rows.index_copy_(0, param_slice.rows, values.reshape(-1, param_slice.block))
    if rows.data_ptr() != full.data_ptr():
        full.copy_(rows.view(full.shape))


def put(
    params: Mapping[str, Tensor], subnet_params: Mapping[str, Tensor], slices: Mapping[str, Slice]
) -> Params:
    """Return full-size tensors with the subnet's entries overwritten."""
    full_params = {name: tensor.clone() for name, tensor in params.items()}
    for name, tensor in subnet_params.items():
        _overwrite_rows(full_params[name], slices.get(name), tensor)
    return full_params


def expand(
    params: Mapping[str, Tensor], subnet_params: Mapping[str, Tensor], slices: Mapping[str, Slice]
) -> Params:
    """Return the subnet's entries at the full size of `params`, padded with zeros."""
    full_params = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    for name, tensor in subnet_params.items():
        _overwrite_rows(full_params[name], slices.get(name), tensor)
    return full_params


def embed(
    params: Mapping[str, Tensor], subnet_params: Mapping[str, Tensor], slices: Mapping[str, Slice]
) -> tuple[Params, Params]:
    """Return the subnet's entries at full size, padded with zeros, and a mask of ones."""
    ones = {name: torch.ones_like(tensor) for name, tensor in subnet_params.items()}
    return expand(params, subnet_params, slices), expand(params, ones, slices)
