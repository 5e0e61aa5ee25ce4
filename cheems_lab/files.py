"""Files of a run: JSON that is written completely or not at all, and what may be removed.

Nothing is written through a symbolic link. Nothing is removed for its name alone.
"""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

NAME = re.compile(r"[^/\\\0-\x1f]+")


def write_text(path: Path, text: str) -> None:
    """Replace a file by a text, completely or not at all, and wait until it is on the disk.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open_text(partial, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise with_name(error, path) from None


def append_text(path: Path, text: str) -> None:
    """Append a text to a file.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    try:
        with open_text(path, "a") as file:
            file.write(text)
    except OSError as error:
        raise with_name(error, path) from None


def write_json(path: Path, data: Any) -> None:
    """Replace a file by data as JSON, as `write_text` does."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a file with JSON; the error names it.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path} is not a regular file")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def open_text(path: Path, mode: str):
    """Open a file for text; a symbolic link is refused, not followed."""
    return open(path, mode, encoding="utf-8", newline="\n", opener=_without_following)


def _without_following(path, flags):
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)  # Windows has no such flag


def with_name(error: OSError, name: object) -> OSError:
    """Return an error of the operating system that names a file, if it names none yet."""
    if error.filename is None:
        error.filename = str(name)
    return error


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open directories
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def holds_only(folder: Path, names: re.Pattern) -> bool:
    """Return whether a folder holds nothing but files of such names; never for a link."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return all(names.fullmatch(path.name) and not path.is_dir() for path in folder.iterdir())


def remove_files(folder: Path, names: re.Pattern) -> None:
    """Remove the files of such names from a folder, and the folder if that leaves it empty."""
    for path in folder.iterdir():
        if names.fullmatch(path.name) and not path.is_dir():
            path.unlink()
    with contextlib.suppress(OSError):  # something else is in it, which stays
        folder.rmdir()


def check_name(name: str) -> None:
    """Raise ValueError for a name of a row that a folder cannot have, or that leads elsewhere."""
    if not NAME.fullmatch(name) or name in (".", "..") or Path(name).name != name:
        raise ValueError(
            f"the row name {name!r} must be a name for a folder: no /, no \\, no control "
            "characters, and neither . nor .."
        )
    if len(os.fsencode(name)) > 200:
        raise ValueError(f"the row name {name[:20]!r}... has {len(name)} characters: too many")
