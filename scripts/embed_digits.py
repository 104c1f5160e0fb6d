"""Make the bundled digits from MNIST: python scripts/embed_digits.py DATA_ROOT.

Of the n images of a digit, take those at i*n//800 in the training file and at i*n//200 in the test
file, in file order: 800 + 200 of each digit, spread over the set.
"""

import sys
from hashlib import sha256
from pathlib import Path

import torch

from pliant.data.digits import FILE_NAME, TEST_SIZE, TRAIN_SIZE, pack_digits
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
        source.train.select(select_indices(source.train, TRAIN_SIZE // 10)),
        source.test.select(select_indices(source.test, TEST_SIZE // 10)),
    ]
    packed = pack_digits(
        torch.cat([part.pixels[:, 0] for part in parts]),
        torch.cat([part.labels for part in parts]).to(torch.uint8),
    )
    target = Path(__file__).parent.parent / "src" / "pliant" / "data" / "embedded" / FILE_NAME
    target.write_bytes(packed)
    sys.stdout.write(f"{target}: {len(packed):,} bytes, SHA-256 {sha256(packed).hexdigest()}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
