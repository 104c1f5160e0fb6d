"""Devices: how fast they are, what they cost, and how they choose what to spend."""

from pliant.devices.drawn import Changing as Changing
from pliant.devices.drawn import Constant as Constant
from pliant.devices.energy import Traits as Traits
from pliant.devices.energy import joules as joules
from pliant.devices.fleet import Device as Device
from pliant.devices.fleet import DeviceClass as DeviceClass
from pliant.devices.fleet import Fleet as Fleet
from pliant.devices.path import Path as Path
from pliant.devices.plan import FULL as FULL
from pliant.devices.plan import Choice as Choice
from pliant.devices.plan import Given as Given
from pliant.devices.plan import Moment as Moment
from pliant.devices.plan import PerBatch as PerBatch
from pliant.devices.plan import PerRound as PerRound
from pliant.devices.plan import Plan as Plan
from pliant.devices.plan import Rows as Rows
from pliant.devices.played import Availability as Availability
from pliant.devices.played import Recorded as Recorded
from pliant.devices.played import Steps as Steps
from pliant.devices.played import Windows as Windows
from pliant.devices.trace import Product as Product
from pliant.devices.trace import Trace as Trace
