"""Segmentation, audio, video, recurrent and attention networks, at tiny widths."""

import torch
import torch.nn.functional as F
from tests.nn.families.parts import make_unit
from torch import Tensor, nn


class UNet(nn.Module):
    """A U-Net whose decoder is transposed convolutions, or interpolation and convolutions."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.make_double(3, 4), self.make_double(4, 6)])
        self.bottom = self.make_double(6, 8)
        up: list[nn.Module] = [
            nn.ConvTranspose2d(inputs, outputs, 2, 2)
            if is_transposed
            else nn.Sequential(
                nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
                nn.Conv2d(inputs, outputs, 1),
            )
            for inputs, outputs in ((8, 6), (6, 4))
        ]
        self.up = nn.ModuleList(up)
        self.join = nn.ModuleList([self.make_double(12, 6), self.make_double(8, 4)])
        self.out = nn.Conv2d(4, 2, 1)

    @staticmethod
    def make_double(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(make_unit(inputs, outputs), make_unit(outputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        return self.out(x)


def make_autoencoder() -> nn.Module:
    """Make an encoder, and a decoder of transposed convolutions."""
    return nn.Sequential(
        make_unit(3, 4, 3, 2),
        make_unit(4, 6, 3, 2),
        nn.ConvTranspose2d(6, 5, 3, 2, 1, 1),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.ConvTranspose2d(5, 4, 2, 2, bias=False),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, padding=1),
    )


def make_generator() -> nn.Module:
    """Make the generator of a DCGAN, from noise of one pixel."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride, padding in ((5, 8, 1, 0), (8, 6, 2, 1), (6, 4, 2, 1)):
        layers += [
            nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(True),
        ]
    return nn.Sequential(*layers, nn.ConvTranspose2d(4, 3, 4, 2, 1), nn.Tanh())


