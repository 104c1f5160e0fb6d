"""`pliant demo`: methods under changing resources, on the digits that travel inside the package."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    from pliant.engine.ledger import RoundRecord

STORY = (
    "40 devices share {train:,} real digits; 10 of them train in a round. How fast each of them is "
    "changes about twice in every second of virtual time, by up to a factor of three. Every method "
    "has the same {seconds} s: FedAvg can wait for the slowest device, or take what is done at the "
    "end of the second; DISTREAL drops filters so that all mini-batches are done by then."
)


def demo(*, seconds: int = 20, seed: int = 0) -> None:
    """Train on the embedded digits while resources change inside rounds, and compare methods.

    Example: pliant demo --seconds 40

    Args:
        seconds: How long each method trains, in virtual time; a round lasts a second.
        seed: Another seed gives other devices and weights; the same gives the same result.
    """
    from pliant import data
    from pliant.devices import Changing, Fleet
    from pliant.engine.rules import Rules
    from pliant.engine.simulate import Setting, simulate
    from pliant.experiment import Network, weights
    from pliant.methods import AnyMethod, Distreal, FedAvg, Local
    from pliant.nn.optimiser import Sgd

    if seconds < 1:
        raise ValueError(f"Expected at least 1 second, got {seconds}")
    shared = data.digits().share(data.Iid(), devices=40, seed=seed)
    fleet = Fleet(size=40, speed=Changing(low=1 / 3, high=1.0, per_round=2.0))
    net = weights(Network("digits_cnn"), shared, seed)
    local = Local(Sgd(lr=0.05, clip=5.0), batch=16)
    runs: dict[str, tuple[AnyMethod, Rules]] = {
        "FedAvg, waits for the slowest": (FedAvg(local=local), Rules(late="wait")),
        "FedAvg, sends what is done": (FedAvg(local=local), Rules(late="partial")),
        "DISTREAL": (Distreal(local=local, budget="paced"), Rules(late="partial")),
    }
    console = Console(highlight=False)
    train = len(shared.train) - len(shared.proxy)
    console.print(STORY.format(train=train, seconds=seconds), soft_wrap=not console.is_terminal)
    table = Table("method", "accuracy", "rounds", "compute used", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    with Progress(console=console, disable=not console.is_terminal) as progress:
        for name, (method, rules) in runs.items():
            setting = Setting(rounds=seconds, seed=seed, rules=rules)
            bar = progress.add_task(name, total=seconds)
            found: list[RoundRecord] = []
            for record in simulate(method, net, shared, fleet, setting=setting):
                if record.seconds > seconds + 1e-6:
                    break
                found.append(record)
                progress.update(bar, completed=record.seconds)
            progress.update(bar, completed=seconds)
            table.add_row(name, *_cells(found))
    console.print(table)


def _cells(found: "list[RoundRecord]") -> tuple[str, ...]:
    if not found:
        return "-", "0", "-"
    used = sum(record.useful for record in found) / sum(record.available for record in found)
    return f"{found[-1].accuracy or 0.0:.1%}", str(len(found)), f"{used:.0%}"
