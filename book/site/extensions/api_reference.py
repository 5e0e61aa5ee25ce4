"""Sphinx extension: docstrings as reStructuredText, with the way back into the course.

The docstrings of `cheems_ref` are plain text, to be read in an editor and by `help`: names stand
in single backticks, tables and equations are indented, arguments are listed in Google's style. Here
they become what autodoc reads: names of the package turn into links, what is indented stays as it
is written, and no other sign means anything. Below each public function and class stands where the
course takes it up: the sections of its room's chapters that use it, other chapters, the claims that
its source makes, and the tests.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from sphinx.application import Sphinx

from book.claims import (
    Claim,
    Place,
    covers,
    public_names,
    read_claims,
    read_notebooks,
    users,
)
from book.project import ROOT, anchor, cells_under_headings, chapter_number, chapters, text_of

LISTS = ("Args:", "Returns:", "Raises:", "Yields:")
ENTRY = re.compile(r"(    )((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*:)( .*|$)", re.DOTALL)
# The table of lessons in cheems_ref/README.md says which chapters teach a room.
LESSON = re.compile(r"^\| \[`(\w+)`\]\(\w+\.py\) \| (\d\d(?:, \d\d)*) \|", re.MULTILINE)
SHOWN = 8  # claims of one verdict


class Section(NamedTuple):
    """A section of a chapter, and the names that its cells and its text use."""

    chapter: str
    title: str
    words: frozenset[str]


# --- text ---------------------------------------------------------------------------------------


def as_rst(lines: list[str], link: Callable[[str], str | None]) -> list[str]:
    """A docstring, without its indentation, as reStructuredText that napoleon reads.

    Args:
        lines: of the docstring.
        link: the full name of what stands in backticks, where that has a place in the reference.
    """
    done, in_list = [], False
    for block in blocks(lines):
        if block[0] in LISTS:
            in_list = True
            done += [
                block[0],
                *(line for entry in entries(block[1:]) for line in entry_rst(entry, link)),
            ]
        elif block[0].startswith("    ") and not in_list:
            done += ["::", "", *block]
        else:
            in_list = in_list and block[0].startswith(" ")
            done += entry_rst(block, link)
        done.append("")
    return done


def blocks(lines: list[str]) -> list[list[str]]:
    """Paragraphs, which blank lines part. What is indented is one with its own blank lines."""
    found: list[list[str]] = [[]]
    for line in lines:
        last = found[-1]
        indented = line.startswith("    ")
        if not line.strip():
            found.append([])
        elif line in LISTS or (last and last[0] not in LISTS and indented != is_indented(last)):
            found.append([line])
        else:
            last.append(line)
    return [block for block in found if block]


def is_indented(block: list[str]) -> bool:
    return block[-1].startswith("    ")


def entries(lines: list[str]) -> list[list[str]]:
    """The arguments of a list, each with the lines that go on."""
    found: list[list[str]] = []
    for line in lines:
        if line.startswith("        ") and found:
            found[-1].append(line)
        else:
            found.append([line])
    return found


def entry_rst(lines: list[str], link: Callable[[str], str | None]) -> list[str]:
    """Lines of text with links; of an entry of a list, the name stays as it is."""
    text = "\n".join(lines)
    found = ENTRY.fullmatch(text)
    head, text = (found[1] + found[2], found[3]) if found else ("", text)
    text = re.sub(r"^( *)(?=\w{1,2}[.)](?:\s|$))", r"\1\\", escaped(text, link))  # "d." is no list
    return (head + text).split("\n")


def escaped(text: str, link: Callable[[str], str | None]) -> str:
    def piece(part: str) -> str:
        code = part.strip("`")
        if part[:1] != "`":
            part = re.sub(r"([\\*_|])", r"\\\1", part)
            return re.sub(r"^( *)\\(?=\* )", r"\1", part, flags=re.MULTILINE)  # but for lists
        target = link(" ".join(code.split()))
        return f":py:obj:`{code} <{target}>`" if target else f"``{code}``"

    return "".join(map(piece, re.split(r"(``[^`]+``|`[^`]+`)", text)))


# --- names --------------------------------------------------------------------------------------


@cache
def documented() -> dict[str, set[str]]:
    """The full names that the reference has, by each way to say them: room.name, and name alone."""
    found: dict[str, set[str]] = {}
    for room, name, _ in public_names():
        full = f"cheems_ref.{room}.{name}" if name else f"cheems_ref.{room}"
        ways = {full, full.removeprefix("cheems_ref."), name or room}
        for way in ways:
            found.setdefault(way, set()).add(full)
    return found


def target_of(said: str, room: str) -> str | None:
    """The full name that is meant in a docstring of a room; None where that is not settled."""
    own = documented().get(f"{room}.{said}")
    found = own or documented().get(said.removesuffix("()"), set())
    functions = {full for full in found if full.count(".") == 2} or found
    return next(iter(functions)) if len(functions) == 1 else None


# --- the way back ---------------------------------------------------------------------------------


@cache
def sections() -> list[Section]:
    """The sections of all chapters, in order; what stands above the first has the title ""."""
    found: dict[tuple[str, str], set[str]] = {}
    for chapter, notebook in read_notebooks().items():
        for above, cell in cells_under_headings(notebook["cells"]):
            words = set(re.findall(r"\w+", text_of(cell)))
            found.setdefault((chapter, above[0] if above else ""), set()).update(words)
    return [Section(*key, frozenset(words)) for key, words in found.items()]


@cache
def lessons() -> dict[str, list[str]]:
    """The chapters that teach a room, by the rooms' own table."""
    table = (ROOT / "cheems_ref" / "README.md").read_text(encoding="utf-8")
    return {room: numbers.split(", ") for room, numbers in LESSON.findall(table)}


