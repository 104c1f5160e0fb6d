"""Split methods: the network is cut, and an exchange takes place at every mini-batch."""

from pliant.split.adasplit import AdaSplit as AdaSplit
from pliant.split.base import Local as Local
from pliant.split.payload import Payload as Payload
from pliant.split.splitfed import SplitFed as SplitFed
from pliant.split.vanilla import Split as Split

AnySplit = Split | SplitFed | AdaSplit
