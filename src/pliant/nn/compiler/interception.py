"""Operations that torch.fx would miss or freeze while it traces, and that need a node of their own.

A custom `torch.autograd.Function` has its own gradient, so it is one operation. Random numbers are
drawn at every pass, so a draw without traced arguments is an operation too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

RANDOM_FUNCTIONS: frozenset[Any] = frozenset(
    {
        torch.empty, torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like,
        torch.randn_like, torch.randint_like, torch.bernoulli, torch.normal, torch.poisson,
        torch.multinomial,
        Tensor.bernoulli, Tensor.bernoulli_, Tensor.normal_, Tensor.uniform_, Tensor.random_,
        Tensor.exponential_, Tensor.multinomial, Tensor.log_normal_, Tensor.cauchy_,
        Tensor.geometric_,
    }
)  # fmt: skip
CreateNode = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class InterceptRandomness(TorchFunctionMode):
    """Trace random draws, and refuse to write traced values into ordinary tensors."""

    def __init__(self, create: CreateNode, refuse: Callable[[], Any], kind: type) -> None:
        super().__init__()
        self._create, self._refuse, self._kind = create, refuse, kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in RANDOM_FUNCTIONS and not holds(self._kind, (args, kwargs)):
            return self._create(func, args, kwargs)
        if func is Tensor.__setitem__ and holds(self._kind, args):
            return self._refuse()
        return func(*args, **kwargs)


@contextmanager
def intercept_functions(create: CreateNode, kind: type) -> Iterator[None]:
    """Make a node of each custom autograd function that is applied to traced values.

    Re-entrant checkpointing is such a function; what it runs is traced as if it were not there.
    """
    original = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not holds(kind, (args, kwargs)):
            return original.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:
            function, _, *inputs = args
            return function(*inputs)
        return create(_find_operation(cls), args, kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]


_operations: dict[Any, Callable[..., Any]] = {}


def _find_operation(cls: Any) -> Callable[..., Any]:
    """Return the function that applies a custom autograd function, the same for every trace."""
    if cls not in _operations:

        def operation(*args: Any, **kwargs: Any) -> Any:
            return cls.apply(*args, **kwargs)

        operation.__name__ = operation.__qualname__ = cls.__name__
        operation.__module__ = cls.__module__
        _operations[cls] = operation
    return _operations[cls]


def holds(kind: type, structure: Any) -> bool:
    return any(isinstance(leaf, kind) for leaf in tree_leaves(structure))
