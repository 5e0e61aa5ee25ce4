"""Pages from notebooks, docstrings and README; and a small site, built as a whole."""

import html
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from myst_parser.slugs import github_slugify
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from test_deck import in_one_row

from book import claims
from book.drawn_words import IN_THE_DARK, with_words
from book.project import ROOT, anchor, cells_under_headings, chapter_number, chapters, headings
from book.site import build_site as website
from book.site import html_repairs as markup
from book.site.extensions import api_reference as reference

NOTEBOOKS = {
    path.stem: nbformat.read(path, as_version=4) for path in (ROOT / "notebooks").glob("*.ipynb")
}
PUBLIC = [(one.room, one.name) for one in claims.public_names() if one.name]


# --- chapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(NOTEBOOKS))
def test_a_page_shows_all_of_its_notebook_and_folds_what_is_folded_there(name):
    """Text and open cells stay as they are; what a folded cell shows stands beside its code. A
    figure keeps the words that `plotting.save` is given in the source.
    """
    before = nbformat.writes(NOTEBOOKS[name])
    page = website.chapter_page(NOTEBOOKS[name], name)
    assert nbformat.writes(NOTEBOOKS[name]) == before, "the notebook itself is changed"
    shown, hidden, figures = {cell.id: cell for cell in page.cells}, [], []
    for cell in NOTEBOOKS[name].cells:
        own, tags = shown.get(cell.id), set(cell.metadata.get("tags", []))
        folded = tags & {"setup", "figure", "guard", "exercise"}
        if folded:
            hidden.append(cell.source)
            assert (own is not None) == bool(cell.outputs)
        else:
            assert in_one_row(own.source) == in_one_row(cell.source)
            assert cell.cell_type == "markdown" or own.source == cell.source
        if cell.get("outputs"):
            assert own.outputs == cell.outputs
            assert ("remove-input" in own.metadata.get("tags", [])) == bool(folded)
            drawn = any("image/png" in output.get("data", {}) for output in cell.outputs)
            words = own.metadata.get("mystnb", {}).get("image", {}).get("alt", "").split()
            told = own.metadata.get("mystnb", {}).get("figure", {}).get("caption", "")
            figures += [told] * drawn
            assert bool(words) == drawn
            assert not drawn or (words[0] in own.source and words[-1] in own.source)
    code = [cell.source for cell in page.cells if "hide-input" in cell.metadata.get("tags", [])]
    assert "\n\n\n".join(code) == "\n\n\n".join(hidden)  # all of it, in its order
    number = chapter_number(Path(name)).removeprefix("0")
    assert all(
        told.startswith(f"Figure {number}.{i} · ") and len(told) > 20
        for i, told in enumerate(figures, start=1)
    )


@pytest.mark.parametrize("name", sorted(NOTEBOOKS))
def test_a_page_opens_with_its_picture_and_no_two_folds_meet(name):
    """Title, links, words, and the picture; what draws it is one fold right below."""
    cells = website.chapter_page(NOTEBOOKS[name], name).cells
    first = next(i for i, cell in enumerate(cells) if cell.cell_type == "code")
    assert any("image/png" in output.get("data", {}) for output in cells[first].outputs)
    folded = ["hide-input" in cell.metadata.get("tags", []) for cell in cells]
    assert (True, True) not in pairwise(folded) and folded[first + 1]


