"""How long each section takes: counted from its source, and written where it is claimed.

    python book/minutes.py [--check]

The second cell of a chapter is the table of its minutes, and the README repeats the sums; this
script writes both. `--check` writes nothing and exits with 1 where they are not as counted.

To teach is to say the prose and to show the cells that are not folded (those tagged `setup` or
`figure` are) and the pictures. Alone is to read the prose, to follow every line that is not folded,
and to do the exercises. The rates are fitted to what readers needed, some for each of chapters 01
to 07: most are within a quarter of the count, all within about a third.
"""

import argparse
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

from build import ROOT, read_source
from nbformat import NotebookNode

SITTING = 90  # minutes that a class sits at the most
ITEMS = ("words", "lines", "equations", "figures")
PER_MINUTE = {  # how many of each item one minute holds
    "to teach": dict(words=120, lines=12, equations=4, figures=0.5),
    "alone": dict(words=80, lines=6.5, equations=4, figures=0.5),
}
EXERCISE = {"easy": 8, "medium": 14, "hard": 22}  # minutes alone
TITLE = "**Minutes.**"

EQUATION = re.compile(r"\$\$.*?\$\$", re.DOTALL)
MATHS = re.compile(r"\$[^$]+\$")
GRADE = re.compile(r"^\*\*\d · (\w+)\.\*\*", re.MULTILINE)


class Section(NamedTuple):
    title: str
    teach: int
    alone: int


def count(cell: NotebookNode) -> dict[str, int]:
    """How many of each item a cell holds."""
    items = dict.fromkeys(ITEMS, 0)
    tags = set(cell.metadata.get("tags", []))
    if cell.cell_type == "markdown":
        prose = EQUATION.sub(" ", cell.source)
        items["equations"] = len(EQUATION.findall(cell.source))
        items["words"] = len(re.findall(r"\w[\w'’-]*", MATHS.sub(" x ", prose)))
    elif "plotting.save(" in cell.source:
        items["figures"] = 1
    elif not tags & {"setup", "figure", "versions", "exercise", "check"}:
        items["lines"] = sum(bool(line.strip()) for line in cell.source.splitlines())
    return items


def sections(source: Path) -> list[Section]:
    """The parts of a chapter under `## ` headings, with what stands before the first."""
    cells = [cell for cell in read_source(source).cells if not cell.source.startswith(TITLE)]
    parts = [("Opening", [])]
    for cell in cells:
        if cell.cell_type != "markdown":
            parts[-1][1].append(cell)
            continue
        before, *rest = re.split(r"^## (?=.)", cell.source, flags=re.MULTILINE)
        texts = [(None, before)] + [(text.partition("\n")[0], text) for text in rest]
        for title, text in texts:
            if title:
                parts.append((title, []))
            if text.strip():
                parts[-1][1].append(NotebookNode(cell_type="markdown", source=text, metadata={}))
    return [timed(title, cells) for title, cells in parts]


def timed(title: str, cells: list[NotebookNode]) -> Section:
    items = {item: sum(count(cell)[item] for cell in cells) for item in ITEMS}
    minutes = {
        who: sum(items[item] / rates[item] for item in ITEMS) for who, rates in PER_MINUTE.items()
    }
    grades = [grade for cell in cells for grade in GRADE.findall(cell.source)]
    if grades:  # nobody teaches the exercises
        return Section(title, 0, sum(EXERCISE[grade] for grade in grades))
    return Section(title, *(max(1, round(minutes[who])) for who in PER_MINUTE))


def total(parts: list[Section]) -> tuple[int, int]:
    """To teach and alone, rounded to five minutes."""
    return tuple(5 * round(sum(part[i] for part in parts) / 5) for i in (1, 2))


def sittings(parts: list[Section]) -> list[list[Section]]:
    """The sections of each sitting: as few sittings as hold them all, as even as can be."""
    taught = [part for part in parts if part.teach]
    number = max(1, math.ceil(sum(part.teach for part in taught) / SITTING))
    for limit in range(max(part.teach for part in taught), 10_000):
        packed, left = [[]], limit
        for part in taught:
            if part.teach > left:
                packed.append([])
                left = limit
            packed[-1].append(part)
            left -= part.teach
        if len(packed) <= number:
            return packed


def table(parts: list[Section]) -> str:
    """The cell with a chapter's minutes."""
    teach, alone = total(parts)
    exercises = ", with the exercises" if any(not part.teach for part in parts) else ""
    lines = [
        f"{TITLE} To teach, with the cells folded: about {teach}. Alone{exercises}: about {alone}.",
        "",
        "| section | to teach | alone |",
        "|---|---|---|",
        *(f"| {part.title} | {part.teach or '–'} | {part.alone} |" for part in parts),
    ]
    cuts = [sitting[0].title for sitting in sittings(parts)[1:]]
    if cuts:
        names = " and before ".join(f"*{cut}*" for cut in cuts)
        lines += ["", f"In {len(cuts) + 1} sittings: cut before {names}."]
    return "\n".join(lines)


def with_minutes(source: Path) -> str:
    """The text of a chapter's .py with its second cell as it should be."""
    text = source.read_text()
    cell = "# %% [markdown]\n" + "".join(
        f"# {line}".rstrip() + "\n" for line in table(sections(source)).splitlines()
    )
    first, *rest = re.split(r"^(?=# %%)", text, flags=re.MULTILINE)[1:]
    if rest[0].startswith(f"# %% [markdown]\n# {TITLE}"):
        rest = rest[1:]
    return "".join([first, cell + "\n", *rest])


def readme_with_minutes(text: str, folder: Path) -> str:
    """The README with the sums in its table of chapters."""
    for source in sorted(folder.glob("*.py")):
        teach, alone = total(sections(source))
        row = re.compile(rf"^(\|.*notebooks/{source.stem}\.ipynb.*\| )[^|]*\|$", re.MULTILINE)
        text = row.sub(rf"\g<1>{teach} / {alone} |", text)
    return text


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Count the minutes and write them down.")
    parser.add_argument("--check", action="store_true", help="write nothing, name what differs")
    check = parser.parse_args(arguments).check
    wanted = {source: with_minutes(source) for source in sorted((root / "notebooks").glob("*.py"))}
    readme = root / "README.md"
    wanted[readme] = readme_with_minutes(readme.read_text(), root / "notebooks")
    different = [path for path, text in wanted.items() if path.read_text() != text]
    for path in different:
        print(f"{'other minutes' if check else 'minutes written'}: {path.relative_to(root)}")
        if not check:
            path.write_text(wanted[path])
    return int(check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
