"""`pliant demo`: run what there is on the digits that travel inside the package."""

from rich.console import Console
from rich.table import Table


def demo(*, devices: int = 10, alpha: float = 0.5, seed: int = 0) -> None:
    """Share the embedded digits among devices, and show what each of them holds.

    Example: pliant demo --devices 20 --alpha 0.1

    Args:
        devices: How many devices share the digits.
        alpha: How even the classes are on a device: small is uneven (Dirichlet).
        seed: Another seed gives another partition; the same gives the same.
    """
    from pliant import data

    console = Console(highlight=False)
    source = data.digits()
    channels, height, width = source.train.shape
    console.print(
        f"{len(source.train):,} digits to train on and {len(source.test):,} to test on, "
        f"{channels}x{height}x{width} pixels, from inside the package.",
        soft_wrap=True,
    )
    shared = source.share(data.Dirichlet(alpha=alpha), devices=devices, seed=seed)
    table = Table("device", "images", *(str(digit) for digit in range(10)), box=None)
    for column in table.columns:
        column.justify = "right"
    for device, images in enumerate(shared.sizes()):
        counts = shared.shard(device).counts()
        table.add_row(str(device), str(images), *(str(count or "-") for count in counts))
    console.print(table)
    console.print(shared.summary(), soft_wrap=True)
