"""Real text without a download: English prose and source code that ship with Python itself.

`pydoc_data.topics` is the reference manual behind `help("...")`, about 465 kB; the standard library
is some 10 MB of source. Both differ a little between patch versions of Python, so nothing that
depends on them may be printed in a notebook. Taught in notebooks 03, 07 and 09.
"""

import hashlib
import importlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Integer
from torch import Tensor

from cheems_ref import check

# Folders of the standard library that some installations lack, or that others add to it.
APART = {"site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo"}
APART |= {"lib2to3", "ensurepip", "pydoc_data", "__pycache__"}


def read_text(path: str | Path | None = None) -> str:
    """Read the text to work on: a UTF-8 file, or Python's own reference manual.

    Args:
        path: a UTF-8 text file; None for the topics of `pydoc_data`, sorted by name.

    Returns:
        The text; never empty.

    Raises:
        ModuleNotFoundError: the Python distribution leaves `pydoc_data` out.
        FileNotFoundError: there is no such file.
        ValueError: the file is empty, or not UTF-8.
    """
    if path is None:
        return _python_manual()
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8-sig")  # without the mark that some editors put in front
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start} is invalid") from error
    if not text:
        raise ValueError(f"{path} is empty")
    return text


class Corpus(NamedTuple):
    """Many texts as bytes: those to train on, then those held out.

    ids: (l,), uint8; eval_fraction: the share at which `train` cuts them, exactly between the two;
    texts: how many there are on either side.
    """

    ids: Integer[Tensor, " l"]
    eval_fraction: float
    texts: tuple[int, int]


def read_corpus(folder: str | Path | None = None, *, eval_fraction: float | int = 0.1) -> Corpus:
    """Read many texts and hold some of them out, whole: no text is on both sides, nor is its copy.

    A text is held out if the SHA-256 of its contents says so, whatever other texts there are.

    Args:
        folder: all files in it, and in folders below, that are UTF-8 text and whose names, and
            those of their folders, do not begin with a dot; None for Python's manual, topic by
            topic, and the modules of its standard library.
        eval_fraction: about which share of the texts is held out, in (0, 1).

    Raises:
        NotADirectoryError: the folder is none.
        ValueError: it holds no text to train on, or none to hold out.
    """
    check.numbers("(0, 1)", eval_fraction=eval_fraction)
    texts = _standard_library() if folder is None else _files_below(Path(folder))
    sides = [], []
    for text in texts:
        number = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
        sides[number < eval_fraction * 2**64].append(text)
    kept, apart = (b"\n\n".join(side) for side in sides)
    if not kept or not apart:
        raise ValueError(
            f"{folder or 'the standard library'} has {len(sides[0])} texts to train on and "
            f"{len(sides[1])} to hold out; there must be some of both"
        )
    ids = torch.frombuffer(bytearray(kept + apart), dtype=torch.uint8)
    return Corpus(ids, (len(apart) - 0.5) / len(ids), (len(sides[0]), len(sides[1])))


def text_to_ids(text: str, *, dtype: torch.dtype = torch.int64) -> Integer[Tensor, " l"]:
    """Encode a text as its UTF-8 bytes: l integers in 0..255.

    Args:
        text: any string.
        dtype: of the integers. A long text in torch.uint8 takes an eighth of the memory, and
            `train` and `evaluate` widen only the windows that they read.
    """
    data = bytearray(text, "utf-8")
    if not data:  # which frombuffer refuses
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).to(dtype)


def fingerprint(ids: Integer[Tensor, " l"]) -> str:
    """Return the SHA-256 of a text's ids as int64, whatever integers they are kept in."""
    digest = hashlib.sha256()
    for piece in ids.split(2**20):  # so that no more than 8 MiB are widened at a time
        digest.update(piece.to("cpu", torch.int64).numpy().tobytes())
    return digest.hexdigest()


def ids_to_text(ids: Integer[Tensor, " l"]) -> str:
    """Decode UTF-8 bytes (l integers in 0..255); bytes that form no character become U+FFFD.

    Raises:
        ValueError: an id is not in 0..255.
    """
    return bytes(ids.tolist()).decode("utf-8", errors="replace")


def _files_below(folder: Path) -> Iterator[bytes]:
    """The UTF-8 texts in a folder, in the order of their names, without those of hidden ones."""
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a directory")
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") for part in parts):
            text = path.read_bytes()
            if text.strip() and _is_text(text):
                yield text


def _is_text(data):
    try:
        return "\0" not in data.decode("utf-8")
    except UnicodeDecodeError:
        return False


def _standard_library() -> Iterator[bytes]:
    """The topics of the manual, and the sources that come with every Python of this version."""
    topics = _topics()
    for name in sorted(topics):
        yield topics[name].encode("utf-8")
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if not APART & set(path.relative_to(library).parts[:-1]):
            text = path.read_bytes()
            if text.strip() and _is_text(text):
                yield text


def _python_manual():
    topics = _topics()
    return "\n\n".join(topics[name] for name in sorted(topics))


def _topics():
    try:
        return importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "This Python comes without pydoc_data, the manual that serves as the corpus. Install "
            "your distribution's full standard library (on Debian: libpython3-stdlib), or name "
            "any UTF-8 file instead: read_text(path), --text FILE on the command line.",
            name=error.name,
        ) from error
