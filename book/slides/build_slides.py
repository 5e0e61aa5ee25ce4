"""Write the slides: one reveal.js deck per chapter, from the executed notebooks.

    python -m book.slides [--out DIR] [NAME ...]

`outline.py` says what each slide holds, `type_sizes.py` how large its type is; here they become
HTML (the templates are in book/slides/theme), with all that the pages load: reveal.js, MathJax and
fonts, copied from the installed packages sphinx-revealjs, sphinx-mathjax-offline and matplotlib.
Sphinx itself takes no part. The folder, book/_build/slides, works from any place without a network,
and is the same bytes on every run. NAME is the beginning of a notebook's name (`03`); without one,
all decks are written and the folder is made anew.
"""

import argparse
import re
import shutil
import sys
import time
from base64 import b64decode
from collections.abc import Callable
from html import escape
from importlib.util import find_spec
from math import cos, radians, sin
from pathlib import Path

import matplotlib
import nbformat
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from book.drawn_words import ON_WHITE, WORD, with_words
from book.notebooks.build_notebooks import select
from book.project import ROOT, BuildError, chapter_number, figure_number, lectures
from book.slides.outline import MARKDOWN, Part, deck_of
from book.slides.type_sizes import (
    BESIDE,
    HEIGHT,
    PICTURE,
    WIDTH,
    WORDS,
    Sized,
    choose_sizes,
    drawn_size,
    has_picture,
    letters,
    maths_size,
    printed_size,
    total,
)

THEME = Path(__file__).parent / "theme"
ICON = Path(__file__).parents[1] / "site" / "static" / "favicon.svg"
# A formula and the brackets and stops beside it, between which no line ends.
BOUND = re.compile(r'\(?<span class="math inline">[^<]*<[^<]*<[^<]*</span>[.,;:!?)]*')
LETTER_WIDTH = 60  # of a letter of matplotlib's, in hundredths of its size
LABEL = 18  # pixels: the smallest word in a drawing on a slide
SMALL_LABEL = 14  # likewise, in a drawing beside the words or below code
VERDICT = {"✓": "right", "✗": "wrong"}


def package(name: str) -> Path:
    """The folder of an installed package, which need not be one that can be imported."""
    spec = find_spec(name)
    if spec is None:
        raise BuildError(f"the slides need {name}: pip install -c constraints.txt -e .[book]")
    return Path(next(iter(spec.submodule_search_locations)))


def copy(out: Path) -> None:
    """Put everything that the pages load beside them."""
    reveal = package("sphinx_revealjs") / "_static" / "revealjs"
    mathjax = package("sphinx-mathjax-offline") / "static" / "mathjax"
    symbols = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    letters = reveal / "dist" / "theme" / "fonts" / "source-sans-pro"
    wanted = {
        "reveal": [reveal / "dist" / name for name in ("reset.css", "reveal.css", "reveal.js")],
        "notes": [reveal / "plugin" / "notes" / "notes.js"],
        "mathjax": [mathjax / "tex-svg-full.js"],  # the whole of it
        "fonts": [*letters.glob("*.woff"), letters / "LICENSE"]
        + [symbols / name for name in ("DejaVuSans.ttf", "DejaVuSansMono.ttf", "LICENSE_DEJAVU")],
        ".": [THEME / "slides.css", THEME / "slides.js", ICON],
    }
    for folder, paths in wanted.items():
        (out / folder).mkdir(parents=True, exist_ok=True)
        for path in paths:
            shutil.copyfile(path, out / folder / path.name)


def verdicts(output: str) -> str:
    """What a cell printed, its ✓ and ✗ lines marked."""
    lines = []
    for line in output.splitlines():
        name = VERDICT.get(line.strip()[:1])
        if re.match(r"\w*(Error|Refuted): ", line):
            name = "error"
        lines.append(f'<span class="{name}">{escape(line)}</span>' if name else escape(line))
    return "\n".join(lines)


def of_its_own(svg: str, name: str) -> str:
    """A drawing whose ids no other drawing of the page has."""
    return re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", svg)


