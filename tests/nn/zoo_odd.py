"""Networks with unusual code, or unusual combinations of channels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Framed(nn.Module):
    """A stem of six channels, the subclass's `middle`, and a linear head."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Linear(width, 3)

    def middle(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.stem(x)).mean((2, 3)))


def make_conv(inputs: int = 6, outputs: int = 6) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class Functional(nn.Module):
    """Only functional operations on the network's own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 3, 3, 3) * 0.3)
        self.second = nn.Parameter(torch.randn(5, 4, 3, 3) * 0.3)
        self.second_bias = nn.Parameter(torch.zeros(5))
        self.norm_scale = nn.Parameter(torch.ones(4))
        self.norm_shift = nn.Parameter(torch.zeros(4))
        self.out = nn.Parameter(torch.randn(3, 5) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.first, padding=1)
        x = F.batch_norm(x, None, None, self.norm_scale, self.norm_shift, training=True)
        x = F.max_pool2d(torch.relu(x), 2)
        x = torch.tanh(torch.conv2d(x, self.second, self.second_bias))
        return F.linear(torch.mean(x, dim=(2, 3)), self.out)


class SliceAddition(Framed):
    """Add a narrow branch to the first channels only."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = make_conv(6, 4)
        self.norm = nn.BatchNorm2d(6)
        self.last = make_conv()

    def middle(self, x: Tensor) -> Tensor:
        y = self.branch(F.relu(x))
        x = torch.cat([x[:, :4] + y, x[:, 4:]], dim=1)
        return F.relu(self.last(torch.sigmoid(self.norm(x))))


class SliceSpread(Framed):
    """Combine chunks, splits and narrow ranges of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.last = make_conv(7, 6)

    def middle(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        first, rest = torch.split(x, [2, 4], 1)
        y = torch.cat(
            [torch.tanh(left + right), F.silu(rest.narrow(1, 1, 2) * first), x[:, -2:]], 1
        )
        return self.last(y)


class SharedTwice(Framed):
    """Apply one layer twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = make_conv()
        self.norm = nn.BatchNorm2d(6)

    def middle(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.shared(x)))
        return F.relu(self.norm(self.shared(x)))


class SharedApart(Framed):
    """Apply one layer to two values whose channels come from different layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.shared = make_conv(), make_conv(), make_conv(6, 5)
        self.last = make_conv(10, 6)

    def middle(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        left, right = torch.relu(self.left(x)), torch.tanh(self.right(x))
        return self.last(torch.cat([self.shared(left), F.relu(self.shared(right))], 1))


class Auxiliary(Framed):
    """An auxiliary head in the middle, and a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(6, 2)
        self.body = make_conv()

    def forward(self, x: Tensor) -> dict[str, Tensor | tuple[Tensor, ...]]:  # type: ignore[override]
        x = F.relu(self.stem(x))
        early = self.auxiliary(x.mean((2, 3)))
        late = self.head(F.relu(self.body(x)).mean((2, 3)))
        return {"out": late, "more": (early, late.softmax(1))}


class WrittenOutSwish(Framed):
    """`x * sigmoid(x)`: one mask, applied once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(6)
        self.body = make_conv()

    def middle(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = self.body(x * torch.sigmoid(x))
        return torch.tanh(x / (1 + x.abs()) - x**2 + 2 * x)


class ConvClassifier(nn.Module):
    """A classifier of a 1x1 convolution and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.ELU())
        self.classifier = nn.Conv2d(5, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(F.relu(self.classifier(self.features(x))), 1).flatten(1)


class GroupNorms(Framed):
    """Groups of two and three, which may lose all channels, and instance norm."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs, self.triples = nn.GroupNorm(3, 6), nn.GroupNorm(2, 6)
        self.body, self.last = make_conv(), make_conv()
        self.instance = nn.InstanceNorm2d(6, affine=True)

    def middle(self, x: Tensor) -> Tensor:
        x = self.body(F.relu(self.pairs(x)))
        return F.silu(self.instance(self.last(self.triples(x))))


class LayerNorms(Framed):
    """Layer norm over channels and space, and over space alone."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.space = nn.LayerNorm([6, 8, 8]), nn.LayerNorm([8, 8])
        self.body = make_conv()

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.space(self.body(F.relu(self.all(x)))))


class Tokens(Framed):
    """Pixels as tokens: flatten, transpose, norm, a hidden linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.hidden, self.back = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def middle(self, x: Tensor) -> Tensor:
        y = self.norm(x.flatten(2).transpose(1, 2))
        y = self.back(F.gelu(self.hidden(y)))
        return F.relu(x + y.transpose(1, 2).reshape(x.shape))


class LocalResponse(Framed):
    """Local response norm, as in AlexNet."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.LocalResponseNorm(3, alpha=0.5), make_conv()

    def middle(self, x: Tensor) -> Tensor:
        return F.local_response_norm(self.body(self.norm(F.relu(x))), 2, alpha=0.3).tanh()