def test_neighbours_are_one_fold_which_says_how_many_cells_it_has():
    def cell(source, tags, *outputs):
        return new_code_cell(source, metadata={"tags": tags.split()}, outputs=list(outputs))

    drawn = new_output(
        "display_data", {"image/png": "aaaa"}, metadata={"image/png": {"alt": "A curve."}}
    )
    printed = new_output("stream", text="3\n")
    cells = [
        new_markdown_cell("# 03 · Title"),
        cell("import torch", "setup"),
        new_markdown_cell("Here is a curve:"),
        cell("def draw(): ...", "figure"),
        cell("draw()", "figure", drawn),
        cell("assert True", "guard"),
        new_markdown_cell("## 1 · Three"),
        cell("print(3)", "guard", printed),
        cell("print('3.0')", "guard quoted", printed),
        new_code_cell("1 + 1"),
        cell("def f():\n    return 1", "exercise"),
        cell("f()", "check"),
    ]
    page = website.chapter_page(new_notebook(cells=cells), "03_title")
    del page.cells[1]  # the downloads
    said = [c.metadata.get("mystnb", {}).get("code_prompt_show", c.source) for c in page.cells]
    assert said == [
        *("# 03 · Title", "Here is a curve:", "draw()", "Show the code (4 cells)"),
        *("## 1 · Three", "Show what is asserted (2 cells)", "print(3)"),
        *("Show what chapter 12 quotes", "1 + 1", "Show a solution", "f()"),
    ]
    wanted = ["import torch", "def draw(): ...", "draw()", "assert True"]
    assert page.cells[3].source.split("\n\n\n") == wanted and page.cells[3].outputs == []
    assert page.cells[2].outputs == [drawn] and page.cells[6].outputs == [printed]
    assert page.cells[7].metadata.tags == ["remove-input", "hide-output"]


def test_students_see_no_output_of_a_check(tmp_path):
    """It would be what the solution printed, below a gap."""
    answer = new_output("stream", text="all three are right\n")
    body = "def f():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION"
    cells = [new_code_cell("1 + 1", execution_count=1, outputs=[answer])]
    cells += [new_code_cell(body, execution_count=2, metadata={"tags": ["exercise"]})]
    cells += [
        new_code_cell("f()", execution_count=3, metadata={"tags": ["check"]}, outputs=[answer])
    ]
    path = tmp_path / "03_title.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    shown = {edition: website.released(path, edition).cells for edition in website.FOLDERS}
    assert [cell.outputs for cell in shown["students"]] == [[answer], [], []]
    assert [cell.execution_count for cell in shown["students"]] == [1, None, None]
    assert "NotImplementedError" in shown["students"][1].source
    assert [cell.outputs for cell in shown["instructor"]] == [[answer], [], [answer]]


# --- README ---------------------------------------------------------------------------------------


def test_links_lead_to_pages():
    def shown(text, file="README.md", page="index.md"):
        return website.with_links(text, file, page, {"ssd"})

    name = "03_state_space_duality.ipynb"
    assert shown(f"[a](notebooks/{name})") == f"[a](chapters/{name})"
    with pytest.raises(SystemExit, match="links to notebooks/03_x"):
        shown("[a](notebooks/03_x.ipynb)")
    assert shown("[a](cheems_ref/ssd.py)") == "[a](api/ssd.rst)"
    assert shown("[a](book/claims.toml) [b](LICENSE)") == "[a](claims.md) [b](LICENSE)"
    assert shown("[the rules](tests/conftest.py)") == "the rules"
    for code in ("`experts[i](x)`", "```python\nexperts[i](x)\n```"):
        assert shown(code) == code


# --- docstrings -----------------------------------------------------------------------------------

DOCSTRING = """\
Compute it: y_t = C*h and |x|, as `ssd_chunked` does.

    table   (b, l)   * not a list

See `backend` and `PEER`.

Args:
    l: d.
    x: inputs_ of `h`.
        More of x.

Raises:
    ValueError: `x` is wrong.
"""


def test_a_docstring_becomes_what_autodoc_reads():
    found = "\n".join(
        reference.as_rst(DOCSTRING.splitlines(), {"PEER": "cheems_ref.retrieval.PEER"}.get)
    )
    assert r"y\_t = C\*h and \|x\|, as ``ssd_chunked`` does." in found
    assert "::\n\n    table   (b, l)   * not a list\n" in found
    assert "See ``backend`` and :py:obj:`PEER <cheems_ref.retrieval.PEER>`." in found
    assert "Args:\n    l: \\d.\n    x: inputs\\_ of ``h``.\n        More of x.\n" in found
    assert "Raises:\n    ValueError: ``x`` is wrong." in found
    assert reference.target_of("ssd_chunked", "rope") == "cheems_ref.ssd.ssd_chunked"
    assert reference.target_of("train.train", "model") == "cheems_ref.train.train"
    assert reference.target_of("backend", "ssd") is None


# --- the way back ---------------------------------------------------------------------------------


