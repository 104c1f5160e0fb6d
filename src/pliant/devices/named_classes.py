"""Device classes of published benchmarks, by name.

Every set has groups of equal size, each at the middle of its fifth of the distribution. Speed 1.0
is the median device. Speeds and links of FLHetBench are independent of each other.

FLHetBench: Zhang et al., "FLHetBench: Benchmarking device and state heterogeneity in federated
learning", CVPR 2024; repository Carkham/FLHetBench of June 2024. Speeds follow from the 978 ResNet
latencies of `data/training_latency.json`, links from the mean TCP throughput of the 100 clients of
`bench/cached_sample_data/device/case1.json` to `case4.json` (MobiPerf, in kbit/s), which the
benchmark uses in both directions.

FedScale: Lai et al., "FedScale: Benchmarking model and system performance of federated learning at
scale", ICML 2022; repository SymbioticLab/FedScale of December 2023. The time per sample is
log-normal with sigma 0.6 (`get_completion_time_lognormal` in `client_metadata.py`). There it is
drawn for every task; here a device keeps it. Links are not modelled.
"""

from collections.abc import Sequence
from itertools import product
from math import exp
from statistics import NormalDist

from pliant.devices.fleet import DeviceClass
from pliant.devices.synthetic_traces import ConstantTrace
from pliant.suggestions import did_you_mean

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
FLHETBENCH_MILLISECONDS = (69.0, 103.1, 172.0, 261.9, 475.6)  # fastest fifth first
FLHETBENCH_KBITS = {  # per second, slowest fifth first
    "flhetbench-1": (41642, 41727, 41842, 42126, 42358),
    "flhetbench-2": (36752, 39785, 41691, 44620, 48969),
    "flhetbench-3": (29975, 36918, 41341, 47986, 57899),
    "flhetbench-4": (8005, 27658, 40140, 58940, 87019),
}
FEDSCALE_SIGMA = 0.6
BYTES_PER_KBIT = 125.0


def get_device_classes(name: str) -> tuple[DeviceClass, ...]:
    """Return the device classes of a published benchmark.

    The names are `flhetbench-1` (nearly equal links) to `flhetbench-4` (very unequal ones) and
    `fedscale`.

    >>> import pliant as pl
    >>> fleet = pl.Fleet(size=100, classes=pl.get_device_classes("flhetbench-4"))
    >>> len(fleet.classes), fleet.classes[0].name, fleet.classes[0].up
    (25, 'speed 1, link 1', 1000625.0)
    """
    if name == "fedscale":
        quantiles = map(NormalDist().inv_cdf, QUANTILES)
        return _make_classes([exp(-FEDSCALE_SIGMA * quantile) for quantile in quantiles])
    if name not in FLHETBENCH_KBITS:
        known = (*FLHETBENCH_KBITS, "fedscale")
        raise LookupError(f"unknown device classes {name!r}{did_you_mean(name, known)}")
    median = FLHETBENCH_MILLISECONDS[len(QUANTILES) // 2]
    speeds = [median / milliseconds for milliseconds in FLHETBENCH_MILLISECONDS]
    return _make_classes(speeds, [BYTES_PER_KBIT * rate for rate in FLHETBENCH_KBITS[name]])


def _make_classes(
    speeds: Sequence[float], links: Sequence[float | None] = (None,)
) -> tuple[DeviceClass, ...]:
    """Return one class for each speed and link, numbered from 1."""
    pairs = product(enumerate(speeds, start=1), enumerate(links, start=1))
    return tuple(
        DeviceClass(
            f"speed {n}" if rate is None else f"speed {n}, link {m}",
            speed=ConstantTrace(speed),
            up=rate,
            down=rate,
        )
        for (n, speed), (m, rate) in pairs
    )
