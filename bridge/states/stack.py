"""Find the shared values that a function changes, by tracking its value stack.

In `self.grid[TABLE[action]] = 1` the table is read; in `TABLE[action][0] = 1` it is changed. Both use the same
instructions. Only the position of a value on the stack distinguishes them.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator

__all__ = ["changed_by"]

# The names of instructions are those of Python 3.10 to 3.14: each version has some of them.
_CHANGES = frozenset(
    (
        *("append", "appendleft", "extend", "extendleft", "insert", "remove", "pop", "popleft", "popitem", "clear"),
        *("update", "setdefault", "add", "discard", "sort", "reverse", "fill", "put", "itemset", "resize", "rotate"),
        *("difference_update", "intersection_update"),
    )
)
"""Methods that change their object."""
_LOADS = frozenset(
    (
        *("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"),
        *("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"),
    )
)
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD"))
_CONTAINERS = {"STORE_SUBSCR": 2, "DELETE_SUBSCR": 2, "STORE_SLICE": 3, "STORE_ATTR": 1, "DELETE_ATTR": 1}
"""The stack depth of the object whose item or attribute is stored or deleted."""
_A_CLASS, _TYPE = "a class", "the function type"
"""The names of a class, and of `type`, on the stack. No name in code has a space."""
_CALLS = ("PRECALL", "CALL", "CALL_FUNCTION")
_ENDS = frozenset(
    (
        *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_ABSOLUTE"),
        *("JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"),
    )
)
"""Instructions after which the next one is reached only by a jump."""
_ONLY_TAKE = ("STORE_", "POP_", "DELETE_", "LIST_", "SET_", "MAP_", "DICT_", "RETURN", "JUMP_")
_LEAVE = frozenset(("NOP", "RESUME", "CACHE", "EXTENDED_ARG", "KW_NAMES", "MAKE_CELL", "COPY_FREE_VARS", "NOT_TAKEN"))


def changed_by(
    code: types.CodeType,
    shared: Callable[[str, str], bool],
    is_class: Callable[[str, str], bool],
    of_class: frozenset[str],
) -> Iterator[str]:
    """Yield the names of shared values that code changes: it assigns to an item or an attribute, or calls a method.

    Args:
        code: The code.
        shared: Called with an instruction and the name that it loads; returns True for a mutable shared value.
        is_class: As `shared`; returns True for a class.
        of_class: The names of mutable class attributes.
    """
    stack = _Stack()
    # The stack at the target of each jump, by the offset of the target.
    jumps: dict[int, _Stack] = {}
    reached = True
    for step in dis.get_instructions(code):
        jumped = jumps.pop(step.offset, None)
        if jumped is not None:
            stack = stack.joined(jumped) if reached else jumped
        elif not reached:  # such as an exception handler: it does not use the values already on the stack
            stack = _Stack()
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            away = _Stack(stack.names)
            away.do(step, jump=True)
            jumps[step.argval] = away.joined(jumps[step.argval]) if step.argval in jumps else away
        reached = step.opname not in _ENDS
        if step.opname in _ATTRIBUTES:
            # For `super()`, the object is on top of the stack.
            below = "" if "SUPER" in step.opname else stack.at(1)
            below = "" if below in (_A_CLASS, _TYPE) else below
            if below and step.argval in _CHANGES:
                yield below
            stack.do(step)
            name = step.argval if step.argval in of_class else below
            name = _A_CLASS if step.argval == "__class__" else name
            stack.name_top(name, 2 if _effect(step) == 1 else 1)
        elif step.opname in _LOADS:
            stack.do(step)
            name = step.argval if shared(step.opname, step.argval) else ""
            name = _A_CLASS if is_class(step.opname, step.argval) else name
            stack.name_top(_TYPE if step.argval == "type" else name, _effect(step))
        elif step.opname in _CALLS and step.arg == 1 and _TYPE in (stack.at(2), stack.at(3)):
            stack.do(step)
            stack.name_top(_A_CLASS, 1)
        else:
            changed = stack.at(_CONTAINERS.get(step.opname, 0))
            # An object with the name of a class attribute is often the environment's own, such as its space.
            if changed and not (changed in of_class and step.opname.endswith("_ATTR")):
                yield str(step.argval) if changed == _A_CLASS else changed
            stack.do(step)
            if step.opname.startswith("LOAD_FAST") and step.argval == "cls":
                stack.name_top(_A_CLASS, 1)


def _effect(step: dis.Instruction, *, jump: bool = False) -> int:
    """Return by how many values an instruction grows the stack."""
    return dis.stack_effect(step.opcode, step.arg, jump=jump)


class _Stack:
    """The value stack: for each value the name of the shared value that it is or is part of; "": none.

    Only the top is known; there may be more values below.

    Args:
        names: The names; the last one is on top.
    """

    def __init__(self, names: list[str] | None = None) -> None:
        self.names = list(names or ())

    def at(self, place: int) -> str:
        """Return the name at a depth: 1 is the top; 0 returns ""."""
        return self.names[-place] if 0 < place <= len(self.names) else ""

    def name_top(self, name: str, count: int) -> None:
        """Name the values on top."""
        self.names[len(self.names) - count :] = [name] * count

    def joined(self, other: _Stack) -> _Stack:
        """Return the merged stack where two paths meet."""
        known = min(len(self.names), len(other.names))
        return _Stack([self.at(place) or other.at(place) for place in range(known, 0, -1)])

    def do(self, step: dis.Instruction, *, jump: bool = False) -> None:
        """Apply an instruction to the stack."""
        names, effect = self.names, _effect(step, jump=jump)
        if not jump and self._move(step):
            return
        if effect > 0:
            names += [""] * effect
        elif effect < 0:
            del names[effect:]
        if effect > 0 or not names or step.opname in _LEAVE or step.opname.startswith(_ONLY_TAKE):
            return
        # The result replaces the values taken. An item, and a value changed in place, keep the name of their container.
        is_item = step.opname in ("BINARY_SUBSCR", "BINARY_SLICE") or step.argrepr == "[]"
        in_place = step.opname.startswith("INPLACE_") or (step.opname == "BINARY_OP" and step.argrepr.endswith("="))
        if not is_item and not in_place:
            names[-1] = ""

    def _move(self, step: dis.Instruction) -> bool:
        """Apply an instruction that only copies or moves values; return False for any other instruction."""
        name, count = step.opname, step.arg or 0
        rotated = {"ROT_TWO": 2, "ROT_THREE": 3, "ROT_FOUR": 4, "ROT_N": count}.get(name, 0)
        copied = {"DUP_TOP": 1, "COPY": count}.get(name, 0)
        deepest = max(rotated, copied, count if name == "SWAP" else 0, 2 if name == "DUP_TOP_TWO" else 0)
        if not deepest:
            return False
        names = self.names
        names[:0] = [""] * (deepest - len(names))
        if copied:
            names.append(names[-copied])
        elif rotated:
            names.insert(len(names) - rotated, names.pop())
        elif name == "SWAP":
            names[-1], names[-count] = names[-count], names[-1]
        else:
            names += names[-2:]
        return True
