"""Describe all that an elastic network depends on, to compile and check it once per process.

The description follows attributes, the code of functions, and the closures and globals that they
read. Whatever it does not understand (an open file, a random generator, a numpy function) makes it
give up, and the network is checked again. Values of parameters are left out, as training changes
them and not what is compared: it matters only whether all entries are equal, as zeros hide errors.
"""

import dis
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from functools import lru_cache, partial
from hashlib import sha256
from math import isfinite
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    EllipsisType,
    FunctionType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_module

from pliant.nn.compiler.compile import CompiledNetwork

CheckKey = tuple[Hashable, ...]
MAX_PASSED = 64
# with the compiled network, if others may share it; latest last
PASSED: OrderedDict[CheckKey | None, CompiledNetwork | None] = OrderedDict()
_ATOMS = {
    int, float, complex, bool, str, bytes, range, slice, NoneType, EllipsisType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
}  # fmt: skip
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
# what these packages contain stays the same while a process runs
_FIXED_PACKAGES = {
    "torch", "builtins", "math", "operator", "functools", "itertools", "collections", "typing",
    "types", "abc", "enum", "dataclasses", "contextlib",
}  # fmt: skip
_OPEN_BUILTINS = {"open", "input", "eval", "exec", "globals", "__import__"}
# of a class: what a forward pass does not run or read
_UNUSED_NAMES = {
    "__init__", "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__",
    "__annotations__", "__static_attributes__", "__firstlineno__", "__parameters__",
}  # fmt: skip
_GLOBAL_HOOKS = [name for name in vars(torch_module) if name.startswith("_global_")]


def make_check_key(
    net: nn.Module, inputs: Sequence[Tensor], *, coupled: bool, hidden: bool
) -> CheckKey | None:
    """Return a key that differs if a check could end differently; None if that is not certain."""
    walk = _Walk()
    try:
        walk.add([coupled, hidden, torch.get_default_dtype()])
        walk.add([torch.is_autocast_enabled(device) for device in ("cpu", "cuda")])
        walk.add([getattr(torch_module, name) for name in _GLOBAL_HOOKS])
        for tensor in inputs:
            walk.add_tensor(tensor, is_free=tensor.is_floating_point())
        walk.add(net)
    except (_NotUnderstood, RecursionError):
        return None
    return tuple(walk.parts)


def has_passed(key: CheckKey | None) -> bool:
    """Return whether a network of this key has passed its check in this process."""
    if key not in PASSED:
        return False
    PASSED.move_to_end(key)
    return True


def remember_pass(key: CheckKey | None, compiled: CompiledNetwork | None) -> None:
    """Remember that the networks of this key pass, and forget the one not used for longest."""
    if key is not None:
        PASSED[key] = compiled
        if len(PASSED) > MAX_PASSED:
            PASSED.popitem(last=False)


class _NotUnderstood(Exception):
    """An object whose behaviour may depend on more than is described."""