@cache
def claims() -> list[Claim]:
    return read_claims()


@cache
def sources() -> dict[str, set[Place]]:
    """The places that each public name's docstring gives as its source."""
    return {f"{one.room}.{one.name}": one.sources for one in public_names()}


def section_link(chapter: str, title: str) -> str:
    """A link to a section of a chapter, whose title may hold code and formulas."""
    [path] = [path for path in chapters() if chapter_number(path) == chapter]
    words = re.sub(r"[`*$\\]", "", title)
    return f"`{words} <../chapters/{path.stem}.html#{anchor(title)}>`__"


def way_back(room: str, name: str) -> dict[str, str]:
    """Where the course takes up a public name: title of a field: its text, without empty ones.

    A room's own chapters are those that its row in the table of lessons names; where it has no row,
    all chapters are others.
    """
    using: dict[str, list[Section]] = {}
    for section in sections():
        if name in section.words and section.title:
            using.setdefault(section.chapter, []).append(section)
    own = [chapter for chapter in using if chapter in lessons().get(room, [])]
    others = [chapter for chapter in using if chapter not in own]
    places = sources()[f"{room}.{name}"]
    settled: dict[str, list[str]] = {}
    for claim in claims():
        if any(covers(claim, place) for place in places):
            target = f"`{claim['id']} <../claims.html#{claim['id']}>`__"
            settled.setdefault(claim["verdict"], []).append(target)
    tests = [f"``{stem}``" for stem in users(name, (ROOT / "tests").glob("*.py"))]
    planted = users(name, (ROOT / "tests" / "planted").glob("*.py"))
    fields = {
        "Derived in": [in_chapter(chapter, using[chapter]) for chapter in own],
        "Used in": [in_chapter(chapter, using[chapter][:1]) for chapter in others],
        "Claims": [f"{verdict}: {some(found)}" for verdict, found in settled.items()],
        "Tests": [*tests, *(f"``planted/{stem}``" for stem in planted)],
    }
    return {title: "; ".join(items) for title, items in fields.items() if items}


def some(links: list[str]) -> str:
    """The first few of a list; a source such as a whole appendix makes dozens of claims."""
    more = len(links) - SHOWN
    return ", ".join(links[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def in_chapter(chapter: str, found: list[Section]) -> str:
    return f"chapter {chapter}: " + ", ".join(section_link(s.chapter, s.title) for s in found)


# --- what autodoc asks ----------------------------------------------------------------------------


def rewrite(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    _, room, *rest = name.split(".")
    lines[:] = as_rst(lines, lambda said: target_of(said, room))
    if len(rest) == 1 and f"{room}.{rest[0]}" in sources():
        fields = way_back(room, rest[0])
        lines += [f":{title}: {text}" for title, text in fields.items()]


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out what has no words of its own: the fields of a named tuple say "Alias for ..."."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field") else None


def setup(app: Sphinx) -> dict:
    app.connect("autodoc-process-docstring", rewrite, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
