"""Make the bundled digits from MNIST: python scripts/embed_digits.py DATA_ROOT.

Of the n images of a digit, take those at i*n//800 in the training file and at i*n//200 in the test
file, in file order: 800 + 200 of each digit, spread over the set.
"""

import lzma
import sys
from hashlib import sha256
from pathlib import Path

import torch

from pliant.data.download.published import DIGITS
from pliant.data.formats.idx import encode_idx
from pliant.data.images import ImageDataset
from pliant.data.sources import mnist


def select_indices(images: ImageDataset, count: int) -> torch.Tensor:
    """Return the indices of `count` images of each digit, spread evenly over the file."""
    indices = []
    for digit in range(10):
        members = torch.nonzero(images.labels == digit)[:, 0]
        indices.append(members[torch.arange(count) * len(members) // count])
    return torch.cat(indices).sort().values


def main(root: Path) -> None:
    """Write the file and print its SHA-256, which the loader checks."""
    source = mnist(root)
    parts = [
        source.train.select(select_indices(source.train, 800)),
        source.test.select(select_indices(source.test, 200)),
    ]
    images = encode_idx(torch.cat([part.pixels[:, 0] for part in parts]))
    labels = encode_idx(torch.cat([part.labels for part in parts]).to(torch.uint8))
    packed = lzma.compress(images + labels, preset=9 | lzma.PRESET_EXTREME)
    target = Path(DIGITS.folder, DIGITS.files[0].name)
    target.write_bytes(packed)
    sys.stdout.write(f"{target}: {len(packed):,} bytes, SHA-256 {sha256(packed).hexdigest()}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
