"""Make the web site of the course: chapters and their slides, the package's reference, the claims.

    python -m book.site [--root DIR] [--edition students|instructor]

Everything on it is written elsewhere: the executed notebooks, which are not run again; the
docstrings of `cheems_ref`; claims.toml; the README; index.md beside this script, which lays these
out as pages in book/_build/pages. Sphinx (conf.py) makes the site of them, where every warning is
an error; build_slides.py adds its decks, in slides/, and interactive_pages.py its pages, in play/.
The site opens from the folder and from a server, and asks for nothing elsewhere. The same sources
give the same bytes, wherever they lie.

The students' site is book/_build/site. It has gaps where the exercises have solutions, nothing that
a solution has printed, and no lecturer's guide. The instructor's site is in a folder of its own,
book/_build/site-instructor, so that neither is taken for the other.
"""

import argparse
import posixpath
import re
import shutil
import time
from pathlib import Path, PurePosixPath

import nbformat
from nbformat import NotebookNode
from sphinx.cmd.build import build_main

from book.claims import public_names
from book.drawn_words import IN_THE_DARK, ON_WHITE, with_words
from book.guide.teaching_minutes import sections, total
from book.notebooks.build_notebooks import FOLDED, QUOTED
from book.project import (
    ROOT,
    alt_text,
    chapter_number,
    chapters,
    figure_number,
    labs,
    lectures,
    references,
    without_solutions,
)
from book.site import interactive_pages
from book.site.html_repairs import DARK, in_the_dark, legible_width, repair_html
from book.slides import build_slides
from book.slides.outline import Part, sentences
from book.slides.type_sizes import in_rows

# What the reader of a page sees of folded code, by the tag of its cells.
TOLD = {
    "setup": "set-up",
    "guard": "what is asserted",
    "figure": "the code of this figure",
    "exercise": "a solution",
}
# A link of Markdown; or code, in which brackets mean something else.
LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)|^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
DISPLAYED = re.compile(r"^\$\$(.*?)\$\$", re.DOTALL | re.MULTILINE)
EDITIONS = {
    "students": "This is the students' site: the exercises have gaps to fill in. `make book "
    "EDITION=instructor` makes the one with solutions and the lecturer's guide.",
    "instructor": "This is the instructor's site, with solutions and the lecturer's guide. Keep it "
    "from students; `make book` makes theirs.",
}
FOLDERS = {"students": "site", "instructor": "site-instructor"}  # in book/_build
TO_GUIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)*book/guide/[^)]*\)")
READ_FIRST = "book/manual/reading_the_course.md"  # has the table of what builds on what
CAPTION = 110  # characters of a figure's caption
DOWNLOADS = (
    "Download this chapter: {{download}}`notebook <../downloads/{0}.ipynb>` · "
    "{{download}}`source <../downloads/{0}.py>`. Both run in a clone of the project, which has the "
    "package and the records."
)
SLIDES = (
    '\n\nSlides of this chapter: <a href="../slides/{0}.html">to show</a> · '
    '<a href="../slides/{0}.html?print-pdf">to print</a>.'
)
NOT_FOUND = """---
orphan: true
nosearch: true
---

# There is no such page

Nothing lies at this address. Perhaps the page has another name by now: [the first page](index.md)
leads to all of them, and the search finds a word or the name of a function.
"""
# A server shows that page at the address that was asked for, in whatever folder that would be; what
# it loads and links lies beside it, in the site's own folder.
FROM_ANYWHERE = """<head>
<script>
const base = document.createElement("base");
base.href = location.pathname.replace(
    /\\/((chapters|api|guide|manual|play|slides|_[a-z]+)\\/.*|[^\\/]*)$/, "/");
document.head.append(base);
</script>"""
TREE = """
```{{toctree}}
:hidden:
:caption: {caption}
:maxdepth: {depth}
{entries}
```
"""


def chapter_page(notebook: NotebookNode, name: str, lab: bool = False) -> NotebookNode:
    """A notebook as a page: code folded by the tags of its cells, figures with their words, links.

    A formula that is wider than the page is set in rows, as on a slide.
    """
    page = nbformat.from_dict(notebook)
    drawn = [
        (alt, cell.metadata.get("slide_title", ""))
        for cell in page.cells
        for output in cell.get("outputs", [])
        if (alt := alt_text(output))
    ]
    captions = {alt: caption(name, i, alt, says) for i, (alt, says) in enumerate(drawn, start=1)}
    for cell in page.cells:
        if cell.cell_type == "markdown":
            cell.source = DISPLAYED.sub(set_in_rows, cell.source)
    groups = picture_first(neighbours(page.cells))
    page.cells = [cell for group in groups for cell in laid_out(group, captions)]
    downloads = (DOWNLOADS + SLIDES * (not lab)).format(name) + interactive_pages.links("../", name)
    page.cells.insert(1, nbformat.v4.new_markdown_cell(downloads, id="downloads"))
    return page