def legible(svg: str, scale: float, label: int = LABEL) -> str:
    """A drawing whose words are at least `label` pixels high where a unit takes `scale` pixels.

    Matplotlib draws a word as a group of outlines, in hundredths of its size. Smaller words grow
    about their middle, so that those that stand in a row stay in it.
    """

    def grown(word: re.Match) -> str:
        x, y, turn, size = float(word[2]), float(word[3]), word[4], float(word[5])
        factor = label / (100 * size * scale)
        if factor <= 1:
            return word[0]
        ends = [float(n) for n in re.findall(r'transform="translate\((\S+) ', word[6])]
        half = (max(ends, default=0) + LETTER_WIDTH) * size / 2 * (factor - 1)
        angle = radians(float(turn or 0))
        x, y = x - half * cos(angle), y - half * sin(angle)
        turned = f" rotate({turn})" if turn else ""
        size *= factor
        return (
            f'{word[1]}"translate({x:.3f} {y:.3f}){turned} scale({size:.4f} -{size:.4f})"{word[6]}'
        )

    return WORD.sub(grown, svg)


def picture(part: Part, room: tuple[float, float], out: Path, name: str, label: int) -> str:
    """A picture, as large as the room allows, its words at least `label` pixels high."""
    wide, high = drawn_size(part)
    scale = min(room[0] / wide, room[1] / high)
    if part.kind == "svg":
        words = with_words(part.source, ON_WHITE)
        inner = of_its_own(legible(words, scale, label), name)
    else:
        path = f"pictures/{name}.png"
        (out / path).write_bytes(b64decode(part.source))
        inner = f'<img src="{path}" alt="{escape(part.alt)}">'
    size = f"width: {wide * scale:.1f}px; height: {high * scale:.1f}px"
    return f'<div class="drawing" style="{size}">{inner}</div>'


def shown(
    part: Part,
    text_size: int,
    code_size: int,
    room: float,
    out: Path,
    name: str,
    width: int = WIDTH,
    label: int = LABEL,
) -> str:
    """The HTML of a part, so wide; `room` is what a picture may take of the slide's height."""
    if part.kind in ("svg", "png"):
        return picture(part, (WIDTH, room), out, name, label)
    if part.kind == "math":
        size = maths_size(part.source, text_size, width)
        return f'<div class="math" style="font-size: {size}px">\\[{escape(part.source)}\\]</div>'
    if part.kind == "code":
        html = highlight(part.source, PythonLexer(), HtmlFormatter(nowrap=True))
        return f'<pre class="code">{html.rstrip()}</pre>'
    if part.kind == "output":
        size = printed_size(part.source, code_size)
        return f'<pre class="output" style="font-size: {size}px">{verdicts(part.source)}</pre>'
    html = BOUND.sub(r'<span class="bound">\g<0></span>', MARKDOWN.render(part.source))
    if part.kind == "remark":
        return html.replace("<p>", '<p class="fragment">', 1)
    return re.sub(r"<td>(.*?)</td>", entry, html)


def entry(cell: re.Match) -> str:
    """A table's cell; a short one stays on its line, however long those beside it are."""
    short = letters(re.sub(r"<[^>]+>", "", cell.group(1))) <= 18
    return f'<td class="short">{cell.group(1)}</td>' if short else cell.group()


def uncovered(parts: list[Part], shown: list[str]) -> list[str]:
    """The same, but what answers a question on the slide comes when the speaker goes on."""
    for i, part in enumerate(parts):
        asked = any(p.kind == "text" and "?" in p.source for p in parts[:i])
        if asked and part.kind in ("output", "svg", "png") and 'class="fragment' not in shown[i]:
            shown[i] = re.sub('class="', 'class="fragment ', shown[i], count=1)
    return shown


