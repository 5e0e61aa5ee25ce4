"""The slides say what the notebooks say: every equation, figure and sentence, and no solution.

Each rule takes a notebook and its deck and returns its complaints, one line each. They are tried on
the chapters, as they are and with mistakes planted in `outline.py` or `type_sizes.py`. How slides
look is tested in a browser, in tests/book.
"""

import ast
import re
import sys
from html import unescape

import pytest
from lessons import stored, tags
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from test_notebooks import STORED as NOTEBOOKS

from book.drawn_words import FILL, IN_THE_DARK, ON_WHITE, WORD, with_words
from book.project import BuildError
from book.slides import build_slides, outline, type_sizes
from book.slides.outline import Deck, Part, Slide, blocks, lead, sentences
from book.slides.type_sizes import choose_sizes

STORED = [path for path in NOTEBOOKS if path.parent.name == "notebooks"]  # others have no slides


def taught(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells before the exercises, and the text before their heading."""
    cells = []
    for cell in notebook.cells:
        before, begins, _ = cell.source.partition("## Exercises")
        if cell.cell_type == "markdown" and begins:
            return [*cells, new_markdown_cell(before)]
        cells.append(cell)
    return cells


def coded(notebook: NotebookNode, *left_out: str) -> list[NotebookNode]:
    """The code cells before the exercises that bear none of the tags."""
    cells = (cell for cell in taught(notebook) if cell.cell_type == "code")
    return [cell for cell in cells if not tags(cell) & {*left_out}]


def prose(notebook: NotebookNode) -> list[str]:
    """The texts before the exercises."""
    return [cell.source for cell in taught(notebook) if cell.cell_type == "markdown"]


def slides_of(chapter: Deck) -> list[Slide]:
    return [slide for _, column in chapter.columns for slide in column]


def shown(chapter: Deck, kind: str) -> list[str]:
    """The sources of all parts of a kind, on the slides as they fit."""
    parts = [part for slide in slides_of(chapter) for part in choose_sizes(slide).slide.parts]
    return [part.source for part in parts if part.kind == kind]


def squeezed(text: str) -> str:
    return "".join(text.split())


def missing(wanted: list[str], found: list[str], what: str) -> list[str]:
    everything = squeezed("".join(found))
    return [f"{what} missing: {text}" for text in wanted if squeezed(text) not in everything]


def shows_what_is_there(notebook: NotebookNode, chapter: Deck) -> list[str]:
    """Statements of cells, and all that a cell printed; nothing of set-up, guards and the like."""
    cells = coded(notebook, "setup", "versions", "check", "guard", "aside")
    outputs = [output for cell in cells for output in cell.outputs]
    texts = [o.get("text") or o.get("data", {}).get("text/plain") or "" for o in outputs]
    texts += [f"{o.ename}: {o.evalue}" for o in outputs if o.output_type == "error"]
    found, printed = shown(chapter, "output"), squeezed("".join(texts))
    complaints = [f"no cell prints {s}" for s in found if squeezed(s) not in printed]
    code = shown(chapter, "code")
    written = {s for cell in cells for s in statements(cell.source)}
    complaints += [f"no cell has {s}" for source in code for s in statements(source) - written]
    return complaints if found and code else [*complaints, "no slide has code, or none a result"]


def statements(source: str) -> set[str]:
    return {ast.dump(statement) for statement in ast.parse(source).body}


def shows_every_equation(notebook: NotebookNode, chapter: Deck) -> list[str]:
    equation = re.compile(r"^\$\$(.*?)\$\$", flags=re.DOTALL | re.MULTILINE)
    found = [in_one_row(source) for source in shown(chapter, "math")]
    wanted = equation.findall("\n\n".join(prose(notebook)))
    return [f"equation missing: {tex}" for tex in wanted if in_one_row(tex) not in found]


def in_one_row(tex: str) -> str:
    """A formula without what sets it in rows."""
    return squeezed(re.sub(r"\\(?:begin|end)\{gathered\}|\\q?quad\b|\\\\", "", tex))


def shows_every_figure(notebook: NotebookNode, chapter: Deck) -> list[str]:
    """With its words, and with its stages; none of an aside."""
    wanted, found = [], []
    for output in (output for cell in coded(notebook, "aside") for output in cell.outputs):
        if svg := output.get("data", {}).get("image/svg+xml"):
            alt = unescape(re.search('aria-label="(.*?)"', svg)[1])
            wanted.append((alt, {*re.findall(r'id="stage-(\d+)', svg)}))
        elif "image/png" in output.get("data", {}):
            wanted.append((output.metadata["image/png"]["alt"], set()))
    own = [slide for slide in slides_of(chapter) if not slide.wanted]  # of no other cell
    for part in (part for slide in own for part in slide.parts):
        if part.kind in ("svg", "png"):
            found.append((part.alt, {*re.findall(r'data-fragment-index="(\d+)"', part.source)}))
    return [] if found == wanted else [f"figures with their stages are {found}, not {wanted}"]


def says_all_prose(notebook: NotebookNode, chapter: Deck) -> list[str]:
    """Every sentence of a paragraph is on a slide, or in the notes of one."""
    parts = [part for slide in slides_of(chapter) for part in slide.parts]
    found = [outline.MARKDOWN.render(part.source) for part in parts if part.kind == "text"]
    found += [slide.notes for slide in slides_of(chapter)]
    paragraphs = [p.source for text in prose(notebook) for p in blocks(text) if p.kind == "text"]
    wanted = [outline.MARKDOWN.renderInline(one) for p in paragraphs for one in sentences(p)]
    return missing(wanted, found, "sentence")


def keeps_solutions_to_itself(notebook: NotebookNode, chapter: Deck) -> list[str]:
    """And asks all exercises, on one slide."""
    solution = re.compile(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", re.DOTALL)
    exercises = [cell for cell in notebook.cells if "exercise" in tags(cell)]
    written = squeezed("".join(shown(chapter, "code") + shown(chapter, "output")))
    solutions = [s for cell in exercises for s in solution.findall(cell.source)]
    solutions += ["BEGIN SOLUTION", "END SOLUTION"]
    complaints = [f"a solution is on a slide: {s}" for s in solutions if squeezed(s) in written]
    asked = re.findall(r"^- \*\*\d · ", "\n".join(shown(chapter, "list")), re.MULTILINE)
    wanted = f"{len(exercises)} exercises, and {len(asked)} on slides"
    return complaints if len(exercises) == len(asked) else [*complaints, wanted]


def is_legible(notebook: NotebookNode, chapter: Deck) -> list[str]:
    """From the back row: code is 28 pixels high, of 720, and short; text 20, formulas 17."""
    complaints = []
    for sized in map(choose_sizes, slides_of(chapter)):
        parts, size = sized.slide.parts, sized.text_size
        code = [part.source for part in parts if part.kind == "code"]
        formulas = [
            type_sizes.maths_size(part.source, size) for part in parts if part.kind == "math"
        ]
        printed = [part for part in parts if part.kind in ("output", "sample")]
        sizes = [type_sizes.printed_size(part.source, sized.code_size) for part in printed]
        small = size < 20 or (code and sized.code_size < 28) or min(formulas, default=17) < 17
        if small or min(sizes, default=18) < 18 or any(len(s.splitlines()) > 12 for s in code):
            complaints.append(f"type of {size} and {sized.code_size} under {sized.slide.head}")
    return complaints


def words_stand_out(notebook: NotebookNode, chapter: Deck) -> list[str]:
    """Words of drawings have a contrast of at least 4.5 to white, or are white on a colour."""
    complaints = []
    for source in shown(chapter, "svg"):
        for word in WORD.finditer(with_words(source, ON_WHITE)):
            for color in FILL.findall(word[1]):
                if color != "#ffffff" and contrast(color, "#ffffff") < 4.5:
                    complaints.append(f"a word in {color}, too pale for a projector")
    return complaints


def contrast(one: str, other: str) -> float:
    """The contrast of two colours by the Web Content Accessibility Guidelines, from 1 to 21."""
    light = []
    for color in (one, other):
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(light) + 0.05) / (min(light) + 0.05)


def fits_a_lecture(notebook: NotebookNode, chapter: Deck) -> list[str]:
    count = len(slides_of(chapter))
    return [f"{count} slides"] if count > 40 else []


RULES = [
    shows_what_is_there,
    shows_every_equation,
    shows_every_figure,
    says_all_prose,
    keeps_solutions_to_itself,
    is_legible,
    words_stand_out,
    fits_a_lecture,
]


def complaints(notebook: NotebookNode) -> list[str]:
    try:
        return [line for rule in RULES for line in rule(notebook, outline.deck_of(notebook))]
    except BuildError as error:
        return [str(error)]


@pytest.mark.parametrize("path", STORED, ids=[path.stem for path in STORED])
def test_chapter(path):
    assert complaints(stored(path)) == []
    chapter = outline.deck_of(stored(path))
    assert chapter.title.startswith(path.stem[:2]) and chapter.minutes[chapter.title] > 0
    heads = [title for title, _ in chapter.columns]
    assert len(heads) == len(set(heads)) and heads[0] == chapter.title


# The rules on trial, with mistakes in the making of the decks.

NOTHING = re.compile("(n)(o)thing")
MISTAKES = {
    "exercises are cells as others are": (outline, "HOMEWORK", "nothing"),
    "long code is shown": (outline, "within", lambda text, limits: True),
    "what cells print is left out": (outline, "printed", lambda cell: []),
    "a row of a formula is lost": (type_sizes, "clauses", lambda tex: tex.split("quad")[:2]),
    "figures are skipped": (outline, "picture", lambda cell: None),
    "stages are not fragments": (outline, "STAGE", NOTHING),
    "paragraphs are lost": (outline.Chapter, "read_paragraph", lambda self, paragraph: None),
    "type is too small to read": (type_sizes, "SIZES", [(12, 9)]),
    "set-up and guards are slides": (outline, "LEFT_OUT", set()),
    "words keep the colours of lines": (sys.modules[__name__], "with_words", lambda svg, _: svg),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_seen(mistake, monkeypatch):
    monkeypatch.setattr(*MISTAKES[mistake])
    assert any(complaints(stored(path)) for path in STORED), "no rule complains"


# Sentences, what leads to a slide, and what a slide holds.


def test_sentences():
    for wanted in (
        ["See eq. 5; then $a. B$ is it.", "(Not. Cut.) So"],
        ["By Dao et al. Their `x. Y` is 1.5 wide.", "**Bold. Still bold.**", "Plain?"],
    ):
        assert sentences("\n ".join(wanted)) == wanted


def test_lead():
    long = "This is the point of the whole paragraph."
    for paragraph, wanted in (
        (f"{long} More words follow.", long),
        ("Short one. Then a second. And a third.", "Short one. Then a second."),
        (f"Words before. {long[:-1]}:", f"{long[:-1]}:"),
        ("**Unroll it.** Put one in the other. So:", "**Unroll it.** So:"),
        (f"(An aside (of two). Said first.) {long} More.", long),
    ):
        assert [part.source for part in lead(paragraph)] == [wanted]
    assert lead(f"Words before. {long[:-1]}:")[0].longer == f"Words before. {long[:-1]}:"
    assert lead(f"{long} {300 * 'X'}.")[0].longer == long


def test_a_remark_says_something_of_the_result_before_it():
    said = "Only two of the four models learn the task."
    assert outline.remark(f"{said} So look:") == (said, "So look:")
    for other in ("Is it so? Yes.", "Now the rest.", "**Step 2.** More.", "As a table:", 250 * "x"):
        assert outline.remark(other) == ("", other)
    output = new_output("stream", text="2\n")
    result, *later = parts_of("## 1 · One\n\nA. B:", new_code_cell("2", outputs=[output]), said)
    assert (result, later) == (["B:", "2", "2", said], [])
    words = [Part(kind, said) for kind in ("text", "remark")]
    crowded = [words[0], Part("output", "\n".join(15 * "1")), words[1]]
    assert choose_sizes(Slide("cell", "head", crowded)).slide.parts == crowded[:2]


def test_a_title_is_that_of_its_cell_or_of_the_text_beside_it():
    told = dict(metadata={"slide_title": "A message."}), dict(metadata={"slide_title": "Another."})
    cells = [
        new_markdown_cell("# 03 · A"),
        new_markdown_cell("## 1 · One\n\nWords.", **told[0]),
        new_markdown_cell("Code follows:"),
        new_code_cell("x = 1"),
        new_markdown_cell("And again:"),
        new_code_cell("x = 1", **told[1]),
        new_markdown_cell("So does more:", **told[0]),
        new_code_cell("import os", metadata={"tags": ["setup"]}),
        new_code_cell("y = 1"),
        new_markdown_cell("And an equation:\n\n$$a$$", **told[0]),
        new_code_cell("z = 1", **told[1]),
        new_markdown_cell("The last one:"),
        new_code_cell("u = 1"),
    ]
    slides = slides_of(outline.deck_of(new_notebook(cells=cells)))
    assert [slide.message for slide in slides] == [
        "", "A message.", "Another.", "A message.", "Another.", ""
    ]  # fmt: skip
    assert {slide.head for slide in slides[1:]} == {"1 · One"}


def test_a_title_ends_at_the_next_heading_of_its_cell():
    cells = [
        new_markdown_cell("# 03 · A"),
        new_markdown_cell(
            "## Summary\n\n- A word.\n\n## Exercises\n\n**1 · easy.** *Show.* Do.",
            metadata={"slide_title": "A message."},
        ),
    ]
    slides = slides_of(outline.deck_of(new_notebook(cells=cells)))
    assert [slide.message for slide in slides if slide.head == "Summary"] == ["A message."]
    assert [slide.message for slide in slides if slide.head == "Exercises"] == [""]


def numbers_in_a_title_alone(notebook: NotebookNode) -> list[str]:
    """Titles with a number that nothing under the same heading says, prints or computes."""
    complaints, titles, told = [], [], ""
    for cell in [*notebook.cells, new_markdown_cell("## end")]:
        if cell.cell_type == "markdown" and re.search(r"^## ", cell.source, re.MULTILINE):
            found = {*re.findall(NUMBER, told)}
            complaints += [t for t in titles if {*re.findall(NUMBER, t)} - found]
            titles, told = [], ""
        titles += [cell.metadata["slide_title"]] if "slide_title" in cell.metadata else []
        told += f"\n{cell.source}\n"
        for output in cell.get("outputs", []):
            told += output.get("text") or output.get("data", {}).get("text/plain", "")
    return complaints


NUMBER = r"\d+(?:[.,]\d+)*"
COUNTED = {  # a number of the picture, and a quotient
    "Two short lists of scores find 6 neurons among 64",
    "We train on some 350 times fewer tokens than WM",
}


@pytest.mark.parametrize("path", STORED, ids=[path.stem for path in STORED])
def test_the_numbers_of_a_title_stand_in_its_section(path):
    assert {*numbers_in_a_title_alone(stored(path))} <= COUNTED


def test_a_stale_number_in_a_title_is_seen():
    prose = new_markdown_cell("## 1\nOf 422 claims, 193 hold.")
    prose.metadata["slide_title"] = "Of 422 claims, 193 hold"
    assert not numbers_in_a_title_alone(new_notebook(cells=[prose]))
    prose.metadata["slide_title"] = "Of 420 claims, 193 hold"
    assert numbers_in_a_title_alone(new_notebook(cells=[prose])) == ["Of 420 claims, 193 hold"]


def test_no_slide_speaks_of_folded_cells():
    text = "A folded cell has the rest. The sum is:", new_code_cell("x = 1")
    assert parts_of("## 1 · One\n\nWords.", *text)[0] == ["The sum is:", "x = 1"]
    assert outline.remark("It is (folded cell). So.") == ("", "It is (folded cell). So.")
    assert outline.opening("It is so. The folded cells show it. More.") == "It is so."


def test_an_exercise_is_its_name_and_its_first_sentence():
    one = "**1 · easy.** *How many?* Count\nthe `a, b` in $x + y$. Use pencil and paper."
    assert outline.in_one_line(one) == "**1 · easy.** *How many?* Count the `a, b` in $x + y$."
    with pytest.raises(BuildError, match="needs a name"):
        outline.in_one_line("**1 · easy.** Write a *small* mask.")
    twelve = " ".join(["word"] * 12)
    assert outline.in_one_line(f"**1 · easy.** *A.* {twelve}.").endswith(f"{twelve}.")
    for wrong in (f"{twelve} more.", "Find the sum"):
        with pytest.raises(BuildError, match="at most 12 words"):
            outline.in_one_line(f"**1 · easy.** *A.* {wrong}")


TURNED = (
    '<g transform="translate(10 20) rotate(-90) scale(0.1 -0.1)">'
    '<use transform="translate(40 0)"/></g>'
)


def test_small_words_of_a_drawing_grow_about_their_middle():
    assert build_slides.legible(TURNED, 2.0) == TURNED  # 10 points, 20 pixels
    x, y, size = re.search(
        r"translate\((\S+) (\S+)\) rotate\(-90\) scale\((\S+) ", build_slides.legible(TURNED, 1.2)
    ).groups()
    assert float(size) == 0.15  # 18 pixels
    assert float(x) == 10 and float(y) == 22.5  # 100 hundredths of 10 points long, half of it 5


def test_words_are_darker_than_lines_and_lighter_in_the_dark():
    word = '<g style="fill: #e69f00" transform="translate(1 2) scale(0.1 -0.1)"></g>'
    line = '<path style="stroke: #e69f00; fill: #e69f00"/>'
    assert with_words(word + line, ON_WHITE) == word.replace("e69f00", "765100") + line
    assert contrast("#e69f00", "#ffffff") < 2.3
    assert min(contrast(color, "#ffffff") for color in ON_WHITE.values()) > 7
    assert min(contrast(color, "#131416") for color in IN_THE_DARK.values()) > 7


def test_a_question_hides_its_answer_until_the_next_press():
    asked, found = Part("text", "Which one?"), Part("output", "2")
    shown = [build_slides.shown(part, 30, 28, 0, None, "") for part in (asked, found)]
    assert 'class="fragment output"' in build_slides.uncovered([asked, found], shown)[1]


def parts_of(*cells: str | NotebookNode) -> list[list[str]]:
    """Of each slide below the title the sources of its parts."""
    cells = [new_markdown_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    chapter = outline.deck_of(new_notebook(cells=[new_markdown_cell("# 03 · A"), *cells]))
    return [[part.source for part in slide.parts] for slide in slides_of(chapter)[1:]]


def test_an_equation_stands_above_its_cell_and_exercises_are_a_list():
    page = new_output("execute_result", {"text/html": "<p>", "text/plain": "<HTML>"})
    printed = new_output("stream", text="✓ one = one\n")
    task = "### BEGIN SOLUTION\n2\n### END SOLUTION"
    assert parts_of(
        "## 1 · One\n\nWords.",
        new_code_cell("HTML('<p>')", outputs=[page]),
        "First. So:\n\n$$a = b$$",
        new_code_cell("x = 1  # fmt: skip", outputs=[printed]),
        "## Exercises\n\n**1 · easy.** *Twice.* Double it.",
        new_code_cell(task, metadata={"tags": ["exercise"]}),
        new_code_cell("assert f(1) == 2", metadata={"tags": ["check"]}),
    ) == [
        ["First. So:", "a = b", "x = 1", "✓ one = one"],
        ["- **1 · easy.** *Twice.* Double it."],
    ]


def test_an_equation_waits_for_no_cell_under_another_title():
    one, other = (
        new_markdown_cell(source, metadata={"slide_title": title})
        for title, source in (("Here.", "## 1 · One\n\nSo:\n\n$$a$$"), ("There.", "Now:"))
    )
    hidden = new_code_cell("check", metadata={"tags": ["guard"]})
    cells = [new_markdown_cell("# 01 · T"), one, hidden, other, new_code_cell("x = 1")]
    (_, _), (_, slides) = outline.deck_of(new_notebook(cells=cells)).columns
    shown = [(slide.message, [part.source for part in slide.parts]) for slide in slides]
    assert shown == [("Here.", ["So:", "a"]), ("There.", ["Now:", "x = 1"])]


def test_a_quotation_has_its_verdict_below_it_and_a_title_no_half_sentence():
    text = "> a\n\nIt holds. More.\n\n> b\n\n- It does not.\n\nThis leads on:"
    assert parts_of("## 1 · One\n\nWords.", text, new_code_cell("1")) == [
        ["> a", "It holds. More."],
        ["> b", "- It does not."],
        ["This leads on:", "1"],
    ]
    assert parts_of("## 1 · One\n\n**Question.** Is it so? The state is\n\n$$h$$") == [
        ["The state is", "h"],
    ]
    assert parts_of("## 1 · One\n\n**Question.** Is it so? The state is") == [
        ["**Question.** Is it so?"]
    ]


def test_the_words_that_open_a_section_become_notes():
    deck = outline.deck_of(
        new_notebook(
            cells=[
                new_markdown_cell("# 03 · A"),
                new_markdown_cell("## 1 · One\n\nWords.\n\nThe sum is:\n\n$$a$$\n\n$$b$$\n\n$$c$$"),
            ]
        )
    )
    first, second = deck.columns[1][1]
    assert "Words." in first.notes and "Words." not in [part.source for part in first.parts]
    assert first.opens and not second.opens


SVG = (
    '<svg role="img" aria-label="A." viewBox="0 0 {width} 400">'
    '<g transform="translate(10 20) scale({size} -{size})"></g></svg>'
)


def with_figure(*cells: NotebookNode, width: int = 340, size: float = 0.1) -> list[Slide]:
    """The slides of a section with a figure, among these cells where "figure" stands."""
    data = {"image/svg+xml": SVG.format(width=width, size=size)}
    drawn = new_code_cell(
        "draw()", metadata={"tags": ["figure"]}, outputs=[new_output("display_data", data)]
    )
    cells = [drawn if cell == "figure" else new_markdown_cell(cell) for cell in cells]
    notebook = new_notebook(cells=[new_markdown_cell("# 03 · A\n\n## 1 · One\n\nWords."), *cells])
    return [choose_sizes(slide).slide for slide in outline.deck_of(notebook).columns[1][1]]


def test_a_figure_stands_beside_the_equations_of_its_section():
    equation = "It is so:\n\n$$a$$"
    for cells in ((equation, "Look at it:", "figure"), ("Look at it:", "figure", equation)):
        slides = with_figure(*cells)
        drawn = {slide.kind: bool(slide.beside) for slide in slides}
        assert drawn == {"statement": True, "figure": False}
        assert all(type_sizes.has_picture(slide) and slide.figure == 1 for slide in slides)
    before = with_figure(equation, "Which is it?", "figure")[0]
    assert before.beside is None  # it would give the answer away
    elsewhere = with_figure("Look at it:", "figure", "### Other\n\n" + equation)[-1]
    assert elsewhere.beside is None
    table = with_figure("Look at it:", "figure", "All:\n\n| a |\n|---|\n| b |")[-1]
    assert table.beside is None


def test_a_cell_asks_for_a_figure_that_its_slide_shows_at_a_stage():
    """Beside words, below what a cell printed; not for the slide of another cell."""
    stages = "".join(f'<g id="stage-{n}-1"><path/></g>' for n in (1, 2, 3))
    svg = SVG.format(width=340, size=0.2).replace("<g t", f"{stages}<g t")
    drawn = [new_output("display_data", {"image/svg+xml": svg})]
    printed = [new_output("stream", text="2\n")]
    tags, asked = {"tags": ["figure"]}, {"slide_figure": "03_steps:2"}
    cells = [
        new_markdown_cell("# 03 · A"),
        new_markdown_cell("## 1 · One\n\nWords.\n\nIt is so:"),
        new_code_cell("1 + 1", outputs=printed, metadata=asked),
        new_markdown_cell("It is 2.\n\nOnce more:"),
        new_code_cell("1 + 1", outputs=printed),
        new_markdown_cell("At last:\n\n$$a$$", metadata=asked),
        new_markdown_cell("## 2 · Two\n\nLook:"),
        new_code_cell('show("03_steps")', outputs=drawn, metadata=tags),
        new_markdown_cell("## 3 · Three\n\nA section of one sentence.", metadata=asked),
    ]
    columns = outline.deck_of(new_notebook(cells=cells)).columns
    (alone,) = columns[3][1]
    assert alone.kind == "statement" and type_sizes.has_picture(alone)
    below, without, words = columns[1][1]
    assert [part.kind for part in below.parts] == ["text", "code", "output", "svg", "remark"]
    assert choose_sizes(words).slide.beside and not without.beside and len(without.parts) == 3
    assert words.figure == below.figure == 1
    for shown in (words.beside.source, below.parts[3].source):
        hidden = [bool(re.search(f'stage-{n}-1" display="none"', shown)) for n in (1, 2, 3)]
        assert hidden == [False, False, True] and "fragment" not in shown
    cells[2].metadata["slide_figure"] = "03_steep"
    with pytest.raises(BuildError, match="under '1 · One': the chapter shows no figure '03_steep'"):
        outline.deck_of(new_notebook(cells=cells))


def test_a_picture_stands_below_its_words_where_it_is_as_large_there():
    for width, below in ((480, False), (600, True)):  # 1.2 and 1.5 times as wide as high
        cells = "It is so:\n\n$$a$$", "Look at it:", "figure"
        slide = with_figure(*cells, width=width, size=0.2)[0]
        assert bool(slide.beside) == (not below) and type_sizes.has_picture(slide)
        assert (slide.parts[-1].kind == "svg") == below


def test_a_picture_beside_words_is_left_out_where_it_is_hard_to_read():
    cells = "Look at it:", "figure", "It is so:\n\n$$a$$"
    assert with_figure(*cells, width=400, size=0.078)[-1].beside  # 12 pixels, drawn at 14
    assert not with_figure(*cells, width=400, size=0.077)[-1].beside
    long = "Look at it:", "figure", "It is so:\n\n$$" + 60 * "a" + "$$"
    assert not with_figure(*long, width=400)[-1].beside


# The least share of a deck's slides that show a figure. The aim is a third; a deck with a smaller
# number here hasn't reached it.
SHARES = {
    "00": 1 / 2, "01": 1 / 3, "02": 1 / 3, "03": 2 / 3, "04": 1 / 3, "05": 1 / 3, "06": 1 / 3,
    "07": 1 / 3, "08": 1 / 3, "09": 1 / 3, "10": 2 / 3, "11": 1 / 2, "12": 2 / 3,
}  # fmt: skip


@pytest.mark.parametrize("path", STORED, ids=[path.stem for path in STORED])
def test_share_of_slides_with_a_figure(path):
    slides = [choose_sizes(slide).slide for slide in slides_of(outline.deck_of(stored(path)))]
    share = sum(map(type_sizes.has_picture, slides)) / len(slides)
    assert share >= SHARES[path.stem[:2]], f"{share:.0%}"


# Fitting.


def test_short_slides_have_large_type_and_code_makes_room():
    words = Part("text", "A few words.")
    sized = choose_sizes(Slide("statement", "head", [words]))
    assert (sized.text_size, sized.code_size) == type_sizes.SIZES[0]
    cell = Part("code", "\n".join(f"value_{i} = {i}" for i in range(10)))
    printed = Part("output", "\n".join(f"line {i}" for i in range(12)))
    sized = choose_sizes(Slide("cell", "head", [words, cell, printed]))
    assert sized.slide.parts == [words, printed] and sized.code_size == 28
    with pytest.raises(BuildError, match="too large for a slide, under 'head'"):
        choose_sizes(Slide("cell", "head", [Part("sample", "line\n" * 80)]))


# The HTML.


def test_what_is_shown_is_escaped_and_kept_together():
    def html(kind: str, source: str) -> str:
        return build_slides.shown(Part(kind, source), 30, 20, 0, None, "")

    assert html("math", "a < b") == '<div class="math" style="font-size: 30px">\\[a &lt; b\\]</div>'
    assert "&lt;" in html("code", "a < b")
    assert '<span class="math">\\(a &lt; b\\)</span>' in html("text", "$a < b$")
    assert '<span class="bound">(<span class="math inline">' in html("text", "where ($x$), and")
    verdicts = build_slides.verdicts("✓ a < b\n✗ c: caught\nplain\nValueError: odd")
    assert verdicts.splitlines() == [
        '<span class="right">✓ a &lt; b</span>',
        '<span class="wrong">✗ c: caught</span>',
        "plain",
        '<span class="error">ValueError: odd</span>',
    ]