def caption(name: str, place: int, alt: str, message: str = "") -> str:
    """A figure's number, its message, and what it is: how its alt text begins."""
    first = re.sub(r"^Left[:,] (.)", lambda start: start[1].upper(), sentences(alt)[0])
    if len(first) > CAPTION:
        ends = [stop.start() for stop in re.finditer(r"[:;,.](?= |$)", first)]
        likely = [end for end in ends if 20 < end <= CAPTION and first[end] in ":;"]
        fitting = [end for end in ends if end <= CAPTION]
        first = first[: (likely or fitting or ends)[0 if likely else -1]] + "."
    bold = f"**{message.rstrip('.')}.** " if message and message[-1] not in "?!" else ""
    return f"{figure_number(name, place)} · {bold}{first}"


def standing(source: Path, root: Path, notebook: NotebookNode) -> str:
    """The line below a title: the chapter's place, its minutes, what comes before and after.

    Links are those of the repository.
    """
    number, lecture = chapter_number(source), {chapter_number(s): s.stem for s in lectures(root)}
    if number not in lecture:
        above = lecture.get(number[:2])
        kind = "A lab of" if source in labs(root) else "A reference for"
        return f"{kind} [chapter {number[:2]}](../{above}.ipynb)." if above else ""
    teach, alone = total(sections(notebook.cells))
    line = f"Chapter {int(number)} of {int(max(lecture))} · {teach} minutes to teach, {alone} alone"
    if (table := root / READ_FIRST).exists():
        [row] = re.findall(
            rf"^\| {number} .*\| *([^|]*?) *\|$", table.read_text("utf-8"), re.MULTILINE
        )
        before = [f"[{one}]({lecture[one]}.ipynb)" for one in numbers(row) if one in lecture]
        line += f" · builds on {', '.join(before)}" if before else ""
    own = [f"[lab {chapter_number(lab)}](labs/{lab.stem}.ipynb)" for lab in labs_of(source, root)]
    return line + (f" · then {' and '.join(own)}" if own else "")


def numbers(words: str) -> list[str]:
    """The chapters that a cell of the table names: "02, 04–06" are four."""
    found = []
    for first, last in re.findall(r"(\d\d)(?:–(\d\d))?", words):
        found += [f"{n:02}" for n in range(int(first), int(last or first) + 1)]
    return found


def labs_of(lecture: Path, root: Path) -> list[Path]:
    return [lab for lab in labs(root) if chapter_number(lab)[:2] == chapter_number(lecture)]


def is_folded(cell: NotebookNode) -> bool:
    return bool(FOLDED & set(cell.metadata.get("tags", [])))


def neighbours(cells: list[NotebookNode]) -> list[list[NotebookNode]]:
    """The cells in groups: folded ones that follow each other, and each other cell by itself."""
    groups = []
    for cell in cells:
        if groups and is_folded(cell) and is_folded(groups[-1][-1]):
            groups[-1].append(cell)
        else:
            groups.append([cell])
    return groups


def picture_first(groups: list[list[NotebookNode]]) -> list[list[NotebookNode]]:
    """Let the folded code above a page's first picture wait for it, if there is no other code."""
    for place, group in enumerate(groups):
        if any(map(is_picture, group)):
            above = [one for one in groups[:place] if one[0].cell_type == "code"]
            texts = [one for one in groups[:place] if one[0].cell_type == "markdown"]
            waiting = [cell for one in above for cell in one]
            if all(is_folded(cell) and not cell.outputs for cell in waiting):
                return [*texts, waiting + group, *groups[place + 1 :]]
            break
    return groups


def is_picture(cell: NotebookNode) -> bool:
    return any("image/png" in output.get("data", {}) for output in cell.get("outputs", []))


def laid_out(group: list[NotebookNode], captions: dict[str, str]) -> list[NotebookNode]:
    """The cells of a page for a group: all that folded ones show, and their code in one fold, which
    stands below a picture and above what was printed.
    """
    tags = [tag for cell in group for tag in cell.metadata.get("tags", []) if tag in TOLD]
    if not tags:
        return group
    told = TOLD[tags[0]] if len(set(tags)) == 1 else "the code"
    told += f" ({len(group)} cells)" * (len(group) > 1)
    folded = nbformat.v4.new_code_cell("\n\n\n".join(cell.source for cell in group))
    folded.id = f"{group[0].id}-code"
    words = {"code_prompt_show": f"Show {told}", "code_prompt_hide": f"Hide {told}"}
    folded.metadata = NotebookNode(tags=["hide-input"], mystnb=words)
    shown = [cell for cell in group if cell.outputs]
    for cell in shown:
        quoted = QUOTED in cell.metadata.get("tags", [])
        cell.metadata = NotebookNode(tags=["remove-input"] + quoted * ["hide-output"])
        if quoted:
            cell.metadata.mystnb = {
                f"code_prompt_{do}": f"{do.title()} what chapter 12 quotes"
                for do in ("show", "hide")
            }
        if alts := [alt for output in cell.outputs if (alt := alt_text(output))]:
            [alt] = alts  # a figure, a cell: what is said of one would be said of all
            cell.metadata.mystnb = {"image": {"alt": alt}, "figure": {"caption": captions[alt]}}
    return [*shown, folded] if any(map(is_picture, group)) else [folded, *shown]


