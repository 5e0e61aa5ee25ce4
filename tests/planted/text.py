"""Mistakes in the corpus that the properties of test_text.py must catch."""

from planting import mistakes
from test_text import (
    a_copy_is_on_the_side_of_its_text,
    a_text_stays_on_its_side,
    every_text_is_on_one_side,
    only_texts_are_read,
)

from cheems_ref import text

ROOMS = (text,)

SIDE = 'int.from_bytes(hashlib.sha256(text).digest()[:8], "big")'
SHARE = "(len(apart) - 0.5) / len(ids)"

# fmt: off
MISTAKES = mistakes([
    (every_text_is_on_one_side, {
        "cut a byte late": [(SHARE, "(len(apart) - 1.5) / len(ids)")],
        "cut a byte early": [(SHARE, "(len(apart) + 0.5) / len(ids)")],
        "joined without a mark": [('b"\\n\\n".join(side)', 'b"".join(side)')],
        "folders below left out": [('folder.rglob("*")', 'folder.glob("*")')],
        "the other side held out": [("sides[number < held_out", "sides[number > held_out")]}),
    (a_copy_is_on_the_side_of_its_text, {
        "by its place": [(SIDE, "(len(sides[0]) + len(sides[1])) % 2 * 2**63")]}),
    (a_text_stays_on_its_side, {
        "by its place": [(SIDE, "(len(sides[0]) + len(sides[1])) % 3 * 2**62")]}),
    (only_texts_are_read, {
        "zeros too": [('return "\\0" not in data.decode("utf-8")',
                       'return bool(data.decode("utf-8"))')],
        "empty ones too": [
            ("text.strip() and _is_text(text):\n                yield text\n\n\ndef _is",
             "_is_text(text):\n                yield text\n\n\ndef _is")],
        "hidden ones too": [('part.startswith(".")', 'part.startswith(":")')],
        "hidden folders too": [("any(part.startswith(\".\") for part in parts)",
                                'parts[-1].startswith(".")')]}),
], text)
# fmt: on
