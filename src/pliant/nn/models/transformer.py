"""Small transformers: one for 32x32 images and one for sequences of tokens.

Vaswani et al.: Attention Is All You Need, NeurIPS 2017. Dosovitskiy et al.: An Image Is Worth 16x16
Words, ICLR 2021. Norms come before attention and MLP, and positions are learned.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pliant.nn.models.initialisation import check_positive


class Block(nn.Module):
    """Attention among all positions and an MLP, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # x: (batch, length, width)
        x = x + self._attend(self.norm1(x), mask)
        x = x + self.mlp(self.norm2(x))
        return x

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        parts = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=mask)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class VisionTransformer(nn.Module):
    """Classify images by a class token that attends to their patches."""

    def __init__(
        self, classes: int, width: int, heads: int, depth: int, *, channels: int, side: int
    ) -> None:
        super().__init__()
        patches = (side // 4) ** 2
        self.patches = nn.Conv2d(channels, width, 4, 4)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, patches + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads, 4 * width) for _ in range(depth))
        self.norm, self.classifier = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # x: (batch, channel, side, side)
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.classifier(self.norm(x)[:, 0])
        return logits


class TextTransformer(nn.Module):
    """Classify token sequences by the mean of their positions; token 0 is padding."""

    def __init__(
        self, classes: int, vocabulary: int, length: int, width: int, heads: int, depth: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length, width))
        self.blocks = nn.ModuleList(Block(width, heads, 4 * width) for _ in range(depth))
        self.norm, self.classifier = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # x: (batch, length), integers
        present = x != 0
        y = self.tokens(x) + self.positions
        for block in self.blocks:
            y = block(y, present[:, None, None, :])
        weights = present.unsqueeze(2)
        mean = (self.norm(y) * weights).sum(1) / weights.sum(1).clamp(min=1)
        logits: Tensor = self.classifier(mean)
        return logits


def vit_small(
    classes: int = 10,
    *,
    width: int = 96,
    heads: int = 6,
    depth: int = 4,
    channels: int = 3,
    side: int = 32,
) -> VisionTransformer:
    """Build a vision transformer on patches of 4x4 pixels: 32.3 M MACs for 32x32 images."""
    _check("vit_small", {"classes": classes, "channels": channels}, width, heads, depth)
    if side < 4 or side % 4:
        raise ValueError(f"vit_small: expected `side` a multiple of 4, got {side}")
    return VisionTransformer(classes, width, heads, depth, channels=channels, side=side)


def text_transformer(
    classes: int = 2,
    *,
    vocabulary: int = 256,
    length: int = 64,
    width: int = 64,
    heads: int = 4,
    depth: int = 2,
) -> TextTransformer:
    """Build a classifier of token sequences; the tokens are integers below `vocabulary`."""
    sizes = {"classes": classes, "vocabulary": vocabulary, "length": length}
    _check("text_transformer", sizes, width, heads, depth)
    return TextTransformer(classes, vocabulary, length, width, heads, depth)


def _check(name: str, sizes: dict[str, int], width: int, heads: int, depth: int) -> None:
    check_positive(name, {**sizes, "width": width, "heads": heads, "depth": depth})
    if width % heads:
        raise ValueError(f"{name}: expected `width` a multiple of `heads`, got {width} and {heads}")
