"""Train one neural network across many unequal devices, bending to what each can spend now."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

__version__ = version("pliant")

if TYPE_CHECKING:
    from pliant import data as data
    from pliant.data import ByGroup as ByGroup
    from pliant.data import CropFlip as CropFlip
    from pliant.data import Dirichlet as Dirichlet
    from pliant.data import Iid as Iid
    from pliant.data import Images as Images
    from pliant.data import Shards as Shards
    from pliant.data import Unequal as Unequal
    from pliant.nn import models as models
    from pliant.nn.elastic import Elastic as Elastic
    from pliant.nn.elastic import elastic as elastic
    from pliant.nn.learner import Learner as Learner
    from pliant.nn.optimiser import Adam as Adam
    from pliant.nn.optimiser import Sgd as Sgd
    from pliant.nn.subnet import Subnet as Subnet
    from pliant.params import params_of as params_of
    from pliant.rng import stream as stream

# Found on first use, so that `import pliant` and the command line start without torch.
_WHERE = {
    "data": "pliant.data",
    "models": "pliant.nn.models",
    "ByGroup": "pliant.data",
    "CropFlip": "pliant.data",
    "Dirichlet": "pliant.data",
    "Iid": "pliant.data",
    "Images": "pliant.data",
    "Shards": "pliant.data",
    "Unequal": "pliant.data",
    "Elastic": "pliant.nn.elastic",
    "elastic": "pliant.nn.elastic",
    "Learner": "pliant.nn.learner",
    "Adam": "pliant.nn.optimiser",
    "Sgd": "pliant.nn.optimiser",
    "Subnet": "pliant.nn.subnet",
    "params_of": "pliant.params",
    "stream": "pliant.rng",
}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'pliant' has no attribute {name!r}")
    module = import_module(_WHERE[name])
    return module if name in {"data", "models"} else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
