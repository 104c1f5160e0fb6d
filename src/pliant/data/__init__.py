"""Data sets as tensors, their partition among devices, and seeded mini-batches.

>>> import pliant as pl
>>> digits = pl.data.digits()
>>> len(digits.train), len(digits.test)
(8000, 2000)
"""

from pliant.data.batches import AS_IS as AS_IS
from pliant.data.batches import MIN_SAMPLES as MIN_SAMPLES
from pliant.data.batches import Batches as Batches
from pliant.data.batches import CropFlip as CropFlip
from pliant.data.batches import InputScale as InputScale
from pliant.data.batches import count_batches as count_batches
from pliant.data.batches import cycle_batches as cycle_batches
from pliant.data.batches import make_batches as make_batches
from pliant.data.download.cache import get_data_root as get_data_root
from pliant.data.federated import DataGrowth as DataGrowth
from pliant.data.federated import FederatedData as FederatedData
from pliant.data.federated import TrainTestData as TrainTestData
from pliant.data.formats.image_folder import image_folder as image_folder
from pliant.data.images import ImageDataset as ImageDataset
from pliant.data.images import resize as resize
from pliant.data.mixtures import ClientData as ClientData
from pliant.data.mixtures import Mixture as Mixture
from pliant.data.mixtures import mixed_cifar as mixed_cifar
from pliant.data.mixtures import mixed_noniid as mixed_noniid
from pliant.data.partition import AnyPartition as AnyPartition
from pliant.data.partition import ByGroup as ByGroup
from pliant.data.partition import Dirichlet as Dirichlet
from pliant.data.partition import Iid as Iid
from pliant.data.partition import LogNormalSizes as LogNormalSizes
from pliant.data.partition import Partition as Partition
from pliant.data.partition import Shards as Shards
from pliant.data.sources import cifar10 as cifar10
from pliant.data.sources import cifar100 as cifar100
from pliant.data.sources import digits as digits
from pliant.data.sources import fashion_mnist as fashion_mnist
from pliant.data.sources import femnist as femnist
from pliant.data.sources import load_dataset as load_dataset
from pliant.data.sources import mnist as mnist
from pliant.data.sources import notmnist as notmnist