class _Walk:
    """A walk through all objects that a network reaches, as a flat list of what they are."""

    def __init__(self) -> None:
        self.parts: list[Hashable] = []
        self._seen: dict[int, tuple[int, Any]] = {}  # with the object, as ids are used again

    def add(self, value: Any) -> None:
        kind = type(value)
        if kind in _ATOMS:
            self.parts.append((kind, repr(value)))  # 1, 1.0 and True are equal
        elif id(value) in self._seen:
            self.parts.append(("again", self._seen[id(value)][0]))
        else:
            self._seen[id(value)] = len(self._seen), value
            self._add_object(kind, value)

    def _add_object(self, kind: type, value: Any) -> None:
        if kind in (Tensor, nn.Parameter):
            self.add_tensor(value, is_free=kind is nn.Parameter)
        elif kind in (dict, OrderedDict):
            self._add_all(kind, *value.keys(), *value.values())
        elif kind in (list, tuple, deque):
            self._add_all(kind, *value)
        elif kind in (set, frozenset) and {type(item) for item in value} <= _ATOMS:
            self._add_all(kind, *sorted(value, key=repr))
        elif kind is FunctionType:
            self._add_function(value)
        elif kind is MethodType:
            self._add_all(kind, value.__func__, value.__self__)
        elif kind is partial:
            self._add_all(kind, value.func, value.args, value.keywords)
        elif kind in (staticmethod, classmethod):
            self._add_all(kind, value.__func__)
        elif kind is property:
            self._add_all(kind, value.fget, value.fset, value.fdel)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, ModuleType | BuiltinFunctionType):
            self._add_fixed(value)
        else:
            self._add_instance(kind, value)

    def _add_all(self, kind: type, *items: Any) -> None:
        self.parts.append((kind, len(items)))
        for item in items:
            self.add(item)

    def add_tensor(self, tensor: Tensor, *, is_free: bool) -> None:
        """Add a tensor; with `is_free`, its entries only if all are equal."""
        if tensor.layout != torch.strided:
            raise _NotUnderstood
        form = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        self.parts.append((Tensor, *form, tensor.requires_grad))
        tensor = tensor.detach()
        if tensor.is_meta or not tensor.numel():
            return
        if is_free and tensor.dtype in _FLOATS:
            low, high = (float(bound) for bound in tensor.aminmax())
            if not isfinite(low + high):  # not all of it is checked
                raise _NotUnderstood
            self.parts.append(low if low == high else None)
        else:
            entries = tensor.cpu().resolve_conj().resolve_neg().contiguous()
            entries = entries.flatten().view(torch.uint8)
            self.parts.append(sha256(entries.numpy().tobytes()).digest())

    def _add_function(self, function: FunctionType) -> None:
        names = function.__globals__
        if _is_fixed_name(names.get("__name__", "")):  # `__module__` may be copied by a decorator
            self.parts.append(function)
            return
        self.parts.append(function.__code__)
        self._add_all(tuple, function.__defaults__, function.__kwdefaults__, vars(function))
        for cell in function.__closure__ or ():
            self._add_cell(cell)
        for name in _list_globals(function.__code__):
            if name in names:
                self.add(names[name])
            elif name in _OPEN_BUILTINS:
                raise _NotUnderstood

    def _add_cell(self, cell: CellType) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # still empty
            self.parts.append(CellType)
        else:
            self.add(content)

    def _add_class(self, cls: type) -> None:
        if _is_fixed_name(cls.__module__):
            self.parts.append(cls)
            return
        members = {name: item for name, item in vars(cls).items() if name not in _UNUSED_NAMES}
        self._add_all(type, cls.__name__, type(cls), cls.__bases__, members)

    def _add_instance(self, kind: type, value: Any) -> None:
        """Add an object whose whole state is in its attributes."""
        for base in kind.__mro__:
            is_plain = base is object or issubclass(base, nn.Module)
            if _is_fixed_name(base.__module__) and not is_plain:
                raise _NotUnderstood
        attributes = vars(value) if hasattr(value, "__dict__") else None
        if isinstance(value, fx.GraphModule):  # has a class of its own, and code made from a graph
            attributes = {name: item for name, item in vars(value).items() if name != "_graph"}
            self._add_all(object, *kind.__bases__, type(value).forward, attributes)
        else:
            self._add_all(object, kind, attributes)

    def _add_fixed(self, value: Any) -> None:
        owner = value if isinstance(value, ModuleType) else value.__self__
        if isinstance(owner, ModuleType):
            name = owner.__name__
        elif owner is None or isinstance(owner, type):
            name = (owner or value).__module__ or ""
        else:  # a method of an object
            raise _NotUnderstood
        if not _is_fixed_name(name):
            raise _NotUnderstood
        self.parts.append(value)


def _is_fixed_name(name: str) -> bool:
    return name.partition(".")[0] in _FIXED_PACKAGES


@lru_cache(maxsize=1024)
def _list_globals(code: CodeType) -> tuple[str, ...]:
    """Return the names that a function and those in it read from their module."""
    names: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            names["__import__"] = None
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names[instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(dict.fromkeys(_list_globals(constant)))
    return tuple(names)