class SignalDecoder(nn.Module):
    """A transposed convolution of a signal by its function, after a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.gate = nn.Conv1d(2, 6, 4, 2), nn.Conv1d(2, 6, 4, 2)
        self.weight = nn.Parameter(torch.randn(6, 5, 4))
        self.bias, self.out = nn.Parameter(torch.randn(5)), nn.Conv1d(5, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.encode(x) * torch.sigmoid(self.gate(x))
        return self.out(F.relu(F.conv_transpose1d(y, self.weight, self.bias, stride=2)))


class AttentionUNet(nn.Module):
    """A skip connection that is gated by deeper features."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.deep = make_unit(3, 4), make_unit(4, 6)
        self.key, self.query, self.gate = nn.Conv2d(4, 3, 1), nn.Conv2d(6, 3, 1), nn.Conv2d(3, 1, 1)
        self.decoder, self.out = make_unit(10, 5), nn.Conv2d(5, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.encoder(x)
        deep = F.interpolate(self.deep(F.avg_pool2d(skip, 2)), scale_factor=2.0)
        gate = torch.sigmoid(self.gate(F.relu(self.key(skip) + self.query(deep))))
        return self.out(self.decoder(torch.cat([skip * gate, deep], 1)))


class Pyramid(nn.Module):
    """A feature pyramid: lateral convolutions, added from the top down; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = make_unit(3, 4), make_unit(4, 6, 3, 2)
        self.lateral = nn.ModuleList([nn.Conv2d(4, 5, 1), nn.Conv2d(6, 5, 1)])
        self.smooth, self.predict = nn.Conv2d(5, 5, 3, padding=1), nn.Conv2d(5, 2, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        low = self.low(x)
        high = self.high(low)
        top = self.lateral[1](high)
        merged = self.lateral[0](low) + F.interpolate(top, size=low.shape[-2:])
        return [self.predict(self.smooth(level)) for level in (merged, top)]


def make_audio_cnn() -> nn.Module:
    """Make M5: raw audio, large strided kernels first."""
    layers: list[nn.Module] = []
    for inputs, outputs, kernel, stride in ((1, 4, 9, 4), (4, 4, 3, 1), (4, 6, 3, 1)):
        layers += [nn.Conv1d(inputs, outputs, kernel, stride), nn.BatchNorm1d(outputs), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 3)
    )


class WaveNet(nn.Module):
    """Dilated convolutions with a tanh and a sigmoid gate, residuals and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(2, 4, 1)
        self.filters = nn.ModuleList(nn.Conv1d(4, 5, 2, dilation=d) for d in (1, 2))
        self.gates = nn.ModuleList(nn.Conv1d(4, 5, 2, dilation=d) for d in (1, 2))
        self.residuals = nn.ModuleList(nn.Conv1d(5, 4, 1) for _ in range(2))
        self.skips = nn.ModuleList(nn.Conv1d(5, 6, 1) for _ in range(2))
        self.out = nn.Conv1d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        total = torch.zeros(1, dtype=x.dtype)
        for index, dilation in enumerate((1, 2)):
            padded = F.pad(x, (dilation, 0))
            y = torch.tanh(self.filters[index](padded)) * torch.sigmoid(self.gates[index](padded))
            total = total + self.skips[index](y)
            x = x + self.residuals[index](y)
        return self.out(F.relu(total))


class Temporal(nn.Module):
    """A TCN: causal convolutions whose excess is cut off, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(inputs, 5, 3, padding=2 * d, dilation=d) for inputs, d in ((2, 1), (5, 2))
        )
        self.match, self.head = nn.Conv1d(2, 5, 1), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.convs[0](x)[:, :, :-2].contiguous())
        out = F.relu(self.convs[1](out)[:, :, :-4].contiguous())
        return self.head(F.relu(out + self.match(x))[:, :, -1])


def make_video_cnn() -> nn.Module:
    """Make C3D."""
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool3d((1, 2, 2)),
        nn.Conv3d(4, 5, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(5, 3),
    )


class FactorisedVideo(nn.Module):
    """R(2+1)D: a spatial and a temporal convolution, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(2, 4, (1, 3, 3), padding=(0, 1, 1))
        self.spatial = nn.Conv3d(4, 6, (1, 3, 3), padding=(0, 1, 1), bias=False)
        self.norm = nn.BatchNorm3d(6)
        self.temporal = nn.Conv3d(6, 4, (3, 1, 1), padding=(1, 0, 0), bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(x + self.temporal(F.relu(self.norm(self.spatial(x)))))
        return self.head(x.mean((2, 3, 4)))


class TwoPathways(nn.Module):
    """SlowFast: a path of few frames takes features from one of all frames."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Conv3d(2, 4, (1, 3, 3))
        self.fast = nn.Conv3d(2, 3, (3, 3, 3), padding=(1, 0, 0))
        self.lateral = nn.Conv3d(3, 3, (2, 1, 1), stride=(2, 1, 1))
        self.last, self.head = nn.Conv3d(7, 5, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        slow, fast = F.relu(self.slow(x[:, :, ::2])), F.relu(self.fast(x))
        slow = F.relu(self.last(torch.cat([slow, self.lateral(fast)], 1)))
        return self.head(torch.cat([slow.mean((2, 3, 4)), fast.mean((2, 3, 4))], 1))


class ConvRecurrent(nn.Module):
    """CRNN: columns of convolutional features as the steps of an LSTM or a GRU."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.convs = nn.Sequential(make_unit(3, 4), nn.MaxPool2d(2), make_unit(4, 5))
        self.cell = cell(20, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs(x)
        steps = x.permute(0, 3, 1, 2).flatten(2)
        return self.head(self.cell(steps)[0].mean(1))


class ConvLSTM(nn.Module):
    """A convolutional LSTM, unrolled over the frames of a clip."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.gates = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, frames, height, width = x.shape
        hidden = cell = torch.zeros(batch, 4, height, width, dtype=x.dtype)
        for frame in range(frames):
            inputs = torch.cat([self.encode(x[:, :, frame]), hidden], 1)
            i, f, o, g = torch.chunk(self.gates(inputs), 4, 1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            hidden = torch.sigmoid(o) * torch.tanh(cell)
        return self.head(hidden.mean((2, 3)))


class VisionTransformer(nn.Module):
    """Convolutional patches, a class token, positions and a transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.patches = make_unit(3, 5), nn.Conv2d(5, 8, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8) * 0.1)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(self.stem(x)).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.mlp(self.norms[1](x))
        return self.head(x[:, 0])


class NonLocal(nn.Module):
    """Attention among all pixels, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = make_unit(3, 6, 3, 2)
        self.query, self.key, self.value = (nn.Conv2d(6, 4, 1) for _ in range(3))
        self.out, self.head = nn.Conv2d(4, 6, 1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        query, key, value = (f(x).flatten(2) for f in (self.query, self.key, self.value))
        weights = torch.softmax(torch.bmm(query.transpose(1, 2), key) / 2.0, dim=-1)
        mixed = torch.bmm(value, weights.transpose(1, 2)).view(x.shape[0], 4, *x.shape[2:])
        return self.head(F.relu(x + self.out(mixed)).mean((2, 3)))


class LinearAttention(nn.Module):
    """Heads split by view, combined by einsum; scaled_dot_product_attention after it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = make_unit(3, 6, 3, 2)
        self.qkv, self.out, self.head = nn.Conv2d(6, 12, 1), nn.Conv2d(4, 6, 1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        batch, _, height, width = x.shape
        q, k, v = self.qkv(x).view(batch, 3, 2, 2, height * width).unbind(1)
        context = torch.einsum("bhdn,bhen->bhde", k.softmax(-1), v)
        y = torch.einsum("bhde,bhdn->bhen", context, q)
        z = F.scaled_dot_product_attention(*(t.transpose(-1, -2) for t in (q, k, v)))
        y = y + z.transpose(-1, -2)
        return self.head((x + self.out(y.reshape(batch, 4, height, width))).mean((2, 3)))


class Mixer(nn.Module):
    """MLP-Mixer on patches of a convolution: linear layers over tokens and over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 4, 4)
        self.norms = nn.ModuleList([nn.LayerNorm(6), nn.LayerNorm(6)])
        self.tokens = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
        self.channels = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norms[1](x))
        return self.head(x.mean(1))
