"""How large a slide's type may be so that everything fits.

A slide is 1280 × 720 (`theme/slides.css`). Sizes are estimated, generously, since no browser
takes part in the build; the tests in tests/book measure every slide in one.
"""

import re
import struct
import textwrap
from base64 import b64decode
from dataclasses import dataclass, replace
from math import ceil

from book.drawn_words import WORD
from book.project import BuildError
from book.slides.outline import MARKDOWN, Part, Slide

WIDTH, HEIGHT = 1232, 620  # of what stands below the running head
GAP = 12  # between parts
SIZES = [(38, 28), (34, 28), (32, 28), (30, 28), (28, 28)]  # of text and of code
SMALL = [(26, 26), (24, 24), (22, 22), (20, 20)]  # for long lists and tables
LETTER, CODE_LETTER = 0.47, 0.602  # the widths of letters, as shares of their size
LINE, CODE_LINE = 1.32, 1.25  # the heights of lines, likewise
WORDS, BESIDE = 520, 680  # the widths of words with a picture beside them, and of the picture
PICTURE = 300  # a picture is at least so high
FORMULA = 28  # a smaller formula is set in rows, if it can be
MESSAGE = 120  # characters; a longer line was printed, and is no row of a table
BESIDE_PICTURE = 28  # the largest text, which leaves more room for the picture
TITLE = 110  # what a title is higher than a running head

SMALLEST_WORD = 12  # pixels, in a picture beside words; drawn at 14, smaller ones would collide

SMALLEST_BESIDE = 20  # of formulas beside a picture

