"""Real text without a download, English prose and source code that ship with Python.

`pydoc_data.topics` is the reference manual behind `help("...")`, about 465 kB; the standard library
is some 10 MB of source. Both differ a little between patch versions of Python, so notebooks print
no number that depends on them. Taught in notebooks 03, 07 and 09.
"""

import codecs
import hashlib
import importlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Integer
from torch import Tensor

from cheems_ref import check

BYTE_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)  # they hold 0 to 255

# Folders of the standard library that are not in every installation.
APART = {"site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo"}
APART |= {"lib2to3", "ensurepip", "pydoc_data", "__pycache__"}


def read_text(path: str | Path | None = None) -> str:
    """Read a UTF-8 file, or Python's reference manual.

    Args:
        path: a UTF-8 text file; None for the topics of `pydoc_data`, sorted by name.

    Returns:
        The text; never empty, and without the byte order mark that some editors write.

    Raises:
        ModuleNotFoundError: the Python distribution leaves `pydoc_data` out.
        FileNotFoundError: there is no such file.
        ValueError: the file is empty, not UTF-8, or has a byte 0, as binary files and UTF-16 have.
    """
    return "\n\n".join(_topics()) if path is None else _read(path).decode("utf-8")


def read_ids(path: str | Path | None = None) -> Integer[Tensor, " l"]:
    """Read a UTF-8 file, or Python's reference manual, as bytes: l integers, uint8.

    The ids are those of `text_to_ids(read_text(path), dtype=torch.uint8)`, in a third of the memory
    or less. Argument and errors as for `read_text`.
    """
    data = bytearray(read_text(), "utf-8") if path is None else _read(path)
    return torch.frombuffer(data, dtype=torch.uint8)


class Corpus(NamedTuple):
    """Many texts as bytes: the training texts, then the held-out texts.

    ids: (l,), uint8; eval_fraction: the held-out share of the bytes, so that `train` cuts exactly
    between the two sides; texts: the number of texts on either side.
    """

    ids: Integer[Tensor, " l"]
    eval_fraction: float
    texts: tuple[int, int]


def read_corpus(folder: str | Path | None = None, *, eval_fraction: float | int = 0.1) -> Corpus:
    """Read many texts and hold some of them out. A text and its copies are on the same side.

    The SHA-256 of its contents decides whether a text is held out; other texts have no influence.

    Args:
        folder: read all files in this folder and the folders below that `read_text` could read,
            except hidden files and folders (with a dot before the name); None for Python's manual,
            topic by topic, and the modules of its standard library.
        eval_fraction: approximate share of the texts to hold out, in (0, 1).

    Raises:
        NotADirectoryError: not a directory.
        ValueError: no text to train on, or no text to hold out.
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
        dtype: uint8, int16, int32 or int64. torch.uint8 takes an eighth of the memory for a long
            text, and `train` and `evaluate` widen only the windows that they read. int8 is refused:
            it ends at 127.
    """
    check.choice(BYTE_DTYPES, dtype=dtype)
    data = bytearray(text, "utf-8")
    if not data:  # frombuffer raises on it
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).to(dtype)


def fingerprint(ids: Integer[Tensor, " l"]) -> str:
    """Return the SHA-256 of a text's ids as int64, so that their dtype makes no difference."""
    digest = hashlib.sha256()
    for piece in ids.split(2**20):  # widens at most 8 MiB at a time
        digest.update(piece.to("cpu", torch.int64).numpy().tobytes())
    return digest.hexdigest()


def ids_to_text(ids: Integer[Tensor, " l"]) -> str:
    """Decode UTF-8 bytes (l integers in 0..255); bytes that form no character become U+FFFD.

    Raises:
        ValueError: an id is not in 0..255.
    """
    return bytes(ids.tolist()).decode("utf-8", errors="replace")


def _files_below(folder: Path) -> Iterator[bytes]:
    """Yield the texts in a folder and below, sorted by path, without hidden files and folders."""
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a directory")
    paths = (path for path in folder.rglob("*") if path.is_file())
    return _texts(p for p in paths if "/." not in f"/{p.relative_to(folder).as_posix()}")


def _standard_library() -> Iterator[bytes]:
    """Yield the topics of the manual, then the sources that every installation has."""
    for topic in _topics():
        yield topic.encode("utf-8")
    library = Path(sysconfig.get_path("stdlib"))
    paths = library.rglob("*.py")
    yield from _texts(p for p in paths if not APART & {*p.relative_to(library).parts[:-1]})


def _texts(paths: Iterable[Path]) -> Iterator[bytes]:
    """Yield the files that are UTF-8 text and not blank, sorted by path."""
    for path in sorted(paths):
        try:
            text = bytes(_read(path))
        except ValueError:  # not a text
            continue
        if text.strip():
            yield text


def _read(path):
    """The bytes of a UTF-8 file without its byte order mark.

    The file is checked piece by piece: a binary file is refused at its first byte 0, however long
    it is.
    """
    data, decoder = bytearray(), codecs.getincrementaldecoder("utf-8")()
    with Path(path).open("rb") as file:
        while piece := file.read(2**20):
            first = len(data) - len(decoder.getstate()[0])  # the place of what is decoded next
            _check_piece(path, decoder, piece, len(data), first)
            data += piece
        _check_piece(path, decoder, b"", len(data), len(data) - len(decoder.getstate()[0]))
    if data.startswith(codecs.BOM_UTF8):
        del data[: len(codecs.BOM_UTF8)]
    if not data:
        raise ValueError(f"{path} is empty")
    return data


def _check_piece(path, decoder, piece, place, first):
    if 0 in piece:
        raise ValueError(
            f"{path} is not UTF-8 text: byte {place + piece.index(0)} is 0, as in binary files and "
            "in UTF-16; save a text as UTF-8"
        )
    try:
        decoder.decode(piece, final=not piece)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte {first + error.start} is invalid"
        ) from error


def _topics():
    """Return the topics of Python's manual, sorted by name."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "This Python lacks its manual, pydoc_data. Install the full standard library (Debian: "
            "libpython3-stdlib), or name a UTF-8 file: read_text(path), --text FILE for commands.",
            name=error.name,
        ) from error
    return [topics[name] for name in sorted(topics)]