def test_every_public_name_leads_back_into_the_course():
    """A link to every chapter with a section that uses the name; imports come before sections."""
    below = {
        chapter: {
            word
            for above, cell in cells_under_headings(notebook["cells"])
            if above
            for word in re.findall(r"\w+", "".join(cell["source"]))
        }
        for chapter, notebook in claims.read_notebooks().items()
    }
    for room, name in PUBLIC:
        back = reference.way_back(room, name)
        named = back.get("Derived in", "") + back.get("Used in", "")
        for path in chapters():
            assert name not in below[chapter_number(path)] or f"{path.stem}.html#" in named, name


def test_an_anchor_is_the_one_that_the_site_makes():
    """For every heading of every chapter; a link to another anchor would lead to the page's top."""
    titles = [
        title
        for path in chapters()
        for cell in nbformat.read(path.with_suffix(".ipynb"), as_version=4).cells
        for _, title in headings(cell.source)
        if cell.cell_type == "markdown"
    ]
    assert len(titles) > 200
    assert [title for title in titles if anchor(title) != github_slugify(title)] == []


def test_what_the_lessons_have_is_taken_up_in_the_course():
    """But for some that are for other modules. A definition leads to its derivation and claims."""
    lessons = [one for one in PUBLIC if one[0] in reference.lessons()]
    alone = [name for room, name in lessons if not reference.way_back(room, name)]
    assert len(lessons) > 60 and len(alone) < len(lessons) / 10, alone
    back = reference.way_back("ssd", "ssd_chunked")
    chapter = "../chapters/03_state_space_duality.html#6--all-heads-in-two-dozen-lines"
    assert f"`6 · All heads, in two dozen lines <{chapter}>`__" in back["Derived in"]
    assert "chapter 11" in back["Used in"] and "chapter 03:" not in back["Used in"]
    assert "wm-listing-3-axis" in back["Claims"] and "``test_operators``" in back["Tests"]


# --- the finished page ----------------------------------------------------------------------------


def test_markup_is_mended():
    assert markup.repair_html('<th class="head"><p></p></th>') == "<td></td>"
    wrapper = '<div class="math-wrapper docutils container" id="equation-3.1">'
    twice = wrapper + '\n<div class="math notranslate" id="equation-3.1">'
    assert markup.repair_html(twice).count("equation-3.1") == 1
    rows = "<dt>f(<dl>\n<dd><em>a</em>,</dd>\n<dd><em>b</em>,</dd>\n</dl>\n)</dt>"
    assert (
        "<dl>" not in markup.repair_html(rows)
        and markup.repair_html(rows).count('class="row"') == 2
    )
    figure = '<img alt="A curve." src="../_images/a.svg"/>'
    mended = markup.repair_html(figure)
    assert f'<a class="whole only-light" href="../_images/a.svg">{figure}</a>' in mended
    assert '<a class="whole only-dark" href="../_images/a-dark.svg"><img alt="A curve."' in mended
    drawing = '<svg viewBox="0 0 600 90"><g transform="translate(1 2) scale(0.12 -0.12)"></g></svg>'
    assert markup.legible_width(drawing) == 500  # its words are 12 of 600 high
    wide = markup.repair_html(figure, {"a.svg": 500})
    assert wide.count('style="--legible: 500px"') == 2
    heat_map = figure.replace("svg", "png")
    whole = f'<a class="whole" href="../_images/a.png">{heat_map}</a>'
    assert markup.repair_html(heat_map) == whole
    linked = f'<a href="play/cheems.html">{heat_map}</a>'
    assert markup.repair_html(linked) == linked
    dark = markup.in_the_dark('"#FFFFFF" #222222 #555555 #d55e00')
    greys = markup.in_the_dark("#eeeeee #dcdcdc #bbbbbb")
    assert greys == "#1e1e1e #2a2a2a #404040"  # from nearest to the ground to furthest
    assert dark == '"#131416" #cfd0d0 #b4b7ba #d55e00'
    tints = markup.in_the_dark("#d9f0e8 #8cc4ea #cc79a7 #e69f00")
    assert tints == "#112820 #0b4369 #cc79a7 #e69f00"  # tints are dark, full colours stay
    ground, word = (
        f'<{tag} style="fill: #ffffff" transform="translate(1 2) scale(0.1 -0.1)"></g>'
        for tag in ("path", "g")
    )
    dark = with_words(markup.in_the_dark(ground + word), IN_THE_DARK)
    assert dark == ground.replace("ffffff", "131416") + word  # white words stand on blue, and stay
    formula = r'<span class="math notranslate nohighlight">\(x\)</span>'
    assert markup.repair_html(f"so ({formula}).") == f'so <span class="bound">({formula}).</span>'
    for words in (f"so {formula} is", "<dl><dt>term</dt><dd>what it is</dd></dl>"):
        assert markup.repair_html(words) == words


