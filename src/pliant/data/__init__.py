"""Data: sources as tensors, their partition into devices, mixtures, and seeded batches.

>>> import pliant as pl
>>> digits = pl.data.digits()
>>> len(digits.train), len(digits.test)
(8000, 2000)
"""

from pliant.data.batch import Batches as Batches
from pliant.data.batch import CropFlip as CropFlip
from pliant.data.batch import batches as batches
from pliant.data.catalogue import load as load
from pliant.data.embedded_digits import digits as digits
from pliant.data.federated import Federated as Federated
from pliant.data.federated import Source as Source
from pliant.data.folders import folder as folder
from pliant.data.images import Images as Images
from pliant.data.mixture import Client as Client
from pliant.data.mixture import Mixture as Mixture
from pliant.data.mixture import mixed_cifar as mixed_cifar
from pliant.data.mixture import mixed_noniid as mixed_noniid
from pliant.data.named import cifar10 as cifar10
from pliant.data.named import cifar100 as cifar100
from pliant.data.named import fashion_mnist as fashion_mnist
from pliant.data.named import femnist as femnist
from pliant.data.named import mnist as mnist
from pliant.data.named import notmnist as notmnist
from pliant.data.partition import AnyPartition as AnyPartition
from pliant.data.partition import ByGroup as ByGroup
from pliant.data.partition import Dirichlet as Dirichlet
from pliant.data.partition import Iid as Iid
from pliant.data.partition import Partition as Partition
from pliant.data.partition import Shards as Shards
from pliant.data.partition import Unequal as Unequal
from pliant.data.root import data_root as data_root
