"""Real text without a download: English prose that ships with Python itself.

`pydoc_data.topics` is the reference manual behind `help("...")`, about 465 kB. It differs a
little between patch versions of Python, so nothing that depends on it may be printed in a
notebook. Taught in notebooks 03 and 07.
"""

import importlib
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor


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


def text_to_ids(text: str) -> Int[Tensor, " l"]:
    """Encode a text as its UTF-8 bytes: l integers in 0..255 (int64)."""
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.int64)


def ids_to_text(ids: Int[Tensor, " l"]) -> str:
    """Decode UTF-8 bytes (l integers in 0..255); bytes that form no character become U+FFFD.

    Raises:
        ValueError: an id is not in 0..255.
    """
    return bytes(ids.tolist()).decode("utf-8", errors="replace")


def _python_manual():
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "This Python comes without pydoc_data, the manual that serves as the corpus. Install "
            "your distribution's full standard library (on Debian: libpython3-stdlib), or name "
            "any UTF-8 file instead: read_text(path), --text FILE on the command line.",
            name=error.name,
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))
