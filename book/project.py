"""Shared by all of book/: the list of chapters, and functions that read a notebook's cells.

A cell may come from nbformat or from a notebook read as JSON, where the source is a list of lines.
Slides and site read headings with a Markdown parser instead, because they need the whole structure
of a text.
"""

import html
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPENING = "Opening"  # the title of the cells above a chapter's first section

HEADING = re.compile(r"^(##+) (.+)$", re.MULTILINE)  # below the title, which has one #
SOLUTION = re.compile(r"^( *)### BEGIN SOLUTION\n.*?### END SOLUTION$", re.MULTILINE | re.DOTALL)
GAP = r"\1# YOUR CODE HERE\n\1raise NotImplementedError()"  # as nbgrader writes it


class BuildError(Exception):
    """A build cannot go on; the message is for the author of the notebook."""


# --- chapters -------------------------------------------------------------------------------------


def lectures(root: Path = ROOT) -> list[Path]:
    """The sources of the lectures, in their order."""
    return sorted((root / "notebooks").glob("*.py"))


def labs(root: Path = ROOT) -> list[Path]:
    """The sources of the labs, in their order."""
    return sorted((root / "notebooks" / "labs").glob("*.py"))


def references(root: Path = ROOT) -> list[Path]:
    """The sources of the pages beside the claims, which are looked up and not worked through."""
    return sorted((root / "notebooks" / "reference").glob("*.py"))


def chapters(root: Path = ROOT) -> list[Path]:
    """The sources of all notebooks: the lectures, the labs, then the reference."""
    return lectures(root) + labs(root) + references(root)


def chapter_number(path: Path) -> str:
    """The "03" of a lecture's file, "03a" of a lab's or a reference page's."""
    return path.stem.partition("_")[0]


# --- headings -------------------------------------------------------------------------------------


def text_of(cell: Mapping) -> str:
    """The source of a cell."""
    return "".join(cell["source"])


def headings(markdown: str) -> list[tuple[int, str]]:
    """The level and title of each heading below a chapter's own title, in order."""
    return [(len(marks), title) for marks, title in HEADING.findall(markdown)]


def cells_under_headings(cells: Iterable[Mapping]) -> Iterator[tuple[tuple[str, ...], Mapping]]:
    """Each cell with the titles of its section and subsection."""
    above: tuple[str, ...] = ()
    for cell in cells:
        if cell["cell_type"] == "markdown":
            for level, title in headings(text_of(cell)):
                above = (title,) if level == 2 else (*above[:1], title)
        yield above, cell


def sections(cells: Iterable[Mapping]) -> list[tuple[str, list[Mapping]]]:
    """The sections as titles and cells; a text cell is split where a section begins in it."""
    parts: list[tuple[str, list[Mapping]]] = [(OPENING, [])]
    for cell in cells:
        if cell["cell_type"] != "markdown":
            parts[-1][1].append(cell)
            continue
        before, *rest = re.split(r"^## (?=.)", text_of(cell), flags=re.MULTILINE)
        if before.strip():
            parts[-1][1].append(dict(cell, source=before))
        parts += [(text.partition("\n")[0], [dict(cell, source=text)]) for text in rest]
    return parts


def anchor(title: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower().replace(" ", "-"))


# --- figures and exercises ------------------------------------------------------------------------


def alt_text(output: Mapping) -> str:
    """The alt text of a figure; "" for any other output."""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        found = re.search(r'<svg [^>]*aria-label="([^"]*)"', data["image/svg+xml"])
        return html.unescape(found[1])
    if "image/png" in data:
        return output["metadata"]["image/png"]["alt"]
    return ""


def figure_number(name: str, place: int) -> str:
    """ "Figure 3.2" for the second of chapter 03, "Figure 3a.1" for the first of lab 03a."""
    return f"Figure {re.match('0?([0-9]+[a-z]?)', name)[1]}.{place}"


def without_solutions(source: str) -> str:
    """Replace every solution in a cell or a file by a gap."""
    return SOLUTION.sub(GAP, source)