# --- a small site, made whole ---------------------------------------------------------------------

CHAPTER = [
    "# 04 · Rotary positions",
    "**Minutes.** To teach: about 3. Alone: about 5.",
    "## 1 · One\n\nAs $x^2$ in\n\n$$x \\\\ y \\tag{4.1}$$\n\nand (4.1).",
    "## 2 · Two\n\nSection 1 has equation 4.1, as `cheems_ref/rope.py` says.",
]


def small(root: Path, chapter: list[str] = CHAPTER) -> Path:
    """A project of one chapter and one room, with the real settings of the site."""
    cells = [new_markdown_cell(text, id=f"cell-{i}") for i, text in enumerate(chapter)]
    cells.append(new_code_cell("1 + 1", id="sum", metadata={"tags": ["setup"]}))
    spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = nbformat.writes(new_notebook(cells=cells, metadata={"kernelspec": spec}))
    (root / "notebooks").mkdir(parents=True)
    (root / "notebooks" / "04_rotary_positions.ipynb").write_text(notebook, encoding="utf-8")
    (root / "notebooks" / "04_rotary_positions.py").write_text("# %%\n", encoding="utf-8")
    (root / "cheems_ref").mkdir()
    (root / "figures").mkdir()
    shutil.copy(ROOT / "cheems_ref" / "rope.py", root / "cheems_ref")
    lab = nbformat.writes(new_notebook(cells=[new_markdown_cell("# 04a · More", id="title")]))
    (root / "notebooks" / "labs").mkdir()
    (root / "notebooks" / "labs" / "04a_more.ipynb").write_text(lab, encoding="utf-8")
    (root / "notebooks" / "labs" / "04a_more.py").write_text("# %%\n", encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", root)
    shutil.copytree(ROOT / "book" / "site", root / "book" / "site")
    for name in ("README.md", "cheems_ref/README.md", "CONTRIBUTING.md", "book/site/index.md"):
        (root / name).write_text("# Small\n\n## Part\n")
    for path in (ROOT / "book").glob("*.*"):
        shutil.copy(path, root / "book")
    return root


def build(root: Path, edition: str = "students") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "book.site", "--root", str(root), "--edition", edition]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def two_projects(tmp_path_factory):
    """The same small project in two folders, one with a Makefile, and the site of each."""
    made = []
    for name in ("one", "a longer name/of two"):
        root = small(tmp_path_factory.mktemp("small") / name)
        if not made:
            (root / ".venv").mkdir()
            shutil.copy(ROOT / "Makefile", root)
            for file in ("pyproject.toml", "constraints.txt", ".venv/.ready", ".venv/.book"):
                (root / file).touch()
        assert build(root).returncode == 0
        made.append((root, files(root / "book" / "_build" / "site")))
    return made


def test_two_folders_give_the_same_bytes(two_projects):
    one, two = (site for _, site in two_projects)
    assert one.keys() == two.keys() and len(one) > 30
    assert [name for name in one if one[name] != two[name]] == []


