"""Federated methods, one file each."""

from pliant.methods.base import Local as Local
from pliant.methods.base import Method as Method
from pliant.methods.base import Schedule as Schedule
from pliant.methods.distreal import Distreal as Distreal
from pliant.methods.fedavg import FedAvg as FedAvg

AnyMethod = FedAvg | Distreal
