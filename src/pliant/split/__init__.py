"""Split learning methods: the network is cut in two, and the parts exchange every mini-batch."""

from pliant.split.adasplit import AdaSplit as AdaSplit
from pliant.split.aux_split import AuxSplit as AuxSplit
from pliant.split.base import SplitTraining as SplitTraining
from pliant.split.one_shot import OneShotSplit as OneShotSplit
from pliant.split.payload import Payload as Payload
from pliant.split.splitfed import SplitFed as SplitFed
from pliant.split.vanilla import VanillaSplit as VanillaSplit

AnySplit = VanillaSplit | SplitFed | AdaSplit | AuxSplit | OneShotSplit
