"""Read from a function's instructions what it uses: globals, modules, attributes, and what it changes."""

from __future__ import annotations

import contextlib
import dis
import importlib.util
import random
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium.utils import seeding

from bridge.states.fields import is_trusted
from bridge.states.stack import changed_by

__all__ = ["CodeUses", "is_data", "is_fixed"]

# The names of instructions are those of Python 3.10 to 3.14: each version has some of them.
_GLOBALS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_BUILD_CLASS"))
_CELLS = frozenset(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"))
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD"))
_NOTHING = frozenset(("PRECALL", "CACHE", "PUSH_NULL", "EXTENDED_ARG", "NOP", "RESUME", "KW_NAMES"))
_CALLS = frozenset(("CALL", "CALL_FUNCTION", "CALL_METHOD", "CALL_KW", "CALL_FUNCTION_KW", "PRECALL"))
_STORES = frozenset(("STORE_GLOBAL", "DELETE_GLOBAL"))
_IMPORTS = (("IMPORT_NAME", "random"), ("IMPORT_NAME", "numpy.random"), ("IMPORT_FROM", "random"))
_SEEDED = (
    seeding.np_random,
    np.random.default_rng,
    np.random.SeedSequence,
    np.random.RandomState,
    np.random.BitGenerator,
    random.Random,
    np.random.PCG64,
    np.random.MT19937,
)
"""Callables that take a seed from the system if they get none."""
_BUILTINS = ("globals", "exec", "eval", "id", "__import__")


def is_data(value: Any) -> bool:
    """True if a value is not a function, class, module or descriptor, so that it may hold mutable data."""
    kinds = types.FunctionType, types.ModuleType, type, types.BuiltinFunctionType, property, classmethod, staticmethod
    if isinstance(value, kinds):
        return False
    # A user-defined descriptor may hold data.
    return not hasattr(value, "__get__") or not is_trusted(type(value).__module__)


def is_fixed(value: Any) -> bool:
    """True if a value is immutable."""
    return isinstance(
        value, (int, float, complex, str, bytes, bool, type(None), tuple, frozenset, np.generic, np.dtype)
    )


def _is_none(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_CONST" and step.argval is None


class CodeUses:
    """Finds what code uses.

    Args:
        code: The code.
        names: The globals of its module.
        closure: The closure variables of its function, by name.
        of_class: The names of mutable class attributes.
        modules: The modules in local variables, by name; the scan adds to them.
    """

    def __init__(
        self,
        code: types.CodeType,
        names: Mapping[str, Any],
        closure: Mapping[str, Any],
        of_class: frozenset[str],
        modules: dict[str, Any],
    ) -> None:
        self._code = code
        self._steps = [step for step in dis.get_instructions(code) if step.opname not in _NOTHING]
        self._names, self._closure, self._of_class, self._modules = names, closure, of_class, modules
        self._module: Any = None
        """The module that the previous instruction loaded, or its attribute; None: it loaded something else."""
        self._called: Any = None
        """The function or class that was loaded last."""
        self._source: Any = None
        """The module of the current `from` import."""
        self._bound: Any = None
        """The module that the next store assigns to a variable."""

    def found(self) -> Iterator[tuple[str, Any]]:
        """Yield what the code uses.

        Returns:
            Pairs of a kind and a value: `value`: a function or class from a global or closure name; `attribute`: a
            module and the name of an attribute read from it; `data`: the name of a global; `method`: the name of an
            attribute of any object; `chain`: the names of an attribute and of an attribute of it; `by name`: None, for
            attributes with computed names; `stores`: the name of an assigned global; `changes`: the name of a changed
            value of a class or module; `module`: a module that is used as a value; `missing`: the name of a module
            that is not loaded; `hash`: None; `unseeded`: the name of a function that makes a generator, called without
            a seed; `refused`: what an environment with states may not use.
        """
        for name in changed_by(self._code, self._may_change, self._is_class, self._of_class):
            yield "changes", name
        for number, step in enumerate(self._steps):
            if step.opname in _ATTRIBUTES:
                yield from self._read_attribute(step.argval, number)
            elif step.opname in ("IMPORT_NAME", "IMPORT_FROM"):
                yield from self._import(step, number)
            else:
                if step.opname in _CALLS and any(self._called is one for one in _SEEDED) and self._gives_none(number):
                    yield "unseeded", self._called.__name__
                yield from self._store(step)
                self._module = None
                if not _is_none(step):
                    self._called = None
                yield from self._load(step, number)

    def _may_change(self, opname: str, name: str) -> bool:
        """True if an instruction loads a mutable shared value by this name."""
        value = self._loaded(opname, name)
        return is_data(value) and not is_fixed(value)

    def _is_class(self, opname: str, name: str) -> bool:
        return isinstance(self._loaded(opname, name), type)

    def _loaded(self, opname: str, name: str) -> Any:
        """Return the value that an instruction loads from the globals or the closure; None: it is not known."""
        return (self._names if opname in _GLOBALS else self._closure).get(name)

    def _read_attribute(self, name: str, number: int) -> Iterator[tuple[str, Any]]:
        if isinstance(self._module, types.ModuleType):
            owner, self._module = self._module, getattr(self._module, name, None)
            self._called = self._module
            if name == "__dict__":
                yield "refused", f"what the module {owner.__name__} holds, by names that its code makes"
            elif not isinstance(self._module, types.ModuleType):
                yield "attribute", (owner, name)
        else:
            self._module = None
            yield "method", name
            if number and self._steps[number - 1].opname in _ATTRIBUTES:
                yield "chain", (self._steps[number - 1].argval, name)
            if name == "__dict__":
                yield "by name", None

    def _import(self, step: dis.Instruction, number: int) -> Iterator[tuple[str, Any]]:
        if (step.opname, step.argval) in _IMPORTS:
            yield "value", random
        if step.opname == "IMPORT_NAME":
            self._source, self._bound, missing = self._imported(number)
            if missing:
                yield "missing", missing
        else:
            name, source = step.argval, self._source
            self._bound = getattr(source, name, None) if source is not None else None
            if self._bound is not None and not isinstance(self._bound, types.ModuleType):
                yield "attribute", (source, name)
        self._module = None

    def _store(self, step: dis.Instruction) -> Iterator[tuple[str, Any]]:
        """Yield how an instruction uses the module or shared value that was loaded before it."""
        if step.opname.startswith(("STORE_FAST", "STORE_DEREF", "STORE_NAME")):
            variable = step.argval[0] if isinstance(step.argval, tuple) else step.argval
            becomes = self._bound if self._bound is not None else self._module
            if isinstance(becomes, types.ModuleType) and becomes is not random and becomes is not np.random:
                self._modules[variable] = becomes
                self._module = None
            self._bound = None
        if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            yield "method", step.argval
            if isinstance(self._module, types.ModuleType):
                yield "stores", f"{self._module.__name__}.{step.argval}"
                self._module = None
        # The module is used as a value, which is not followed further.
        if isinstance(self._module, types.ModuleType):
            is_shared = self._module is random or self._module is np.random
            yield ("value", random) if is_shared else ("module", self._module)

    def _load(self, step: dis.Instruction, number: int) -> Iterator[tuple[str, Any]]:
        """Yield what an instruction loads by a name, or stores under a shared name."""
        names, closure = self._names, self._closure
        local = step.argval[-1] if isinstance(step.argval, tuple) and step.argval else step.argval
        if step.opname in _GLOBALS or (step.opname in _CELLS and step.argval in closure):
            known = names if step.opname in _GLOBALS else closure
            module = self._module = self._called = known.get(step.argval)
            if step.argval not in known:
                yield from self._builtin(step.argval, number)
            elif not isinstance(module, types.ModuleType):
                yield ("data", step.argval) if is_data(module) and known is names else ("value", module)
        elif step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and local in self._modules:
            self._module = self._called = self._modules[local]
        elif step.opname in _STORES or (step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in closure):
            yield "stores", step.argval

    def _builtin(self, name: str, number: int) -> Iterator[tuple[str, Any]]:
        if name in _BUILTINS:
            yield "refused", f"{name}(), by which it reaches what no copy has"
        elif name == "hash":
            yield "hash", None
        elif name in ("setattr", "delattr"):
            if of := self._shared_at(number + 1):
                yield "stores", f"attributes of {of}"
        elif name == "vars":
            of = self._module_at(number + 1)
            if of is not None:
                yield "refused", f"what the module {of.__name__} holds, by names that its code makes"
            yield "by name", None
        elif name == "getattr":
            fixed, of = self._fixed_name(number), self._module_at(number + 1)
            if of is None:
                yield ("by name", None) if fixed is None else ("method", fixed)
            elif fixed is None:
                yield "refused", f"getattr() of the module {of.__name__}, by a name that its code makes"
            elif isinstance(getattr(of, fixed, None), types.ModuleType):
                part = getattr(of, fixed)
                yield ("value", random) if part is np.random else ("module", part)
            else:
                yield "attribute", (of, fixed)

    def _module_at(self, number: int) -> Any:
        """Return the module that an instruction loads; None: it loads no module, or only to read an attribute."""
        if number + 1 >= len(self._steps) or self._steps[number + 1].opname in _ATTRIBUTES:
            return None
        step = self._steps[number]
        known = self._names if step.opname in _GLOBALS else self._modules
        found = known.get(step.argval) if isinstance(step.argval, str) else None
        return found if isinstance(found, types.ModuleType) else None

    def _shared_at(self, number: int) -> str:
        """Return the name of the module or class that the instructions at a place load; "": another value."""
        if number >= len(self._steps):
            return ""
        step, rest = self._steps[number], self._steps[number + 1 :]
        if step.opname in _GLOBALS and step.argval == "type":
            return "its class"
        found = self._loaded(step.opname, step.argval) if isinstance(step.argval, str) else None
        found = self._modules.get(step.argval) if found is None and isinstance(step.argval, str) else found
        for each in rest:
            if each.opname not in _ATTRIBUTES:
                break
            if each.argval == "__class__":
                return "its class"
            found = getattr(found, each.argval, None) if isinstance(found, types.ModuleType) else None
        return found.__name__ if isinstance(found, (type, types.ModuleType)) else ""

    def _gives_none(self, number: int) -> bool:
        """True if a call has no argument, or only None."""
        if self._steps[number].argval == 0:
            return True
        before = [step for step in self._steps[max(0, number - 2) : number] if not isinstance(step.argval, tuple)]
        return self._steps[number].argval == 1 and bool(before) and _is_none(before[-1])

    def _fixed_name(self, number: int) -> str | None:
        """Return the constant name that `getattr` is called with; None: the name is computed."""
        following = self._steps[number + 1 :]
        # Skip the object: a variable, and attributes of it.
        place = 1
        if not following or not following[0].opname.startswith("LOAD_") or isinstance(following[0].argval, tuple):
            return None
        if following[0].opname == "LOAD_CONST":  # `getattr` is passed to a function, which calls it
            return None
        while place < len(following) and following[place].opname in _ATTRIBUTES:
            place += 1
        if place >= len(following) or following[place].opname != "LOAD_CONST":
            return None
        name = following[place].argval
        for step in following[place + 1 :]:
            if step.opname in _CALLS and step.argval in (2, 3):
                return name if isinstance(name, str) else None
            if not step.opname.startswith(("LOAD_", "BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP", "UNARY_")):
                return None
        return None

    def _imported(self, number: int) -> tuple[Any, Any, str]:
        """Return the imported module, the module assigned to the variable, and the name of a missing module."""
        step = self._steps[number]
        level, chosen = self._steps[number - 2].argval, self._steps[number - 1].argval
        name = str(step.argval)
        if isinstance(level, int) and level > 0:
            package = self._names.get("__package__") or str(self._names.get("__name__", "")).rpartition(".")[0]
            name = f"{package.rsplit('.', level - 1)[0] if level > 1 else package}.{name}".rstrip(".")
        whole, top = sys.modules.get(name), sys.modules.get(name.partition(".")[0])
        missing = ""
        if whole is None and not is_trusted(name):
            with contextlib.suppress(ImportError, ValueError):
                missing = name if importlib.util.find_spec(name.partition(".")[0]) is not None else ""
        # `import a.b` assigns `a`; `from a import b` lists its names.
        return (whole if chosen else top), (None if chosen else top), missing
