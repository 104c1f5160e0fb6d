"""Federated learning methods, one file each."""

from pliant.methods.asofed import AsoFed as AsoFed
from pliant.methods.base import LocalTraining as LocalTraining
from pliant.methods.base import LrSchedule as LrSchedule
from pliant.methods.coherent import Coherent as Coherent
from pliant.methods.distreal import Distreal as Distreal
from pliant.methods.ditto import Ditto as Ditto
from pliant.methods.elastic_batch import ElasticBatch as ElasticBatch
from pliant.methods.elfish import Elfish as Elfish
from pliant.methods.fedasync import FedAsync as FedAsync
from pliant.methods.fedavg import FedAvg as FedAvg
from pliant.methods.fedbuff import FedBuff as FedBuff
from pliant.methods.fedbuff import RoundMethod as RoundMethod
from pliant.methods.feddf import FedDf as FedDf
from pliant.methods.feddropout import FedDropout as FedDropout
from pliant.methods.fednova import FedNova as FedNova
from pliant.methods.fedper import FedPer as FedPer
from pliant.methods.fedprox import FedProx as FedProx
from pliant.methods.fedrolex import FedRolex as FedRolex
from pliant.methods.fjord import Fjord as Fjord
from pliant.methods.heterofl import HeteroFl as HeteroFl
from pliant.methods.multihead import MultiHead as MultiHead
from pliant.methods.progressive import Progressive as Progressive
from pliant.methods.progressive import Stage as Stage
from pliant.methods.scaffold import Scaffold as Scaffold
from pliant.methods.server_optimisers import ServerAdagrad as ServerAdagrad
from pliant.methods.server_optimisers import ServerAdam as ServerAdam
from pliant.methods.server_optimisers import ServerExtrapolation as ServerExtrapolation
from pliant.methods.server_optimisers import ServerSgd as ServerSgd
from pliant.methods.server_optimisers import ServerYogi as ServerYogi
from pliant.methods.small_network import SmallNetwork as SmallNetwork
from pliant.methods.staleness import ConstantStaleness as ConstantStaleness
from pliant.methods.staleness import HingeStaleness as HingeStaleness
from pliant.methods.staleness import PolynomialStaleness as PolynomialStaleness
from pliant.methods.verbs import Method as Method

AnyMethod = RoundMethod | FedDf | FedAsync | FedBuff | AsoFed
