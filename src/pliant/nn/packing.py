"""Take a subnet's entries out of full-size parameters, and put them (or their change) back."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pliant.nn.plan import Slice
from pliant.params import Params


def take(params: Mapping[str, Tensor], slices: Mapping[str, Slice]) -> Params:
    """Return the kept entries of every tensor; a tensor that is kept whole is returned itself."""
    return {
        name: tensor
        if (cut := slices.get(name)) is None or cut.rows is None
        else chosen(tensor, cut)
        for name, tensor in params.items()
    }


def chosen(tensor: Tensor, cut: Slice) -> Tensor:
    """Return the kept entries of one tensor as a tensor of its own."""
    assert cut.rows is not None
    return tensor.detach().reshape(-1, cut.block).index_select(0, cut.rows).view(cut.shape)


def write(full: Tensor, cut: Slice | None, small: Tensor) -> None:
    """Overwrite the kept entries of a full-size tensor in place."""
    if cut is None or cut.rows is None:
        if full is not small:
            full.copy_(small)
        return
    rows = full.reshape(-1, cut.block)  # a copy where the tensor lies in another order
    rows.index_copy_(0, cut.rows, small.reshape(-1, cut.block))
    if rows.data_ptr() != full.data_ptr():
        full.copy_(rows.view(full.shape))


def put(
    params: Mapping[str, Tensor], small: Mapping[str, Tensor], slices: Mapping[str, Slice]
) -> Params:
    """Return full-size tensors in which the kept entries are those of the subnet."""
    made = {name: tensor.clone() for name, tensor in params.items()}
    for name, tensor in small.items():
        write(made[name], slices.get(name), tensor)
    return made


def embed(
    params: Mapping[str, Tensor], small: Mapping[str, Tensor], slices: Mapping[str, Slice]
) -> tuple[Params, Params]:
    """Return the subnet's entries among zeros, and ones where there is an entry."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    ones = {name: torch.ones_like(tensor) for name, tensor in small.items()}
    return put(zeros, small, slices), put(zeros, ones, slices)
