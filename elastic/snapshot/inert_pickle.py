"""A pickle read as data: what it would build is described, and nothing of it is imported, called or built.

A pickle is a program for a small stack machine. Here its opcodes make plain containers and, in place of objects,
``Record``: the name of a class or function, the arguments and the state. An opcode that is not needed for data is
refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elastic.errors import CorruptSnapshot


@dataclass(frozen=True, slots=True)
class Symbol:
    """A global by its name; never looked up."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class Record:
    """What would be ``symbol(*arguments)`` with ``state`` given to it, and ``items`` put or appended."""

    symbol: Symbol
    arguments: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def get(self, name: str, default: Any = None) -> Any:
        """A field of the state, where that is a dict."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def __hash__(self) -> int:
        return id(self)


_MARK = object()


def read_pickle(data: bytes, where: str) -> Any:
    """What the pickle describes. Raises CorruptSnapshot for what is no pickle, or uses more than data needs."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.stack.pop()
            action = _ACTIONS.get(opcode.name)
            if action is None:
                raise ValueError(f"the opcode {opcode.name} is not read")
            action(machine, argument)
        raise ValueError("it has no end")
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, UnicodeError, OverflowError) as error:
        raise CorruptSnapshot(f"not a pickle of plain data: {type(error).__name__}: {error}", where) from error


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def to_mark(self) -> list[Any]:
        """Everything above the last mark, taken off with it."""
        at = next((i for i in reversed(range(len(self.stack))) if self.stack[i] is _MARK), -1)
        if at < 0:
            raise IndexError("there is no mark")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def take(self, count: int) -> tuple[Any, ...]:
        """The last ``count`` values, taken off."""
        if count > len(self.stack):
            raise IndexError("the stack is too short")
        items = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return items


def _push(machine: _Machine, value: Any) -> None:
    machine.stack.append(value)


def _call(machine: _Machine, _: Any) -> None:
    symbol, arguments = machine.take(2)
    if not isinstance(symbol, Symbol) or not isinstance(arguments, tuple):
        raise TypeError(f"a call of {type(symbol).__name__}")
    machine.stack.append(Record(symbol, arguments))


def _build(machine: _Machine, _: Any) -> None:
    target, state = machine.take(2)
    if not isinstance(target, Record):
        raise TypeError(f"state for {type(target).__name__}")
    target.state = state
    machine.stack.append(target)


def _set_items(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    pairs = list(zip(items[::2], items[1::2], strict=True))
    if isinstance(target, dict):
        target.update(pairs)
    else:
        target.items.extend(pairs)


def _append(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    (target if isinstance(target, list) else target.items).extend(items)


def _global(machine: _Machine, argument: str) -> None:
    module, _, name = argument.partition(" ")
    machine.stack.append(Symbol(module, name))


def _stack_global(machine: _Machine, _: Any) -> None:
    module, name = machine.take(2)
    machine.stack.append(Symbol(str(module), str(name)))


def _memoize(machine: _Machine, _: Any) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _put(machine: _Machine, at: int) -> None:
    machine.memo[int(at)] = machine.stack[-1]


Action = Callable[[_Machine, Any], None]
_ACTIONS: dict[str, Action] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "MARK": lambda machine, _: _push(machine, _MARK),
    "POP": lambda machine, _: machine.stack.__delitem__(-1),
    "NONE": lambda machine, _: _push(machine, None),
    "NEWTRUE": lambda machine, _: _push(machine, True),
    "NEWFALSE": lambda machine, _: _push(machine, False),
    "EMPTY_DICT": lambda machine, _: _push(machine, {}),
    "EMPTY_LIST": lambda machine, _: _push(machine, []),
    "EMPTY_TUPLE": lambda machine, _: _push(machine, ()),
    "TUPLE1": lambda machine, _: _push(machine, machine.take(1)),
    "TUPLE2": lambda machine, _: _push(machine, machine.take(2)),
    "TUPLE3": lambda machine, _: _push(machine, machine.take(3)),
    "TUPLE": lambda machine, _: _push(machine, tuple(machine.to_mark())),
    "SETITEM": lambda machine, _: _set_items(machine, list(machine.take(2))),
    "SETITEMS": lambda machine, _: _set_items(machine, machine.to_mark()),
    "APPEND": lambda machine, _: _append(machine, list(machine.take(1))),
    "APPENDS": lambda machine, _: _append(machine, machine.to_mark()),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _call,
    "NEWOBJ": _call,
    "BUILD": _build,
    "MEMOIZE": _memoize,
    "PUT": _put,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "GET": lambda machine, at: _push(machine, machine.memo[int(at)]),
    "BINGET": lambda machine, at: _push(machine, machine.memo[at]),
    "LONG_BINGET": lambda machine, at: _push(machine, machine.memo[at]),
    **dict.fromkeys(
        (
            *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
            *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES"),
        ),
        _push,
    ),
}