TALL = re.compile(r"\\(?:sum|frac|prod|int|Big)")
BLOCK = re.compile(r"\\begin\{(\w*matrix|cases)\}(.*?)\\end\{\1\}", re.DOTALL)
FRACTION = re.compile(r"\\[td]?frac\{((?:[^{}]|\{[^{}]*\})*)\}\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
TAG = re.compile(r"\\tag\{[^}]*\}")
SPACE = re.compile(r"\\q?quad\b")  # between the clauses of a formula
RELATION = re.compile(r"\s*\\(?:Long\w+|iff)\s*")
LABEL = re.compile(r"_\{\\text\{[^}]*\}\}")  # under a brace, or a small subscript


@dataclass(frozen=True)
class Sized:
    """A slide whose parts fit at these sizes of type."""

    slide: Slide
    text_size: int
    code_size: int


def letters(markup: str) -> int:
    """About how many letters a reader sees side by side of Markdown or TeX."""
    markup = re.sub(r"\\(?:begin|end)\{\w+\}", "", markup)
    markup = re.sub(r"\\(?:text|math\w+|tag)\{([^{}]*)\}|[_^]\{([^{}]*)\}", r"\1\2", markup)
    markup = FRACTION.sub(lambda f: max(f.groups(), key=letters), markup)
    markup = re.sub(r"\\(?:underbrace|left|right|[bB]igg?|,|;)", "", markup)
    markup = re.sub(r"\\(?:qquad|Long\w+)", "xxxx", markup)
    return len(re.sub(r"[{}_^$*`\\&]", "", re.sub(r"\\[a-zA-Z]+", "x", markup)))


def lines_of(markup: str, size: int, width: float = WIDTH) -> int:
    return max(1, ceil(letters(markup) * LETTER * size / width))


def table_height(source: str, size: int, width: float = WIDTH) -> float:
    """Columns are as wide as their longest cells; where that is too wide, the wide ones give."""
    tokens = MARKDOWN.parse(source)
    cells = [token.content for token in tokens if token.type == "inline"]
    columns = sum(token.type == "th_open" for token in tokens)
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    widths = [
        max(letters(cell) for cell in column) * LETTER * size for column in zip(*rows, strict=True)
    ]
    free = width - 1.2 * size * columns
    while sum(widths) > free + 1:
        widest = max(widths)
        widths = [max(size, 0.95 * width) if width > 0.9 * widest else width for width in widths]
    counts = [max(map(lines_of, row, [size] * columns, widths)) for row in rows]
    return sum(size * (LINE * count + 0.36) for count in counts)


def rows_of(tex: str) -> tuple[list[str], int]:
    """The rows of a formula, and how many rows its largest matrix or case has."""
    high = [1]

    def longest_row(block: re.Match) -> str:
        rows = block.group(2).split(r"\\")
        high.append(len(rows))
        return max(rows, key=letters)

    return LABEL.sub("", BLOCK.sub(longest_row, tex)).split(r"\\"), max(high)


def maths_size(tex: str, text_size: int, width: float = WIDTH) -> int:
    """The size of a formula: that of the text, or what fits the width."""
    rows, _ = rows_of(tex)
    tag = 2 * 5 if TAG.search(tex) else 0  # it stands at the right of what is centred
    wide = max(letters(TAG.sub("", row)) for row in rows) * 0.56 + tag * 0.75
    return min(text_size, int(width / wide))


def balanced(tex: str) -> bool:
    """Whether all that is opened in a piece of TeX is closed in it."""
    return tex.count("{") == tex.count("}") and tex.count(r"\begin") == tex.count(r"\end")


def clauses(tex: str) -> list[str]:
    """What stands side by side in a formula, each with the relation that it begins with."""
    parts = [""]
    for piece in SPACE.split(tex):
        joins = RELATION.fullmatch(parts[-1])
        if joins or not balanced(parts[-1]):
            parts[-1] += piece if joins else rf"\qquad{piece}"
        else:
            parts.append(piece)
    return parts[1:]


def in_rows(part: Part, width: float = WIDTH) -> Part:
    """A formula with some of its clauses below others, where in one row it would be small."""
    tag = "".join(TAG.findall(part.source))
    tex = TAG.sub("", part.source).strip()
    if maths_size(part.source, FORMULA, width) == FORMULA or len(rows_of(tex)[0]) > 1:
        return part
    first, *rest = clauses(tex)
    longest, rows = max(map(letters, [first, *rest])), [first]
    for clause in rest:
        if letters(together := rf"{rows[-1]} \qquad {clause}") <= longest:
            rows[-1] = together
        else:
            rows.append(clause)
    if len(rows) == 1:
        return part
    rows = r" \\ ".join(row.strip() for row in rows)
    return replace(part, source=rf"\begin{{gathered}} {rows} \end{{gathered}} {tag}")


def maths_height(tex: str, size: int) -> float:
    rows, rows_of_blocks = rows_of(tex)
    high = [1.5 + 1.7 * bool(TALL.search(row)) + 1.7 * ("underbrace" in row) for row in rows]
    return size * (sum(high) + 1.4 * (rows_of_blocks - 1)) + 10


def printed_size(output: str, code_size: int) -> int:
    """The size of what a cell printed: that of code, or what keeps the rows of a table whole."""
    rows = [length for line in output.splitlines() if (length := len(line)) <= MESSAGE]
    return min(code_size, int((WIDTH - 20) / (CODE_LETTER * max(rows, default=1))))


def height(part: Part, text_size: int, code_size: int, width: float = WIDTH) -> float:
    """How high a part will be."""
    lines = part.source.splitlines()
    if part.kind in ("code", "sample"):
        return len(lines) * CODE_LINE * code_size + 16
    if part.kind == "output":
        size = printed_size(part.source, code_size)
        columns = int((WIDTH - 20) / (CODE_LETTER * size))
        wrapped = sum(max(1, len(textwrap.wrap(line, columns))) for line in lines)
        return wrapped * CODE_LINE * size
    if part.kind == "math":
        return maths_height(part.source, maths_size(part.source, text_size, width))
    if part.kind in ("png", "svg"):
        return PICTURE
    if part.kind == "table":
        return table_height(part.source, text_size, width)
    if part.kind == "list":
        entries = re.split(r"^\s*(?:[-*]|\d+\.) ", part.source, flags=re.MULTILINE)[1:]
        rows = sum(lines_of(entry, text_size, width - 2 * text_size) for entry in entries)
        return text_size * (LINE * rows + 0.3 * len(entries))
    return text_size * LINE * lines_of(part.source, text_size, width)


def total(slide: Slide, text_size: int, code_size: int) -> float:
    """How high a slide will be, its running head apart."""
    width = WORDS if slide.beside else WIDTH
    heights = [height(part, text_size, code_size, width) for part in slide.parts]
    return sum(heights) + GAP * (len(heights) - 1) + (TITLE if slide.kind == "title" else 0)


def fits_at(slide: Slide, sizes: list[tuple[int, int]]) -> Sized | None:
    """The slide at the first of these sizes at which it fits; code is never wider than the page."""
    code = [part.source for part in slide.parts if part.kind in ("code", "sample")]
    columns = max((len(line) for source in code for line in source.splitlines()), default=1)
    widest = int((WIDTH - 20) / (CODE_LETTER * columns))
    for text_size, code_size in sizes:
        if has_picture(slide) and text_size > BESIDE_PICTURE:
            continue
        sized = Sized(slide, text_size, min(code_size, widest))
        if total(slide, sized.text_size, sized.code_size) <= HEIGHT:
            return sized
    return None


def crowds(parts: list[Part]) -> bool:
    """Whether the words around a picture would take more than three lines from it."""
    words = [part.source for part in parts if part.kind in ("text", "remark")]
    drawn = any(part.kind in ("svg", "png") for part in parts)
    return drawn and sum(lines_of(text, BESIDE_PICTURE) for text in words) > 3


def drawn_size(picture: Part) -> tuple[float, float]:
    """The width and the height that a picture gives itself."""
    if picture.kind == "png":
        return struct.unpack(">II", b64decode(picture.source)[16:24])  # where a PNG has its size
    wide, high = re.search(r'viewBox="0 0 (\S+) (\S+)"', picture.source).groups()
    return float(wide), float(high)


def has_picture(slide: Slide) -> bool:
    """Whether a slide shows a figure, alone or beside its words."""
    return bool(slide.beside) or any(part.kind in ("svg", "png") for part in slide.parts)


def beside(slide: Slide) -> Sized | None:
    """The slide with its words in the left column, if all of them and the picture are legible."""
    wide, high = drawn_size(slide.beside)
    scale = min(BESIDE / wide, HEIGHT / high)
    words = [100 * float(word[5]) * scale for word in WORD.finditer(slide.beside.source)]
    parts = [in_rows(part, WORDS) if part.kind == "math" else part for part in slide.parts]
    sizes = [maths_size(p.source, FORMULA, WORDS) for p in parts if p.kind == "math"]
    if min(words, default=0) < SMALLEST_WORD or min(sizes, default=FORMULA) < SMALLEST_BESIDE:
        return None
    return fits_at(replace(slide, parts=parts), SIZES)


def larger_below(slide: Slide) -> bool:
    """Whether the picture beside a slide's words would be as large below them, or larger."""
    wide, high = drawn_size(slide.beside)
    words = total(replace(slide, beside=None), BESIDE_PICTURE, BESIDE_PICTURE) + GAP
    return min(WIDTH / wide, (HEIGHT - words) / high) >= min(BESIDE / wide, HEIGHT / high)


def choose_sizes(slide: Slide) -> Sized:
    """The slide with all its words, or with fewer, at the largest type at which it fits.

    First the picture beside the words goes (below them, if it's as large there or the cell asks for
    it), then the sentences around its lead, then the remark on its result, then its code.

    Raises:
        BuildError: there is too much on the slide.
    """
    if slide.beside:
        below = larger_below(slide)
        if not below and (sized := beside(slide)):
            return sized
        if below or slide.wanted:
            slide = replace(slide, parts=[*slide.parts, slide.beside], beside=None)
        else:
            slide = replace(slide, beside=None, figure=0)
    parts = [in_rows(part) if part.kind == "math" else part for part in slide.parts]
    wordy = [replace(part, source=part.longer or part.source) for part in parts]
    silent = [part for part in parts if part.kind != "remark"]
    shorter = [part for part in silent if part.kind != "code"]
    ladder = [(tried, SIZES) for tried in (wordy, parts) if not crowds(tried)]
    for tried, sizes in (*ladder, (silent, SIZES), (shorter, SIZES), (shorter, SMALL)):
        if sized := fits_at(replace(slide, parts=tried), sizes):
            return sized
    raise BuildError(f"too large for a slide, under {slide.head!r}:\n{slide.parts[0].source}")
