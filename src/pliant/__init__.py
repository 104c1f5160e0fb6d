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
    from pliant.data import Federated as Federated
    from pliant.data import Iid as Iid
    from pliant.data import Images as Images
    from pliant.data import Shards as Shards
    from pliant.data import Unequal as Unequal
    from pliant.devices import Availability as Availability
    from pliant.devices import Changing as Changing
    from pliant.devices import Constant as Constant
    from pliant.devices import DeviceClass as DeviceClass
    from pliant.devices import Fleet as Fleet
    from pliant.devices import Recorded as Recorded
    from pliant.devices import Steps as Steps
    from pliant.devices import Windows as Windows
    from pliant.engine.evaluate import Evaluation as Evaluation
    from pliant.engine.ledger import RoundRecord as RoundRecord
    from pliant.engine.ledger import TaskRecord as TaskRecord
    from pliant.engine.rules import Rules as Rules
    from pliant.engine.search import search as search
    from pliant.engine.simulate import Setting as Setting
    from pliant.engine.simulate import simulate as simulate
    from pliant.engine.simulate import trained as trained
    from pliant.engine.split import simulate_split as simulate_split
    from pliant.engine.split_dry import dry_run as dry_run
    from pliant.engine.store import events as events
    from pliant.engine.workers import Cluster as Cluster
    from pliant.engine.workers import Inline as Inline
    from pliant.engine.workers import Processes as Processes
    from pliant.explore import Exploration as Exploration
    from pliant.explore import Nsga2 as Nsga2
    from pliant.explore import Objective as Objective
    from pliant.explore import Profile as Profile
    from pliant.explore import Table as Table
    from pliant.explore import load_table as load_table
    from pliant.explore import save_table as save_table
    from pliant.explore import uniform_table as uniform_table
    from pliant.methods import Coherent as Coherent
    from pliant.methods import Distreal as Distreal
    from pliant.methods import Elfish as Elfish
    from pliant.methods import FedAvg as FedAvg
    from pliant.methods import FedDropout as FedDropout
    from pliant.methods import FedNova as FedNova
    from pliant.methods import FedProx as FedProx
    from pliant.methods import FedRolex as FedRolex
    from pliant.methods import Fjord as Fjord
    from pliant.methods import HeteroFl as HeteroFl
    from pliant.methods import Local as Local
    from pliant.methods import Scaffold as Scaffold
    from pliant.methods import Schedule as Schedule
    from pliant.methods import ServerAdam as ServerAdam
    from pliant.methods import ServerSgd as ServerSgd
    from pliant.nn import models as models
    from pliant.nn.cut import cut as cut
    from pliant.nn.cut import cuts as cuts
    from pliant.nn.elastic import Elastic as Elastic
    from pliant.nn.elastic import elastic as elastic
    from pliant.nn.learner import Learner as Learner
    from pliant.nn.optimiser import Adam as Adam
    from pliant.nn.optimiser import Sgd as Sgd
    from pliant.nn.statistics import Reestimated as Reestimated
    from pliant.nn.statistics import Running as Running
    from pliant.nn.subnet import Subnet as Subnet
    from pliant.params import params_of as params_of
    from pliant.rng import stream as stream
    from pliant.score import c3 as c3
    from pliant.split import AdaSplit as AdaSplit
    from pliant.split import Payload as Payload
    from pliant.split import Split as Split
    from pliant.split import SplitFed as SplitFed

# Found on first use, so that `import pliant` and the command line start without torch.
_MODULES = {"data": "pliant.data", "models": "pliant.nn.models"}
_WHERE = {
    "ByGroup": "pliant.data",
    "CropFlip": "pliant.data",
    "Dirichlet": "pliant.data",
    "Federated": "pliant.data",
    "Iid": "pliant.data",
    "Images": "pliant.data",
    "Shards": "pliant.data",
    "Unequal": "pliant.data",
    "Availability": "pliant.devices",
    "Changing": "pliant.devices",
    "Constant": "pliant.devices",
    "DeviceClass": "pliant.devices",
    "Fleet": "pliant.devices",
    "Recorded": "pliant.devices",
    "Steps": "pliant.devices",
    "Windows": "pliant.devices",
    "Evaluation": "pliant.engine.evaluate",
    "RoundRecord": "pliant.engine.ledger",
    "TaskRecord": "pliant.engine.ledger",
    "Rules": "pliant.engine.rules",
    "search": "pliant.engine.search",
    "Setting": "pliant.engine.simulate",
    "simulate": "pliant.engine.simulate",
    "simulate_split": "pliant.engine.split",
    "dry_run": "pliant.engine.split_dry",
    "events": "pliant.engine.store",
    "trained": "pliant.engine.simulate",
    "Cluster": "pliant.engine.workers",
    "Inline": "pliant.engine.workers",
    "Processes": "pliant.engine.workers",
    "Exploration": "pliant.explore",
    "Nsga2": "pliant.explore",
    "Objective": "pliant.explore",
    "Profile": "pliant.explore",
    "Table": "pliant.explore",
    "load_table": "pliant.explore",
    "save_table": "pliant.explore",
    "uniform_table": "pliant.explore",
    "Coherent": "pliant.methods",
    "Distreal": "pliant.methods",
    "Elfish": "pliant.methods",
    "FedAvg": "pliant.methods",
    "FedDropout": "pliant.methods",
    "FedNova": "pliant.methods",
    "FedProx": "pliant.methods",
    "FedRolex": "pliant.methods",
    "Fjord": "pliant.methods",
    "HeteroFl": "pliant.methods",
    "Local": "pliant.methods",
    "Scaffold": "pliant.methods",
    "Schedule": "pliant.methods",
    "ServerAdam": "pliant.methods",
    "ServerSgd": "pliant.methods",
    "cut": "pliant.nn.cut",
    "cuts": "pliant.nn.cut",
    "Elastic": "pliant.nn.elastic",
    "elastic": "pliant.nn.elastic",
    "Learner": "pliant.nn.learner",
    "Adam": "pliant.nn.optimiser",
    "Sgd": "pliant.nn.optimiser",
    "Reestimated": "pliant.nn.statistics",
    "Running": "pliant.nn.statistics",
    "Subnet": "pliant.nn.subnet",
    "params_of": "pliant.params",
    "stream": "pliant.rng",
    "c3": "pliant.score",
    "AdaSplit": "pliant.split",
    "Payload": "pliant.split",
    "Split": "pliant.split",
    "SplitFed": "pliant.split",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'pliant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, *_WHERE])
