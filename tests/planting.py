"""Planted mistakes: the rows of a table, and copies of modules with part of the source exchanged.

The tables are in planted/, one for each file of properties, and test_planted.py runs them all.

A row quotes the source that it exchanges. A refactoring may rewrite that source and break nothing,
so the tests skip a row that doesn't find its quotation. `make mutants` names these rows and fails:
until somebody quotes the new source, they control nothing.
"""

import contextlib
import functools
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest


class Mistake(NamedTuple):
    """A mistake, as edits of the source, and the property that it breaks.

    An edit is a fragment, its replacement and how often it occurs (once, if that is left out). No
    edits at all: the package itself lacks the property there, and the check must be able to say so.
    """

    title: str
    has_property: Callable
    arguments: tuple
    edits: Sequence[tuple]
    room: types.ModuleType | None

    def asked(self) -> str:
        return asked(self.has_property, *self.arguments)


def mistakes(rows: Sequence[tuple], room: types.ModuleType | None = None) -> list[Mistake]:
    """The mistakes in rows: a property, its arguments after the module, and a dict of mistakes
    that break it, each with a title and its edits.

    All edits are made in `room`; if it is None, each in the one room that has its fragment.
    """
    return [
        Mistake(title, has_property, tuple(arguments), edits, room)
        for has_property, *arguments, planted_here in rows
        for title, edits in planted_here.items()
    ]


def asked(has_property: Callable, *arguments) -> str:
    """A property and its arguments, in words."""
    name = getattr(has_property, "func", has_property).__name__
    name += str(getattr(has_property, "keywords", ""))
    return ", ".join(
        [name, *(", ".join(map(str, a)) if isinstance(a, tuple) else str(a) for a in arguments)]
    )


class Stale(pytest.skip.Exception):
    """The source that a row quotes is no longer there: pytest skips the test."""


def edited(source: str, fragment: str, replacement: str, count: int = 1) -> str:
    """The source of a module with a fragment exchanged; `Stale` if it occurs less or more often."""
    if source.count(fragment) != count:
        raise Stale(f"{fragment!r} occurs {source.count(fragment)} times, not {count}")
    return source.replace(fragment, replacement)


def edited_sources(
    rooms: Sequence[types.ModuleType], edits: Sequence[tuple], room: types.ModuleType | None = None
) -> dict[types.ModuleType, str]:
    """The new sources of the rooms that have the edits' fragments, or of the room that is given."""
    sources = {one: inspect.getsource(one) for one in rooms}
    changed = {}
    for fragment, *others in edits:
        fitting = [room] if room else [one for one in rooms if fragment in sources[one]]
        if len(fitting) != 1 and len(rooms) > 1:
            raise Stale(f"{fragment!r} occurs in {len(fitting)} rooms, not in one")
        one = fitting[0] if fitting else rooms[0]
        sources[one] = changed[one] = edited(sources[one], fragment, *others)
    return changed


def stale(mistake: Mistake, rooms: Sequence[types.ModuleType]) -> str:
    """Why a mistake can no longer be planted; empty if it can."""
    try:
        edited_sources(rooms, mistake.edits, mistake.room)
    except Stale as reason:
        return str(reason)
    return ""


def planted(
    rooms: Sequence[types.ModuleType], edits: Sequence[tuple] = (), room=None
) -> types.ModuleType:
    """A copy of the last of some rooms, which are given in the order of their imports.

    The first edited room and all rooms after it are copied, and each copy imports the copies before
    it. The result has them by name, as its attribute `copied`.
    """
    changed = edited_sources(rooms, edits, room)
    first = min((rooms.index(one) for one in changed), default=len(rooms) - 1)
    copied, exchanged = {}, {}
    for original in rooms[first:]:
        with _imported(copied):  # what a table holds was taken from a room while it was imported
            copy = _copy(original, changed.get(original) or inspect.getsource(original))
        for name, value in list(vars(copy).items()):
            setattr(copy, name, exchanged.get((name, id(value)), value))
        exchanged |= {
            (name, id(value)): getattr(copy, name, value)
            for name, value in vars(original).items()
            if not name.startswith("__")
        }
        exchanged[_name(original), id(original)] = copied[original.__name__] = copy
    copy.copied = {_name(one): copied[one.__name__] for one in rooms[first:]}
    return copy


@contextlib.contextmanager
def _imported(copied):
    """Let `from cheems_ref.room import name` take from copies, given by the modules' names."""
    before = {name: sys.modules[name] for name in copied if name in sys.modules}
    sys.modules.update({name: copied[name] for name in before})
    try:
        yield
    finally:
        sys.modules.update(before)


def plant(module: types.ModuleType, *edits: tuple) -> types.ModuleType:
    """A copy of one module with each fragment exchanged."""
    source = inspect.getsource(module)
    for edit in edits:
        source = edited(source, *edit)
    return _copy(module, source)


def _copy(module, source):
    copy = types.ModuleType(f"planted_{_name(module)}")
    exec(_compiled(_name(module), source), copy.__dict__)
    return copy


@functools.lru_cache(maxsize=64)  # of a stack of rooms all but one are copied as they are
def _compiled(name, source):
    file = f"planted {name} {hash(source)}.py"
    linecache.cache[file] = len(source), None, source.splitlines(True), file  # Triton reads it
    return compile(source, file, "exec")


def _name(module):
    return module.__name__.rpartition(".")[2]
