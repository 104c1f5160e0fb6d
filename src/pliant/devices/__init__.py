"""Devices: their speeds, their costs, and their budget policies."""

from pliant.devices.budget import FULL_NETWORK as FULL_NETWORK
from pliant.devices.budget import BudgetPolicy as BudgetPolicy
from pliant.devices.budget import CostRows as CostRows
from pliant.devices.budget import DeviceStatus as DeviceStatus
from pliant.devices.budget import FixedChoice as FixedChoice
from pliant.devices.budget import PerBatch as PerBatch
from pliant.devices.budget import PerDevice as PerDevice
from pliant.devices.budget import PerRound as PerRound
from pliant.devices.budget import RowChoice as RowChoice
from pliant.devices.fleet import DeviceClass as DeviceClass
from pliant.devices.fleet import DeviceCosts as DeviceCosts
from pliant.devices.fleet import Fleet as Fleet
from pliant.devices.fleet import FleetDevice as FleetDevice
from pliant.devices.fleet import compute_joules as compute_joules
from pliant.devices.links import LinkRates as LinkRates
from pliant.devices.named_classes import get_device_classes as get_device_classes
from pliant.devices.piecewise import PiecewiseConstant as PiecewiseConstant
from pliant.devices.recorded_traces import RecordedAvailability as RecordedAvailability
from pliant.devices.recorded_traces import RecordedTrace as RecordedTrace
from pliant.devices.synthetic_traces import ChangingTrace as ChangingTrace
from pliant.devices.synthetic_traces import ConstantTrace as ConstantTrace
from pliant.devices.synthetic_traces import OnOffWindows as OnOffWindows
from pliant.devices.synthetic_traces import SteppedTrace as SteppedTrace
from pliant.devices.traces import ProductTrace as ProductTrace
from pliant.devices.traces import Trace as Trace
