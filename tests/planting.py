"""Planted mistakes: a copy of a module in which some of its source is exchanged."""

import inspect
import types


def plant(module: types.ModuleType, *edits: tuple) -> types.ModuleType:
    """Copy a module with each (fragment, replacement[, how often it occurs]) exchanged.

    Raises:
        LookupError: a fragment does not occur so often: a control on old source controls nothing.
    """
    name = module.__name__.rpartition(".")[2]
    source = inspect.getsource(module)
    for fragment, replacement, *count in edits:
        found, expected = source.count(fragment), *(count or [1])
        if found != expected:
            raise LookupError(f"{fragment!r} occurs {found} times in {name}.py, not {expected}")
        source = source.replace(fragment, replacement)
    copy = types.ModuleType(f"planted_{name}")
    exec(compile(source, f"planted {name}.py", "exec"), copy.__dict__)
    return copy
