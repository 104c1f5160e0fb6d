"""Batch norm of many channels-last pixels, in rows that are longer than their channels.

torch's kernels walk from pixel to pixel, which is slow unless channels are a multiple of eight:
most of the time they wait for the last, partial vector. Here several pixels make one row.
Statistics are collected for each place in a row and then combined. The gradient is linear in the
input and in the gradient that it gets, so two passes of multiply-adds compute it.
"""

from typing import Any

import torch
from torch import Tensor

MIN_PIXELS = 2**14  # for fewer, calling Python costs more than it saves
FAST_MULTIPLE = 8  # of channels, for which torch's own kernels are as fast
MIN_ROW = 128  # entries
ALIGNMENT = 16  # entries in the longest vector register
_relu_backward = torch.ops.aten.threshold_backward


def count_row_pixels(x: Tensor) -> int:
    """Return how many pixels of an image make one row; 0 if torch's own batch norm is better."""
    if x.dim() != 4 or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return 0
    channels, pixels, count = x.shape[1], x.numel() // x.shape[1], 1
    if pixels < MIN_PIXELS or channels % FAST_MULTIPLE == 0:
        return 0
    if not x.is_contiguous(memory_format=torch.channels_last):
        return 0
    while channels * count < MIN_ROW or channels * count % ALIGNMENT:
        count *= 2
    return count if pixels % count == 0 else 0


def normalise_folded(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    momentum: float,
    eps: float,
    count: int,
    has_relu: bool,
) -> Tensor:
    """Normalise by batch statistics, updating the running ones, and apply a ReLU if it has one.

    The gradient of a result with a ReLU is overwritten.
    """
    options = (momentum, eps, count, has_relu)
    out: Tensor = _FoldedBatchNorm.apply(x, mean, variance, weight, bias, *options)  # type: ignore[no-untyped-call] # torch's
    return out


class _FoldedBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        running_mean: Tensor | None,
        running_variance: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
        count: int,
        has_relu: bool,
    ) -> Tensor:
        rows = _fold(x, count)
        mean, variance = _compute_statistics(rows, count)
        inverse = torch.rsqrt(variance + eps)
        slope = inverse if weight is None else inverse * weight
        shift = -mean * slope if bias is None else torch.addcmul(bias, mean, slope, value=-1)
        out = torch.empty_like(x)
        torch.addcmul(_repeat(shift, count), rows, _repeat(slope, count), out=_fold(out, count))
        if has_relu:
            torch.relu_(out)
        pixels = x.numel() // x.shape[1]
        if running_mean is not None:
            running_mean.data.lerp_(mean, momentum)  # as torch does, unseen by autograd
        if running_variance is not None:
            running_variance.data.lerp_(variance * (pixels / (pixels - 1)), momentum)
        ctx.eps, ctx.count = eps, count
        ctx.save_for_backward(x, weight, mean, inverse, slope, out if has_relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad, (x, weight, mean, inverse, slope, out) = grads[0], ctx.saved_tensors
        needed = [ctx.needs_input_grad[index] for index in (0, 3, 4)]
        if torch.is_grad_enabled():  # for a gradient of the gradient
            grad = grad if out is None else _relu_backward(grad, out, 0)
            results = torch.ops.aten.native_batch_norm_backward(
                grad, x, weight, None, None, mean, inverse, True, ctx.eps, needed
            )
        else:
            grad = grad.contiguous(memory_format=torch.channels_last)
            if out is not None:
                _relu_backward.grad_input(grad, out, 0, grad_input=grad)
            results = _differentiate(
                grad, x, (mean, inverse, slope), ctx.count, needed, is_owned=out is not None
            )
        return results[0], None, None, results[1], results[2], None, None, None, None


def _repeat(vector: Tensor, count: int) -> Tensor:
    return torch.cat([vector] * count)  # faster than `repeat`


def _fold(x: Tensor, count: int) -> Tensor:
    return x.permute(0, 2, 3, 1).view(-1, count * x.shape[1])


def _compute_statistics(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of each channel."""
    means, variances = torch.ops.aten.batch_norm_update_stats(rows, None, None, 0.0)
    between, mean = torch.var_mean(means.view(count, -1), 0, correction=0)
    within = variances.view(count, -1).sum(0)
    return mean, torch.add(between, within, alpha=1 / count)


def _differentiate(
    grad: Tensor,
    x: Tensor,
    statistics: tuple[Tensor, Tensor, Tensor],
    count: int,
    needed: list[bool],
    *,
    is_owned: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the input, the weight and the bias.

    That of the input overwrites a gradient that is owned.
    """
    mean, inverse, slope = statistics
    rows, grad_rows = _fold(x, count), _fold(grad, count)
    centre, scale = _repeat(mean, count), _repeat(inverse, count)
    _, products, sums = torch.ops.aten.native_batch_norm_backward(
        grad_rows, rows, None, None, None, centre, scale, True, 0.0, [False, True, True]
    )
    product, total = products.view(count, -1).sum(0), sums.view(count, -1).sum(0)
    x_grad = None
    if needed[0]:
        share = -x.shape[1] / x.numel()
        ratio = inverse * product * share
        shift = torch.addcmul(total * share, ratio, mean, value=-1) * slope
        x_grad = grad if is_owned else torch.empty_like(x)
        x_rows = _fold(x_grad, count)
        torch.addcmul(grad_rows, rows, _repeat(ratio, count), out=x_rows)
        torch.addcmul(_repeat(shift, count), x_rows, _repeat(slope, count), out=x_rows)
    return x_grad, product if needed[1] else None, total if needed[2] else None