def test_the_small_site_links_what_its_text_names(two_projects):
    site = two_projects[0][1]
    page = site["chapters/04_rotary_positions.html"].decode()
    assert page.count('href="#equation-4.1"') == 3  # the anchor, "(4.1)", "equation 4.1"
    assert r"\[x \\ y \tag{4.1}\]" in html.unescape(page) and "Show set-up" in page
    assert "Chapter 4 of 4 · 5 minutes to teach, 5 alone · then" in page
    lab = site["chapters/04a_more.html"].decode()
    assert 'A lab of <a class="reference internal" href="04_rotary_positions.html">' in lab
    for text in (page, lab):  # the lab is the chapter's child, and comes after it
        assert re.search(r'toctree-l2[^"]*"><a class="[^"]*" href="(04a_more.html)?#?"', text)
    assert 'rel="next" title="04a · More" href="04a_more.html"' in page
    deck = site["slides/04_rotary_positions.html"].decode()
    assert (
        deck.count('href="../chapters/04_rotary_positions.html"') == 2
    )  # its first slide, its last
    assert 'href="../play/memory.html"' in page and 'href="../slides/index.html"' in page
    for link in ("#one", "../api/rope.html", "../slides/04_rotary_positions.html", "04a_more.html"):
        assert f'href="{link}"' in page
    assert b"Rotary positions" in site["slides/04_rotary_positions.html"]
    api = site["api/rope.html"].decode()
    assert 'id="cheems_ref.rope.apply_rope"' in api and "_modules/cheems_ref/rope.html" in api
    assert "Derived in" in api


def test_a_line_says_where_a_chapter_stands(tmp_path):
    for name in ("01_a", "02_b", "03_c", "04_d", "labs/03a_e", "labs/03b_f"):
        path = tmp_path / "notebooks" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    table = tmp_path / website.READ_FIRST
    table.parent.mkdir(parents=True)
    table.write_text("| 01 A | q | – |\n| 03 C | why | 01, 02 |\n| 04 D | how | 01–03 |\n")
    words = new_notebook(cells=[new_markdown_cell("# 03 · C"), new_markdown_cell(600 * "word ")])

    def line(name):
        return website.standing(tmp_path / "notebooks" / f"{name}.py", tmp_path, words)

    minutes = "10 minutes to teach, 10 alone"
    assert line("01_a") == f"Chapter 1 of 4 · {minutes}"
    assert line("03_c") == (
        f"Chapter 3 of 4 · {minutes} · builds on [01](01_a.ipynb), [02](02_b.ipynb)"
        " · then [lab 03a](labs/03a_e.ipynb) and [lab 03b](labs/03b_f.ipynb)"
    )
    assert line("04_d").endswith("[01](01_a.ipynb), [02](02_b.ipynb), [03](03_c.ipynb)")
    assert line("labs/03a_e") == "A lab of [chapter 03](../03_c.ipynb)."


def test_a_caption_is_the_figure_in_short():
    def told(alt):
        return website.caption("03_state_space_duality", 2, alt)

    assert told("One curve. It falls.") == "Figure 3.2 · One curve."
    assert told(f"A curve from the left: {100 * 'x'}.") == "Figure 3.2 · A curve from the left."
    assert told(f"Left, two, {30 * 'x'}, {99 * 'x'}.") == f"Figure 3.2 · Two, {30 * 'x'}."
    assert website.caption("11a_lab", 1, "A square.") == "Figure 11a.1 · A square."
    says = website.caption("03_x", 1, "A square.", "Squares have corners")
    assert says == "Figure 3.1 · **Squares have corners.** A square."


def test_each_edition_has_its_own_folder_and_make_knows_both(two_projects):
    """An instructor's site in the folder of the students' would be published with its solutions."""
    root = two_projects[0][0]

    def are_made():
        asked = {name: ["make", "-q", "book", f"EDITION={name}"] for name in website.FOLDERS}
        return {name for name in asked if subprocess.run(asked[name], cwd=root).returncode == 0}

    assert are_made() == {"students"}
    assert build(root, "instructor").returncode == 0 and are_made() == {"students", "instructor"}
    for edition, folder in (("students", "site"), ("instructor", "site-instructor")):
        page = (root / "book" / "_build" / folder / "index.html").read_text(encoding="utf-8")
        assert f"This is the {edition.rstrip('s')}" in page


def test_a_mistake_stops_the_build(tmp_path):
    for mistake, said in (
        ("[a link](nowhere.md)", "nowhere.md"),
        ("$$x \\tag{4.1}$$", "there are two equations 4.1"),
    ):
        root = small(tmp_path / said, [*CHAPTER, mistake])
        finished = build(root)
        assert finished.returncode != 0 and said in finished.stderr
        assert not (root / "book" / "_build" / "site").exists()