class Unknown(Framed):
    """Operations that mix channels and have no rule."""

    def __init__(self) -> None:
        super().__init__(width=2)
        self.bodies = nn.ModuleList([make_conv(), make_conv(), make_conv(6, 8)])

    def middle(self, x: Tensor) -> Tensor:
        x = self.bodies[0](torch.cumsum(F.relu(x), dim=1))
        x = self.bodies[1](torch.fft.fft(x, dim=1).real)
        x = self.bodies[2](F.softmax(x, dim=1) + F.normalize(x, dim=1))
        return F.pixel_shuffle(torch.sort(x, dim=1)[0], 2)


class SpatialAttention(Framed):
    """CBAM: gate all channels with a map of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.last = nn.Conv2d(2, 1, 3, padding=1), make_conv()

    def middle(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        pooled = torch.cat([x.mean(1, keepdim=True), x.max(dim=1, keepdim=True)[0]], dim=1)
        return torch.tanh(self.last(x * self.map(pooled).sigmoid()))


class ChannelAttention(Framed):
    """ECA: convolve along the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.along, self.last = nn.Conv1d(1, 1, 3, padding=1), make_conv()

    def middle(self, x: Tensor) -> Tensor:
        gate = F.adaptive_avg_pool2d(x, 1).squeeze(-1).transpose(-1, -2)
        gate = self.along(gate).transpose(-1, -2).unsqueeze(-1).sigmoid()
        return torch.tanh(self.last(x * gate))


class LearnedScale(Framed):
    """Scale, shift and divide by parameters and buffers over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6, 1, 1), 0.5))
        self.shift = nn.Parameter(torch.zeros(1, 6, 1, 1))
        self.register_buffer("spread", torch.linspace(1, 2, 6).view(1, 6, 1, 1))
        self.body = make_conv()

    def middle(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.body(torch.relu(x + self.shift))
        return torch.tanh((1 - x) / self.spread)


class PerChannelSlopes(Framed):
    """PReLU with one slope per channel, and with one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.per_channel, self.shared, self.body = nn.PReLU(6), nn.PReLU(), make_conv()

    def middle(self, x: Tensor) -> Tensor:
        return self.shared(self.body(self.per_channel(x)))


class InPlace(Framed):
    """In-place operations on values that are read again."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.body, self.last = make_conv(), make_conv()
        self.norm = nn.BatchNorm2d(6)

    def middle(self, x: Tensor) -> Tensor:
        alias = x.mul_(1.5)
        y = self.body(self.relu(x))
        y += alias  # after the in-place activation
        y = self.norm(y).relu_()
        return F.leaky_relu(self.last(y), 0.2, inplace=True)


class TwoDrawProduct(Framed):
    """Multiply two independent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = make_conv(3), make_conv(3), make_conv()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.left(x)) * self.right(x)
        return self.head(F.relu(self.last(F.relu(y + 0.1))).mean((2, 3)))


class TwoDrawSum(Framed):
    """Subtract two layers, add a third, and normalise."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = make_conv(3), make_conv(3), make_conv()
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.left(x)) - torch.sigmoid(self.right(x))
        y = self.norm(y + self.stem(x))
        return self.head(F.relu(self.last(torch.sigmoid(y))).mean((2, 3)))


class PaddedShortcut(Framed):
    """The parameter-free shortcut of the first ResNets: slice for the stride, pad the channels."""

    def __init__(self) -> None:
        super().__init__(width=8)
        self.body = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1), nn.BatchNorm2d(8))
        self.norm = nn.BatchNorm2d(8)
        self.last = make_conv(8, 8)

    def middle(self, x: Tensor) -> Tensor:
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1))
        return F.relu(self.last(torch.sigmoid(self.norm(shortcut + self.body(F.relu(x))))))


class BranchOnSum(Framed):
    """A branch on data."""

    def middle(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return torch.relu(x)
        return torch.tanh(x)


class LoopOnMaximum(Framed):
    """A loop whose length depends on data."""

    def middle(self, x: Tensor) -> Tensor:
        for _ in range(int(x.abs().max())):
            x = torch.tanh(x)
        return x


class WhileLarge(Framed):
    """A loop that ends depending on data."""

    def middle(self, x: Tensor) -> Tensor:
        while x.norm().item() > 1.0:
            x = x / 2
        return x
