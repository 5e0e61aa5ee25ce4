"""Mistakes in the corpus that the properties of test_text.py must catch."""

from planting import mistakes
from test_text import a_copy_is_on_the_side_of_its_text, every_text_is_on_one_side

from cheems_ref import text

ROOMS = (text,)

SIDE = 'int.from_bytes(hashlib.sha256(text).digest()[:8], "big")'
SHARE = "(len(apart) - 0.5) / len(ids)"

# fmt: off
MISTAKES = mistakes([
    (every_text_is_on_one_side, {
        "cut a byte early": [(SHARE, "(len(apart) + 0.5) / len(ids)")],
        "joined without a gap": [('b"\\n\\n".join(side)', 'b"".join(side)')]}),
    (a_copy_is_on_the_side_of_its_text, {
        "by its place": [(SIDE, "(len(sides[0]) + len(sides[1])) % 2 * 2**63")]}),
], text)
# fmt: on