def set_in_rows(formula: re.Match) -> str:
    return f"$${in_rows(Part('math', formula[1])).source}$$"


def page_of(path: PurePosixPath, rooms: set[str]) -> str | None:
    """The page that shows a file of the repository; None where none does."""
    if path.parts[0] == "notebooks" and path.suffix in (".ipynb", ".py"):
        return f"chapters/{path.stem}.ipynb"
    if path.parts[0] == "cheems_ref" and path.stem in rooms:
        return f"api/{path.stem}.rst"
    if path.parts[0] in ("figures", "LICENSE"):
        return str(path)
    if path.parts[:2] in (("book", "guide"), ("book", "manual")):
        return "/".join(path.parts[1:])
    pages = {"README.md": "repository.md", "CONTRIBUTING.md": "contributing.md"}
    pages |= {"cheems_ref/README.md": "api/index.md", "book/claims.toml": "claims.md"}
    return pages.get(str(path))


def with_links(text: str, file: str, page: str, rooms: set[str], root: Path = ROOT) -> str:
    """A Markdown file of the repository with links to pages; of other links, only the words.

    Raises:
        SystemExit: a link leads to no file of the repository.
    """

    def link(found: re.Match) -> str:
        words, target = found.groups()
        if target is None:
            return found[0]
        if "://" in target or target.startswith("#"):
            return found[0]
        target, mark, anchor = target.partition("#")
        named = posixpath.normpath(PurePosixPath(file).parent / target)
        shown = page_of(PurePosixPath(named), rooms)
        if not (root / named).exists():
            raise SystemExit(f"{file} links to {named}, which is not there")
        if shown is None:
            return words
        return f"[{words}]({'../' * page.count('/')}{shown}{mark}{anchor})"

    return LINK.sub(link, text)


def toctree(caption: str, entries: list[str], depth: int = 1) -> str:
    return TREE.format(caption=caption, depth=depth, entries="\n".join(entries))