def page(sized: Sized, minutes_of: dict[str, int], out: Path, name: str) -> dict:
    """What the template needs of a slide."""
    slide = sized.slide
    rest = HEIGHT - total(slide, sized.text_size, sized.code_size)
    sizes = sized.text_size, sized.code_size, PICTURE + rest
    width = WORDS if slide.beside else WIDTH
    label = SMALL_LABEL if slide.wanted else LABEL  # small below code, too
    parts = [shown(part, *sizes, out, name, width, label) for part in slide.parts]
    corner = [MARKDOWN.renderInline(slide.head)] if slide.message else []
    if slide.figure:
        corner.append(figure_number(name, slide.figure))
    minutes = minutes_of.get(slide.head) if slide.opens else None
    if minutes and slide.kind not in ("title", "section"):
        corner.append(f"about {minutes} minute{'s' * (minutes > 1)}")
    return {
        "kind": slide.kind,
        "head": MARKDOWN.renderInline(slide.head),
        "message": MARKDOWN.renderInline(slide.message),
        "corner": " · ".join(corner),
        "parts": uncovered(slide.parts, parts),
        "beside": picture(slide.beside, (BESIDE, HEIGHT), out, name, SMALL_LABEL)
        if slide.beside
        else "",
        "notes": slide.notes,
        "minutes": minutes_of.get(slide.head) if slide.kind in ("title", "section") else None,
        "text_size": sized.text_size,
        "code_size": sized.code_size,
    }


def write(source: Path, out: Path, templates: Environment, links: dict[str, str]) -> dict:
    """Write the deck of one chapter; returns its line in the index.

    `links` stand on the first slide and on the last: each address with its words.
    """
    deck = deck_of(nbformat.read(source.with_suffix(".ipynb"), as_version=4))
    columns, count, drawn, number = [], 0, 0, chapter_number(source)
    for _, slides in deck.columns:
        pages = []
        for slide in slides:
            count += 1
            sized = choose_sizes(slide)
            drawn += has_picture(sized.slide)
            pages.append(page(sized, deck.minutes, out, f"{number}-{count:03}"))
        columns.append(pages)
    html = templates.get_template("deck.html.j2").render(
        title=deck.title, columns=columns, links=links
    )
    (out / f"{source.stem}.html").write_text(html, encoding="utf-8")
    return {
        "page": f"{source.stem}.html",
        "title": deck.title,
        "slides": count,
        "drawn": drawn,
        "minutes": deck.minutes[deck.title],
    }


def make(
    root: Path,
    out: Path,
    names: list[str],
    links: Callable[[Path], dict[str, str]] = lambda source: {},
) -> list[dict]:
    """Write the decks of a project, and their index, into a folder; returns the index's lines.

    The site tells by `links` what else it has of a chapter; a folder of slides has nothing.
    """
    templates = Environment(
        loader=FileSystemLoader(THEME), undefined=StrictUndefined, trim_blocks=True
    )
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    copy(out)
    decks = [
        write(source, out, templates, links(source))
        for source in select(root, names)
        if source in lectures(root)
    ]
    index = templates.get_template("index.html.j2").render(
        decks=decks, home=bool(decks and links(select(root, names)[0]))
    )
    (out / "index.html").write_text(index, encoding="utf-8")
    return decks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m book.slides", description="Write the slides of the chapters."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="the beginning of a name: 03")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "book" / "_build" / "slides", metavar="DIR"
    )
    options = parser.parse_args(arguments)
    start = time.monotonic()
    if options.out.exists() and any(options.out.iterdir()):
        if not (options.out / "slides.css").exists():
            parser.error(f"{options.out} holds something other than slides")
        if not options.names:
            shutil.rmtree(options.out)
    try:
        decks = make(ROOT, options.out, options.names)
    except BuildError as error:
        print(f"slides stopped: {error}", file=sys.stderr)
        return 1
    for deck in decks:
        share = deck["drawn"] / deck["slides"]
        print(f"{deck['title']}: {deck['drawn']} of {deck['slides']} slides drawn, {share:.0%}")
    slides = sum(deck["slides"] for deck in decks)
    print(f"{len(decks)} decks, {slides} slides, {time.monotonic() - start:.1f} s")
    print(f"Open {options.out / 'index.html'} in a browser.")
    return 0
