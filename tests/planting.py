"""Planted mistakes: what a row says, and copies of rooms in which some of the source is exchanged.

The tables are in planted/, one for each file of properties, and test_planted.py runs them all.
"""

import ast
import contextlib
import functools
import inspect
import keyword
import linecache
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import NamedTuple

NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*\b(?!=[^=])")  # not of attributes and arguments


class Mistake(NamedTuple):
    """A mistake, as edits of the source, and the property that it breaks.

    An edit is a fragment, its replacement and how often it occurs (once, if that is left out).
    Local variables may have other names in the source. No edits at all: the package itself lacks
    the property there, and the check must be able to say so.
    """

    title: str
    has_property: Callable
    arguments: tuple
    edits: Sequence[tuple]
    room: types.ModuleType | None

    def asked(self) -> str:
        return asked(self.has_property, *self.arguments)


def mistakes(rows: Sequence[tuple], room: types.ModuleType | None = None) -> list[Mistake]:
    """The mistakes in rows: a property, what it is asked of beside the module, and a dict of
    mistakes that break it there: what each is, and its edits.

    All edits are made in `room`; if it is None, each in the one room that has its fragment.
    """
    return [
        Mistake(title, has_property, tuple(arguments), edits, room)
        for has_property, *arguments, planted_here in rows
        for title, edits in planted_here.items()
    ]


def detached(*places: str) -> dict[str, list[tuple]]:
    """Mistakes of `mistakes`, one for each place, which detach what stands before each ¦ of it."""
    planted = [(place.replace("¦", ""), place.replace("¦", ".detach()")) for place in places]
    return {" ".join(wrong.split()): [(right, wrong)] for right, wrong in planted}


def asked(has_property: Callable, *arguments) -> str:
    """A property and what it is asked of, in words."""
    name = getattr(has_property, "func", has_property).__name__
    name += str(getattr(has_property, "keywords", ""))
    return ", ".join(
        [name, *(", ".join(map(str, a)) if isinstance(a, tuple) else str(a) for a in arguments)]
    )


def planted(
    rooms: Sequence[types.ModuleType], edits: Sequence[tuple] = (), room=None
) -> types.ModuleType:
    """A copy of the last of some rooms, given in the order in which they import one another.

    Those from the first that is edited on are copied, and each copy sees the copies before it; they
    are the `copied` of the result, by their names.
    """
    edits_in = {one: [] for one in rooms}
    for edit in edits:
        edits_in[room or _room_of(edit[0], rooms)].append(edit)
    first = min((i for i, one in enumerate(rooms) if edits_in[one]), default=len(rooms) - 1)
    copied, exchanged = {}, {}
    for original in rooms[first:]:
        with _imported(copied):  # what a table holds was taken from a room while it was imported
            copy = plant(original, *edits_in[original])
        for name, value in list(vars(copy).items()):
            setattr(copy, name, exchanged.get((name, id(value)), value))
        exchanged |= {
            (name, id(value)): getattr(copy, name, value)
            for name, value in vars(original).items()
            if not name.startswith("__")
        }
        exchanged[_name(original), id(original)] = copied[_name(original)] = copy
    copy.copied = copied
    return copy


@contextlib.contextmanager
def _imported(copied):
    """Let `from cheems_ref.room import name` take from copies."""
    names = {f"cheems_ref.{name}": copy for name, copy in copied.items()}
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update({name: names[name] for name in before})
    try:
        yield
    finally:
        sys.modules.update(before)


def _room_of(fragment, rooms):
    if len(rooms) == 1:  # where an edit may also be one of what an edit before it has written
        return rooms[0]
    fitting = [one for one in rooms if fragment in inspect.getsource(one)]
    fitting = fitting or [one for one in rooms if places(inspect.getsource(one), fragment)]
    if len(fitting) != 1:
        raise LookupError(f"{fragment!r} occurs in {len(fitting)} rooms, not in one")
    return fitting[0]


def plant(module: types.ModuleType, *edits: tuple) -> types.ModuleType:
    """A copy of one module with each fragment exchanged.

    Raises:
        LookupError: a fragment does not occur so often: a control on old source controls nothing.
    """
    source = inspect.getsource(module)
    for edit in edits:
        source = edited(source, *edit)
    copy = types.ModuleType(f"planted_{_name(module)}")
    exec(_compiled(_name(module), source), copy.__dict__)
    return copy


def edited(source: str, fragment: str, replacement: str, count: int = 1) -> str:
    """The source of a module with a fragment exchanged, in the names that the source uses."""
    found = [(m.start(), m.end(), {}) for m in re.finditer(re.escape(fragment), source)]
    if len(found) != count:
        found = places(source, fragment) or found
    if len(found) != count:
        raise LookupError(f"{fragment!r} occurs {len(found)} times, not {count}")
    for start, end, names in reversed(found):
        written = NAME.sub(lambda name, names=names: names.get(name[0], name[0]), replacement)
        source = source[:start] + written + source[end:]
    return source


def places(source: str, fragment: str) -> list[tuple[int, int, dict[str, str]]]:
    """Where a fragment occurs in functions if their local variables may have other names.

    Each place has its start and end, and what the variables of the fragment are called there.
    """
    pattern, end, seen = "", 0, []
    for name in NAME.finditer(fragment):
        pattern += re.escape(fragment[end : name.start()])
        if keyword.iskeyword(name[0]):
            pattern += name[0]
        elif name[0] in seen:
            pattern += rf"(?P=n{seen.index(name[0])})\b"
        else:
            pattern += rf"(?P<n{len(seen)}>\b[A-Za-z_]\w*)"
            seen.append(name[0])
        end = name.end()
    pattern = re.compile(pattern + re.escape(fragment[end:]))
    found = []
    for start, stop, own in functions(source):
        for match in pattern.finditer(source, start, stop):
            names = dict(zip(seen, match.groups(), strict=True))
            renamed = {old: new for old, new in names.items() if old != new}
            if own >= {*renamed.values()} and not own & {*renamed} - {*names.values()}:
                found.append((*match.span(), renamed))
    return found


@functools.lru_cache(maxsize=64)
def functions(source):
    """Start, end and local variables of every function that is in no other function."""
    starts = [0, *(m.end() for m in re.finditer("\n", source))]
    tree = ast.parse(source)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    return [
        (starts[node.lineno - 1], starts[node.end_lineno], _stored(node))
        for body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef)
    ]


def _stored(function):
    """The names that a function gives to its variables."""
    return {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


@functools.lru_cache(maxsize=64)  # of a stack of rooms all but one are copied as they are
def _compiled(name, source):
    file = f"planted {name} {hash(source)}.py"
    linecache.cache[file] = len(source), None, source.splitlines(True), file  # Triton reads it
    return compile(source, file, "exec")


def _name(module):
    return module.__name__.rpartition(".")[2]
