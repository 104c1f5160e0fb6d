"""Transformers as people write them, at tiny widths."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """Attention and an MLP, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self._attend = heads, attend
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.single = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 10), nn.GELU(), nn.Linear(10, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self, self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def attend_by_module(block: Block, x: Tensor) -> Tensor:
    return block.attention(x, x, x)[0]


def attend_without_weights(block: Block, x: Tensor) -> Tensor:
    length = x.shape[1]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    return block.attention(x, x, x, need_weights=False, attn_mask=mask)[0]


def attend_to_others(block: Block, x: Tensor) -> Tensor:
    others = x.flip(1)
    return block.attention(x, others, others, need_weights=False)[0]


def attend_like_timm(block: Block, x: Tensor) -> Tensor:
    batch, length, width = x.shape
    size = width // block.heads
    parts = block.qkv(x).reshape(batch, length, 3, block.heads, size).permute(2, 0, 3, 1, 4)
    query, key, value = parts.unbind(0)
    weights = (query * size**-0.5) @ key.transpose(-2, -1)
    mixed = weights.softmax(dim=-1) @ value
    return block.out(mixed.transpose(1, 2).reshape(batch, length, width))


def attend_like_gpt(block: Block, x: Tensor) -> Tensor:
    batch, length, width = x.shape
    parts = (
        part.view(batch, length, block.heads, width // block.heads).transpose(1, 2)
        for part in block.qkv(x).split(width, dim=2)
    )
    mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
    return block.out(mixed.transpose(1, 2).contiguous().view(batch, length, width))


def attend_by_layers(block: Block, x: Tensor) -> Tensor:
    """Attend with one layer each for queries, keys and values, and a mask of the scores."""
    batch, length, width = x.shape
    shape = (batch, length, block.heads, width // block.heads)
    query, key, value = (layer(x).view(shape).permute(0, 2, 1, 3) for layer in block.single)
    future = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    scores = torch.matmul(query, key.transpose(2, 3)).masked_fill(future, -torch.inf)
    mixed = torch.matmul(F.softmax(scores, dim=-1), value)
    return block.out(mixed.permute(0, 2, 1, 3).flatten(2))


class ImageTransformer(nn.Module):
    """Patches, a class token, positions and blocks."""

    def __init__(self, attend: Attend, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        self.blocks = nn.Sequential(*(Block(width, heads, attend) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class TextTransformer(nn.Module):
    """Embeddings of tokens and positions, `nn.TransformerEncoder` and a mean."""

    def __init__(self, *, batch_first: bool, norm_first: bool, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, width), nn.Embedding(9, width)
        layer = nn.TransformerEncoderLayer(
            width, 2, 12, 0.0, batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self._batch_first = nn.Linear(width, 3), batch_first

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        if not self._batch_first:
            return self.head(self.encoder(y.transpose(0, 1)).mean(0))
        return self.head(self.encoder(y).mean(1))


class PaddedText(nn.Module):
    """An encoder layer that ignores padding, and a mean over the other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 4, 12, 0.0, "gelu", batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.tokens(x), src_key_padding_mask=x == 0)
        present = (x != 0).unsqueeze(-1)
        return self.head((y * present).sum(1) / present.sum(1))


class TextCnn(nn.Module):
    """Embeddings and convolutions of several lengths, each pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 6, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(6, 5, length) for length in (2, 3))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x).transpose(1, 2)
        return self.head(torch.cat([F.relu(c(y)).amax(2) for c in self.convs], 1))


class TiedText(nn.Module):
    """Embeddings that also predict the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.hidden = nn.Embedding(20, 6), nn.Linear(6, 8)
        self.back = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.back(F.gelu(self.hidden(self.tokens(x))))
        return F.linear(y, self.tokens.weight)
