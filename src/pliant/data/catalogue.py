"""Sources by name, for a command line or a file that can only write the name down."""

from collections.abc import Callable
from pathlib import Path

from pliant.data.embedded_digits import digits
from pliant.data.federated import Source
from pliant.data.named import cifar10, cifar100, fashion_mnist, femnist, mnist, notmnist

SOURCES: dict[str, Callable[[Path | None], Source]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "notmnist": notmnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "femnist": femnist,
}


def load(name: str, root: Path | None = None) -> Source:
    """Load the source of this name."""
    if name not in SOURCES:
        raise LookupError(f"expected one of {', '.join(SOURCES)}, got {name}")
    return SOURCES[name](root)
