"""Make the digits that travel inside the package: python scripts/embed_digits.py DATA_ROOT.

Of the n images of a digit in MNIST's training file those at i*n//800 are taken, in its test
file those at i*n//200, all in the order of the file: 800 + 200 of each digit, spread over the set.
"""

import sys
from hashlib import sha256
from pathlib import Path

import torch

from pliant.data.embedded_digits import NAME, TEST, TRAIN, pack_digits
from pliant.data.images import Images
from pliant.data.named import mnist


def chosen(images: Images, count: int) -> torch.Tensor:
    """Return the places of `count` images of each digit, spread evenly over the file."""
    places = []
    for digit in range(10):
        members = torch.nonzero(images.labels == digit)[:, 0]
        places.append(members[torch.arange(count) * len(members) // count])
    return torch.cat(places).sort().values


def main(root: Path) -> None:
    """Write the file and say its SHA-256, which the loader pins."""
    source = mnist(root)
    parts = [
        source.train.subset(chosen(source.train, TRAIN // 10)),
        source.test.subset(chosen(source.test, TEST // 10)),
    ]
    packed = pack_digits(
        torch.cat([part.pixels[:, 0] for part in parts]),
        torch.cat([part.labels for part in parts]).to(torch.uint8),
    )
    target = Path(__file__).parent.parent / "src" / "pliant" / "data" / "embedded" / NAME
    target.write_bytes(packed)
    sys.stdout.write(f"{target}: {len(packed):,} bytes, SHA-256 {sha256(packed).hexdigest()}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
