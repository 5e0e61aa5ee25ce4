"""The slides say what the notebooks say: all of it, nothing else, and no solution.

Each rule takes a notebook and its deck and returns its complaints, one line each. They are tried on
the chapters, and on a small notebook whose deck is made with one mistake planted in the rules of
`book/deck.py` or `book/fit.py`. How slides look is tested in a browser, in tests/book.
"""

import re
from base64 import b64decode
from html import unescape

import deck
import fit
import nbformat
import pytest
import slides
from build import ROOT, BuildError
from deck import Deck, Part, Slide, blocks, lead, sentences
from fit import Sized, fitted, halves
from lessons import tags
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from test_notebooks import STORED

PIXEL = (  # a PNG of one
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)


def taught(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells before the exercises; the text of a cell in which they begin is cut there."""
    cells = []
    for cell in notebook.cells:
        before, begins, _ = cell.source.partition("## Exercises")
        if cell.cell_type == "markdown" and begins:
            return [*cells, new_markdown_cell(before)]
        cells.append(cell)
    return cells


def shown(chapter: Deck, kind: str) -> list[str]:
    """The sources of all parts of a kind, on the slides as they are divided."""
    return [
        part.source
        for _, column in chapter.columns
        for slide in column
        for sized in fitted(slide)
        for part in sized.slide.parts
        if part.kind == kind
    ]


def squeezed(text: str) -> str:
    return "".join(text.split())


def missing(wanted: list[str], found: list[str], what: str) -> list[str]:
    everything = squeezed("".join(found))
    return [f"{what} missing: {text}" for text in wanted if squeezed(text) not in everything]


def shows_every_check(notebook: NotebookNode, chapter: Deck) -> list[str]:
    wanted = [
        line
        for cell in taught(notebook)
        if cell.cell_type == "code" and not tags(cell) & {"setup", "versions", "check"}
        for output in cell.outputs
        if output.output_type == "stream"
        for line in output.text.splitlines()
        if line.strip()
    ]
    return missing(wanted, shown(chapter, "output"), "printed line")


def shows_every_error(notebook: NotebookNode, chapter: Deck) -> list[str]:
    errors = [
        f"{output.ename}: {output.evalue}"
        for cell in taught(notebook)
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "error"
    ]
    return missing(errors, shown(chapter, "output"), "error")


def shows_every_equation(notebook: NotebookNode, chapter: Deck) -> list[str]:
    text = "\n\n".join(c.source for c in taught(notebook) if c.cell_type == "markdown")
    wanted = re.findall(r"^\$\$(.*?)\$\$", text, flags=re.DOTALL | re.MULTILINE)
    found = [in_one_row(source) for source in shown(chapter, "math")]
    return [f"equation missing: {tex}" for tex in wanted if in_one_row(tex) not in found]


def in_one_row(tex: str) -> str:
    """A formula without what sets it in rows."""
    return squeezed(re.sub(r"\\(?:begin|end)\{gathered\}|\\q?quad\b|\\\\", "", tex))


def shows_every_cell(notebook: NotebookNode, chapter: Deck) -> list[str]:
    hidden = {"setup", "versions", "check", "figure", "exercise"}
    wanted = [
        re.sub(r"# fmt: \w+", "", c.source)
        for c in taught(notebook)
        if c.cell_type == "code" and not tags(c) & hidden and not deck.is_page(c)
    ]
    return missing(wanted, shown(chapter, "code"), "cell")


def shows_every_figure(notebook: NotebookNode, chapter: Deck) -> list[str]:
    data = [
        (output.data, output.metadata)
        for cell in taught(notebook)
        if cell.cell_type == "code"
        for output in cell.outputs
        if "data" in output and any(mime.startswith("image/") for mime in output.data)
    ]
    parts = [
        part
        for _, column in chapter.columns
        for slide in column
        for part in slide.parts
        if part.kind in ("svg", "png")
    ]
    if len(parts) != len(data):
        return [f"{len(data)} figures, and {len(parts)} on slides"]
    complaints = []
    for part, (picture, about) in zip(parts, data, strict=True):
        if "image/svg+xml" in picture:
            stages = set(re.findall(r'id="stage-(\d+)', picture["image/svg+xml"]))
            if set(re.findall(r'data-fragment-index="(\d+)"', part.source)) != stages:
                complaints.append(f"stages of a figure are lost: {part.alt}")
        else:
            stored = about["image/png"].get("stages", [])
            if len(part.layers) != max(1, len(stored)):
                complaints.append(f"layers of a figure are lost: {part.alt}")
        svg = unescape(picture.get("image/svg+xml", ""))
        if part.alt not in (svg or about["image/png"]["alt"]) or not part.alt:
            complaints.append(f"a figure has another alt text: {part.alt!r}")
    return complaints


def says_all_prose(notebook: NotebookNode, chapter: Deck) -> list[str]:
    """Every paragraph is on a slide, or in the notes of one."""
    everything = "".join(
        slide.notes
        + "".join(deck.MARKDOWN.render(p.source) for p in slide.parts if p.kind == "text")
        for _, column in chapter.columns
        for slide in column
    )
    return [
        f"neither shown nor said: {part.source}"
        for cell in taught(notebook)
        if cell.cell_type == "markdown" and not cell.source.startswith(deck.MINUTES)
        for part in blocks(cell.source)
        if part.kind == "text"
        and squeezed(deck.MARKDOWN.render(part.source)) not in squeezed(everything)
        and not all(
            squeezed(deck.MARKDOWN.renderInline(sentence)) in squeezed(everything)
            for sentence in sentences(part.source)
        )
    ]


def keeps_solutions_to_itself(notebook: NotebookNode, chapter: Deck) -> list[str]:
    exercises = [c for c in notebook.cells if c.cell_type == "code" and "exercise" in tags(c)]
    slides_of_them = [s for _, column in chapter.columns for s in column if s.kind == "exercise"]
    complaints = []
    if len(exercises) != len(slides_of_them):
        complaints.append(f"{len(exercises)} exercises on {len(slides_of_them)} slides")
    written = squeezed("".join(shown(chapter, "code") + shown(chapter, "output")))
    if "BEGINSOLUTION" in written or "ENDSOLUTION" in written:
        complaints.append("a mark of a solution is on a slide")
    for cell in exercises:
        solutions = re.findall(
            r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", cell.source, flags=re.DOTALL
        )
        if any(squeezed(solution) in written for solution in solutions):
            complaints.append(f"a solution is on a slide: {cell.source}")
    return complaints


def is_legible(notebook: NotebookNode, chapter: Deck) -> list[str]:
    """Code is 18 pixels high or more, of 720; text 20, formulas 17."""
    return [
        f"type of {sized.text_size} and {sized.code_size} under {slide.head}"
        for _, column in chapter.columns
        for slide in column
        for sized in fitted(slide)
        for coded in [{part.kind for part in sized.slide.parts} & {"code", "output", "sample"}]
        if sized.text_size < 20
        or (coded and sized.code_size < 18)
        or any(
            fit.maths_size(part.source, sized.text_size) < 17
            for part in sized.slide.parts
            if part.kind == "math"
        )
    ]


RULES = [
    shows_every_check,
    shows_every_error,
    shows_every_equation,
    shows_every_cell,
    shows_every_figure,
    says_all_prose,
    keeps_solutions_to_itself,
    is_legible,
]


@pytest.mark.parametrize("path", STORED, ids=[path.stem for path in STORED])
def test_chapter(path):
    notebook = nbformat.read(path, as_version=4)
    chapter = deck.deck_of(notebook)
    assert [line for rule in RULES for line in rule(notebook, chapter)] == []
    assert chapter.title.startswith(path.stem[:2]) and chapter.minutes[chapter.title] > 0
    heads = [title for title, _ in chapter.columns]
    assert len(heads) == len(set(heads)) and heads[0] == chapter.title


# The rules on trial: a small notebook, and what they say to mistakes in the making of its deck.


def code(source: str, *outputs: NotebookNode, tag: str = "") -> NotebookNode:
    return new_code_cell(source, outputs=list(outputs), metadata={"tags": [tag]} if tag else {})


def said(text: str) -> NotebookNode:
    return new_output("stream", name="stdout", text=text)


CLAUSES = [f"{name} = {'+'.join('abcdefghijklmnopq')}," for name in "uvw"]
LONG_FORMULA = "$$" + r" \qquad ".join(CLAUSES) + "$$"


def small_notebook() -> NotebookNode:
    svg = (
        '<svg viewBox="0 0 9 9" aria-label="a &quot;line&quot;"><g id="stage-1-0"><path/></g></svg>'
    )
    drawn = new_output("display_data", {"image/svg+xml": svg})
    layer = {"png": PIXEL, "box": [0, 0, 1, 1]}
    pixels = new_output(
        "display_data",
        {"image/png": PIXEL},
        metadata={"image/png": {"alt": "two layers", "stages": [layer, layer]}},
    )
    failed = new_output("error", ename="ValueError", evalue="odd: 3", traceback=["..."])
    value = new_output("execute_result", {"text/plain": "5"}, execution_count=1)
    return new_notebook(
        cells=[
            new_markdown_cell(
                "# 03 · Small\n\n**A claim.** When you are through you can\n\n- add;"
            ),
            new_markdown_cell("**Minutes.** To teach: about 9.\n\n| 1 · One | 4 | 6 |"),
            code("import torch", said("not shown\n"), tag="setup"),
            new_markdown_cell(
                "## 1 · One\n\nFirst words. So:\n\n$$a = b. \\tag{3.1}$$\n\nIn between."
            ),
            code("x = 1\nprint(x)", said("✓ one = one\n✗ two: caught\n")),
            new_markdown_cell("Said before the picture."),
            code("plotting.save()", drawn, tag="figure"),
            code("plotting.save()", pixels, tag="figure"),
            new_markdown_cell(
                "Two more.\n\n$$c = d$$\n\nWords.\n\n" + LONG_FORMULA + "\n\nLast words."
            ),
            code("2 + 3", value),
            code("int('odd')", failed, tag="raises-exception"),
            new_markdown_cell("The end of the section."),
            new_markdown_cell("## Exercises\n\n**1 · easy.** Double it.\n\n(Hint: add.)"),
            code(
                'def f(x):\n    """Twice."""\n    ### BEGIN SOLUTION\n'
                "    return x + x\n    ### END SOLUTION",
                tag="exercise",
            ),
            code("assert f(1) == 2", said("graded\n"), tag="check"),
        ]
    )


def complaints(notebook: NotebookNode) -> list[str]:
    return [line for rule in RULES for line in rule(notebook, deck.deck_of(notebook))]


def test_small_notebook_passes_and_is_laid_out():
    notebook = small_notebook()
    assert complaints(notebook) == []
    chapter = deck.deck_of(notebook)
    assert chapter.minutes == {"03 · Small": 9, "1 · One": 4}
    kinds = [[(s.kind, [p.kind for p in s.parts]) for s in column] for _, column in chapter.columns]
    assert kinds == [
        [("title", ["text", "text", "list"])],
        [
            ("section", ["text"]),
            ("cell", ["text", "math", "code", "output"]),
            ("figure", ["text", "svg"]),
            ("figure", ["png"]),
            ("statement", ["text", "math"]),
            ("cell", ["text", "math", "code", "output"]),
            ("cell", ["code", "output"]),
        ],
        [("exercise", ["text", "text", "code"])],
    ]
    [_, (_, section), (_, [exercise])] = chapter.columns
    assert [p.source for p in section[1].parts][:2] == ["First words. So:", "a = b. \\tag{3.1}"]
    assert "The end of the section." in section[-1].notes
    assert exercise.parts[-1].source == 'def f(x):\n    """Twice."""\n    ...'
    assert "not shown" not in str(chapter) and "graded" not in str(chapter)


def lose(name: str, kind: str):
    """`deck.<name>` without the parts of a kind."""
    whole = getattr(deck, name)
    return lambda given: [part for part in whole(given) if part.kind != kind]


MISTAKES = {
    "solutions are not found": (deck, "SOLUTION", re.compile("(n)(o)thing")),
    "only a solution's marks are cut": (
        deck,
        "SOLUTION",
        re.compile("### (?:BEGIN|END) SOLUTION()"),
    ),
    "what cells print is left out": (deck, "printed", lambda cell: []),
    "one line of each output is left out": (
        deck,
        "printed",
        lambda cell: [
            Part("output", o.text.partition("\n")[0]) for o in cell.outputs if "text" in o
        ],
    ),
    "equations are skipped": (deck, "blocks", lose("blocks", "math")),
    "a row of a formula is lost": (fit, "clauses", lambda tex: tex.split("quad")[:2]),
    "paragraphs are skipped": (deck, "blocks", lose("blocks", "text")),
    "figures are skipped": (deck, "picture", lambda cell: None),
    "stages are not fragments": (deck, "STAGE", re.compile("(n)(o)thing")),
    "cells with errors are skipped": (deck, "LEFT_OUT", {*deck.LEFT_OUT, "raises-exception"}),
    "exercises are skipped": (deck, "LEFT_OUT", {*deck.LEFT_OUT, "exercise"}),
    "what waits is forgotten": (
        deck.Chapter,
        "release",
        lambda self: setattr(self, "equation", None),
    ),
    "a slide is divided in two and one is lost": (
        fit,
        "at",
        lambda slide, sizes: Sized(Slide(slide.kind, slide.head, slide.parts[:1]), 30, 20),
    ),
    "type is too small to read": (fit, "SIZES", [(12, 9)]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_seen(mistake, monkeypatch):
    where, name, wrong = MISTAKES[mistake]
    if mistake == "exercises are skipped":
        kept = deck.Chapter.read_code
        wrong, where, name = (
            lambda self, cell, marks: None if "exercise" in marks else kept(self, cell, marks),
            deck.Chapter,
            "read_code",
        )
    monkeypatch.setattr(where, name, wrong)
    assert complaints(small_notebook()), "no rule complains"


# Sentences, and what leads to a slide.


@pytest.mark.parametrize(
    "wanted",
    [
        ["One.", "Two!", "Three?", "Four"],
        ["See eq. 5; then $a. B$ is it.", "(Not. Cut.) So"],
        ["By Dao et al. Their `x. Y` is 1.5 wide.", "$A$ too."],
        ["**Bold. Still bold.**", "Plain: *x* here."],
    ],
)
def test_sentences(wanted):
    assert sentences("\n ".join(wanted)) == wanted


LONG = "This is the point of the whole paragraph."


@pytest.mark.parametrize(
    "paragraph, wanted",
    [
        (f"{LONG} More words follow.", LONG),
        ("Short one. Then a second. And a third.", "Short one. Then a second."),
        (f"Words before. {LONG[:-1]}:", f"{LONG[:-1]}:"),
        ("It acts on its input. As code:", "It acts on its input. As code:"),
        ("**Unroll it.** Put one in the other. So:", "**Unroll it.** So:"),
        (f"**{LONG}** More. And more.", f"**{LONG}**"),
        (f"(An aside (of two). Said first.) {LONG} More.", LONG),
        (f"Words before. {LONG[:-1]} and", f"{LONG[:-1]} and"),
    ],
)
def test_lead(paragraph, wanted):
    assert [part.source for part in lead(paragraph)] == [wanted]


def test_an_aside_leads_to_nothing():
    assert lead("(Those of chapter 02.)") == []


def slides_of(*cells: str | NotebookNode) -> list[list[str]]:
    """Of each slide below the title the sources of its parts."""
    cells = [new_markdown_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    chapter = deck.deck_of(new_notebook(cells=[new_markdown_cell("# 03 · A"), *cells]))
    return [[part.source for part in s.parts] for _, column in chapter.columns[1:] for s in column]


def test_what_follows_a_quotation_stands_below_it():
    """Whether it holds: not above the next quotation, nor on a slide of its own."""
    text = "> a\n\nIt holds. More.\n\n> b\n\n- It does not.\n\nThis leads on:"
    assert slides_of("## 1 · One\n\nWords.", text, code("1")) == [
        ["Words."],
        ["> a", "It holds. More."],
        ["> b", "- It does not."],
        ["This leads on:", "1"],
    ]


def test_a_heading_parts_what_stands_before_it_from_what_follows():
    assert slides_of("## 1 · One\n\nWords.\n\nA point.\n\n### Beside\n\n> a") == [
        ["Words."],
        ["> a"],
    ]


def test_a_title_shows_no_sentence_that_an_equation_ends():
    """And no name of what is not on its slide; a numbered section has its title in any case."""
    long = "**Question.** Is it so? The state is"
    assert slides_of(f"## 1 · One\n\n{long}\n\n$$h$$") == [
        ["**Question.** Is it so?"],
        ["**Question.** The state is", "h"],
    ]
    assert slides_of("## 2 · Two\n\n**Question.** It is\n\n$$h$$")[0] == []
    assert slides_of("## 2 · Two\n\n- a\n- b") == [[], ["- a\n- b"]]
    assert slides_of("## Summary\n\n- a\n- b") == [["- a\n- b"]]


def test_a_page_of_html_and_marks_for_the_formatter_are_left_out():
    page = new_output("execute_result", {"text/html": "<p>", "text/plain": "<HTML>"})
    told = code("x = [1,\n     2]  # fmt: skip")
    assert slides_of("## 1 · One\n\nWords.", code("HTML('<p>')", page), told) == [
        ["Words."],
        ["x = [1,\n     2]"],
    ]


# Fitting.


def test_a_long_formula_is_set_in_rows_between_its_clauses():
    a, b, c = (f"{x} = {'+'.join('abcdefghijklmnopqrstuv')}" for x in "xyz")

    def rows(tex):
        return fit.in_rows(Part("math", tex)).source.strip()

    assert rows(rf"{a}, \qquad {b} \tag{{3.1}}") == (
        rf"\begin{{gathered}} {a}, \\ {b} \end{{gathered}} \tag{{3.1}}"
    )
    assert rows(rf"{a} \quad\Longrightarrow\quad {b}") == (
        rf"\begin{{gathered}} {a} \\ \Longrightarrow {b} \end{{gathered}}"
    )
    assert rows(rf"a, \quad b, \qquad {c} = {a}").startswith(
        r"\begin{gathered} a,  \qquad  b, \\ z"
    )
    for left in (r"a \qquad b", rf"{a} + {b}", rf"\text{{{a} \quad {b}}}", rf"{a} \\ \quad {b}"):
        assert rows(left) == left


def test_short_slides_have_large_type_and_long_ones_are_divided():
    words = Part("text", "A few words.")
    [sized] = fitted(Slide("statement", "head", [words]))
    assert (sized.text_size, sized.code_size) == fit.SIZES[0]
    cell = Part("code", "\n".join(f"value_{i} = {i}" for i in range(40)))
    printed = Part("output", "\n".join(f"line {i}" for i in range(30)))
    pieces = fitted(Slide("cell", "head", [words, cell, printed], "said once"))
    assert len(pieces) > 2 and [p.slide.notes for p in pieces] == ["said once"] + [""] * (
        len(pieces) - 1
    )
    assert all(piece.code_size >= fit.SIZES[-1][1] for piece in pieces)
    back = [part for piece in pieces for part in piece.slide.parts]
    assert "\n".join(p.source for p in back if p.kind == "code") == cell.source
    assert "\n".join(p.source for p in back if p.kind == "output") == printed.source


def test_the_widest_line_sets_the_size_of_code():
    [sized] = fitted(Slide("cell", "head", [Part("code", "x" * 100)]))
    assert sized.code_size == 20 and sized.text_size == fit.SIZES[0][0]


def test_a_row_that_is_printed_stays_whole_and_a_message_is_wrapped():
    row, message = "x" * 115, "x" * 130
    assert fit.printed_size(row, 26) == fit.printed_size(f"{row}\n{message}", 26) == 17
    assert fit.printed_size(message, 26) == fit.printed_size("short", 26) == 26


def test_what_cannot_be_divided_is_refused():
    function = "def f():\n" + "\n".join(f"    value_{i} = {i}" for i in range(80))
    with pytest.raises(BuildError, match="too large for a slide, under 'head'"):
        fitted(Slide("cell", "head", [Part("code", function)]))


def test_halves():
    table = Part("table", "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |")
    assert [half.source for half in halves(table)] == [
        "| a | b |\n|---|---|\n| 1 | 2 |",
        "| a | b |\n|---|---|\n| 3 | 4 |",
    ]
    entries = Part("list", "- one\n  goes on\n- two\n- three")
    assert [half.source for half in halves(entries)] == ["- one\n  goes on", "- two\n- three"]
    cell = Part("code", "a = 1\n\n\ndef f():\n    return a")
    assert [half.source for half in halves(cell)] == ["a = 1", "def f():\n    return a"]
    assert halves(Part("text", "One. Two.")) == [Part("text", "One. Two.")]


# The HTML.


def test_no_line_ends_between_a_formula_and_its_brackets_or_stops():
    html = slides.shown(Part("text", "where ($x < y$), and $z$."), 30, 20, 0, None, "")
    html = html.replace('<span class="math inline"><span class="math">', "")
    assert html.replace("</span></span>", "").strip() == (
        r'<p>where <span class="bound">(\(x &lt; y\)),</span> and '
        r'<span class="bound">\(z\).</span></p>'
    )


def test_what_is_printed_is_escaped_and_judged():
    html = slides.verdicts("✓ a < b\n  ✗ c: caught\nplain\nValueError: odd")
    assert html.splitlines() == [
        '<span class="right">✓ a &lt; b</span>',
        '<span class="wrong">  ✗ c: caught</span>',
        "plain",
        '<span class="error">ValueError: odd</span>',
    ]


def test_two_drawings_share_no_id():
    """And what a drawing refers to is in it, under its new name."""
    drawing = (ROOT / "figures" / "01_scan.svg").read_text(encoding="utf-8")
    html = [slides.of_its_own(drawing, name) for name in ("01-002", "01-003")]
    ids = [set(re.findall(r' id="([^"]*)"', one)) for one in html]
    used = [set(re.findall(r'(?:href="#|url\(#)([^")]*)', one)) for one in html]
    assert len(ids[0]) == len(set(re.findall(r' id="([^"]*)"', drawing))) and not ids[0] & ids[1]
    assert all(some and some <= own for some, own in zip(used, ids, strict=True))


def test_layers_lie_over_one_another(tmp_path):
    (tmp_path / "pictures").mkdir()
    png = b64decode(PIXEL)
    part = Part("png", "", 'a "dot"', ((png, (0, 0, 1, 1)), (png, (0.5, 0.25, 0.5, 0.5))))
    html = slides.picture(part, 300.0, tmp_path, "03-001")
    assert [p.name for p in sorted((tmp_path / "pictures").iterdir())] == [
        "03-001-0.png",
        "03-001-1.png",
    ]
    assert 'alt="a &quot;dot&quot;"' in html and 'class="fragment" data-fragment-index="1"' in html
    assert "left: 50.000%; top: 25.000%; width: 50.000%; height: 50.000%" in html
    assert html.startswith('<div class="drawing" style="width: 300.0px; height: 300.0px">')


def test_formulas_and_code_are_escaped():
    def html(kind: str, source: str) -> str:
        return slides.shown(Part(kind, source), 30, 20, 0, None, "")

    assert html("math", "a < b") == '<div class="math" style="font-size: 30px">\\[a &lt; b\\]</div>'
    assert "&lt;" in html("code", "a < b")
    assert '<span class="math">\\(a &lt; b\\)</span>' in html("text", "$a < b$")


def test_a_wide_formula_is_set_smaller():
    wide = " + ".join(["x"] * 20)
    assert fit.maths_size("a = b", 30) == 30 and 18 < fit.maths_size(wide, 30) < 30
