"""A cache of function results that lives as long as the network they belong to."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from pliant.nn.elastic import Elastic

MAX_RESULTS = 256  # per network and function
P = ParamSpec("P")
T = TypeVar("T")


def cache_on_net(
    function: Callable[Concatenate[Elastic, P], T],
) -> Callable[Concatenate[Elastic, P], T]:
    """Cache a function's results on the network that it is called with, not beyond its life."""

    @wraps(function)
    def cached(net: Elastic, /, *args: P.args, **kwargs: P.kwargs) -> T:
        results, key = net.caches[function], (args, *kwargs.items())
        result: T | None = results.get(key)
        if result is None:
            if len(results) >= MAX_RESULTS:
                results.clear()
            result = results[key] = function(net, *args, **kwargs)
        return result

    return cached