def released(path: Path, edition: str) -> NotebookNode:
    """A notebook as an edition has it: for students, without solutions and what they print."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if edition == "students" and {"exercise", "check"} & set(tags):
            cell.source = without_solutions(cell.source)
            cell.outputs, cell.execution_count = [], None
            if "exercise" in tags:
                tags.remove("exercise")  # there is nothing to fold
    return notebook


def lay_out(root: Path, pages: Path, edition: str) -> None:
    """Write the pages that Sphinx reads, from what is in the repository."""
    rooms = {one.room for one in public_names(root / "cheems_ref")}
    texts = {}

    def markdown(file: str, page: str, text: str) -> None:
        text = TO_GUIDE.sub(r"\1", text) if edition == "students" else text
        texts[page] = with_links(text, file, page, rooms, root)

    for source in chapters(root):
        name, path = source.stem, source.with_suffix(".ipynb")
        notebook, text = released(path, edition), source.read_text(encoding="utf-8")
        texts[f"downloads/{path.name}"] = nbformat.writes(notebook) + "\n"
        if edition == "students":
            text = without_solutions(text)
        texts[f"downloads/{source.name}"] = text
        where = standing(source, root, notebook)
        notebook = chapter_page(notebook, name, source not in lectures(root))
        title, _, text = notebook.cells[0].source.partition("\n")
        notebook.cells[0].source = f"{title}\n\n{where}\n{text}"
        if below := [lab.stem for lab in labs_of(source, root) if source in lectures(root)]:
            tree = toctree(f"Labs of chapter {chapter_number(source)}", below)
            notebook.cells.append(nbformat.v4.new_markdown_cell(tree, id="labs"))
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                here = path.relative_to(root).as_posix()
                page = f"chapters/{name}.ipynb"
                cell.source = with_links(cell.source, here, page, rooms, root)
        texts[f"chapters/{name}.ipynb"] = nbformat.writes(notebook)

    guide = [path.stem for path in sorted((root / "book" / "guide").glob("*.md"))]
    guide = guide if edition == "instructor" else []
    for name in guide:
        file = f"book/guide/{name}.md"
        text = (root / file).read_text(encoding="utf-8")
        text = re.sub(r"\A# (?=\d\d · )", "# Teaching ", text)  # the chapter has the same title
        markdown(file, f"guide/{name}.md", text)
    manual = sorted((root / "book" / "manual").glob("*.md"))
    for path in manual:
        file = f"manual/{path.name}"
        markdown(f"book/{file}", file, path.read_text(encoding="utf-8"))
    first = (root / "book" / "site" / "index.md").read_text(encoding="utf-8")
    first += f"\n{EDITIONS[edition]}\n"
    first += toctree("Chapters", [f"chapters/{path.stem}" for path in lectures(root)])
    if guide:
        guide.sort(key=("index", "syllabus").count, reverse=True)
        first += toctree("For lecturers", [f"guide/{name}" for name in guide])
    beside = [f"chapters/{path.stem}" for path in references(root)]
    first += toctree("Look up", ["api/index", "claims", *beside])
    work = [*(f"manual/{path.stem}" for path in manual), "repository", "contributing"]
    first += toctree("Work with it", work)
    markdown("book/site/index.md", "index.md", first)
    readme = (root / "README.md").read_text(encoding="utf-8")
    markdown("README.md", "repository.md", re.sub(r"\A# .*", "# The repository", readme))
    contributing = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    markdown("CONTRIBUTING.md", "contributing.md", contributing)
    texts["LICENSE"] = (root / "LICENSE").read_text(encoding="utf-8")

    house = (root / "cheems_ref" / "README.md").read_text(encoding="utf-8")
    house += toctree("Rooms", [*sorted(rooms), "Every public name </genindex>"])
    markdown("cheems_ref/README.md", "api/index.md", house)
    for room in rooms:
        title = f"``{room}``"
        head = f"{title}\n{'=' * len(title)}\n\n"
        texts[f"api/{room}.rst"] = f"{head}.. automodule:: cheems_ref.{room}\n"
    texts["claims.md"] = "# Every claim, and its verdict\n\n```{claims}\n```\n"
    texts["404.md"] = NOT_FOUND

    shutil.rmtree(pages, ignore_errors=True)
    for page, text in texts.items():
        path = pages / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    shutil.copytree(root / "figures", pages / "figures")


def slide_links(source: Path) -> dict[str, str]:
    """What the first and the last slide of a chapter's deck link to."""
    shown = {f"../chapters/{source.stem}.html": "the chapter"}
    for page in interactive_pages.PAGES:
        if page.chapter == source.stem:
            shown[f"../play/{page.name}.html"] = f"to play with: {page.title}"
    return shown | {"index.html": "all slides", "../index.html": "the course"}


def build(root: Path, edition: str) -> int:
    """Make an edition's site; returns 0, or what Sphinx returns where a page is wrong."""
    output, settings = root / "book" / "_build", root / "book" / "site"
    site = output / FOLDERS[edition]
    pages, unfinished = output / "pages", site.with_suffix(".new")
    lay_out(root, pages, edition)
    shutil.rmtree(unfinished, ignore_errors=True)
    options = ["-q", "-W", "--keep-going", "-E", "-c", str(settings), "-d", str(output / "trees")]
    if failed := build_main([*options, str(pages), str(unfinished)]):
        return failed
    for name in (".buildinfo", ".buildinfo.bak"):  # for a build that goes on, which none does
        (unfinished / name).unlink(missing_ok=True)
    widths = {}
    for drawing in list((unfinished / "_images").glob("*.svg")):
        svg = drawing.read_text(encoding="utf-8")
        widths[drawing.name] = legible_width(svg)
        dark = with_words(in_the_dark(svg), IN_THE_DARK)
        other = drawing.with_name(drawing.stem + DARK)
        other.write_text(dark, encoding="utf-8", newline="\n")
        drawing.write_text(with_words(svg, ON_WHITE), encoding="utf-8", newline="\n")
    for page in unfinished.rglob("*.html"):
        text = repair_html(page.read_text(encoding="utf-8"), widths)
        if page == unfinished / "404.html":
            text = text.replace("<head>", FROM_ANYWHERE, 1)
        page.write_text(text, encoding="utf-8", newline="\n")
    build_slides.make(root, unfinished / "slides", [], links=slide_links)
    interactive_pages.make(root, unfinished / "play")
    shutil.rmtree(site, ignore_errors=True)
    unfinished.rename(site)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m book.site", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder that has notebooks/")
    parser.add_argument("--edition", choices=EDITIONS, default="students")
    options = parser.parse_args(arguments)
    root, start = options.root.resolve(), time.monotonic()
    if failed := build(root, options.edition):
        return failed
    site = root / "book" / "_build" / FOLDERS[options.edition]
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    seconds = time.monotonic() - start
    print(f"{site / 'index.html'}: {size / 2**20:.0f} MB, made in {seconds:.0f} s")
    return 0
