"""The guard: what nbval lets pass in a stored notebook, and this course does not.

nbval runs every cell and compares what it prints with what is stored. But a notebook that stores
nothing compares nothing, and passes; so does a cell that is tagged to be skipped. Each rule here
takes a notebook and returns its complaints, one line each.

Conventions. Tags come from `ALLOWED_TAGS`. Exactly one cell of a notebook prints the versions of
what it runs on; it is tagged `versions` and `nbval-ignore-output`, stands at the end, and
nothing else may be ignored. A cell that shows an error on purpose is tagged `raises-exception`.
"""

import hashlib
import re
import tomllib
from base64 import b64decode, b64encode
from collections import Counter
from copy import deepcopy
from itertools import zip_longest
from pathlib import Path

import lessons
import pytest
from IPython.display import SVG
from lessons import NOTEBOOKS, code_cells, of_code_cells, stored, tags
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from book.notebooks.build_notebooks import TITLE, read_source
from book.slides.outline import MESSAGE
from book.slides.type_sizes import letters

FOLDERS = "*", "labs/*", "reference/*"
STORED = [path for folder in FOLDERS for path in sorted(NOTEBOOKS.glob(f"{folder}.ipynb"))]

ALLOWED_TAGS = {"aside", "check", "exercise", "figure", "guard", "setup", "raises-exception"}
ALLOWED_TAGS |= {"quoted"}  # with `guard`: what is printed is for the claims of chapter 12 alone
ALLOWED_TAGS |= {"experiment"}  # experiments/ takes what the cell defines
ALLOWED_TAGS |= {"slide"}  # with `figure`: a picture of what was just said or printed
VERSION_TAGS = {"versions", "nbval-ignore-output"}
ALLOWED_TAGS |= VERSION_TAGS

# nbval obeys comments too; PYTEST_VALIDATE_... is what they were called before.
NBVAL_COMMENT = re.compile(r"#\s*(?:NBVAL|PYTEST_VALIDATE)[_-]\w+", re.IGNORECASE)

OF_ONE_MACHINE = {
    "a path of one machine": re.compile(
        r"(?<![\w)])(?<!:/)/(?:home|Users|tmp|root|opt|usr|var|private|mnt)\b"  # no https://home.org
        r"|(?<!\w)[A-Za-z]:\\\w\w"
        r"|\bsite-packages\b"
    ),
    "a memory address": re.compile(r"\bat 0x[0-9a-f]+|\b0x[0-9a-f]{9,}", re.IGNORECASE),
    "a time": re.compile(
        r"(?<![\d:\[])(?:[01]?\d|2[0-3]):[0-5]\d:[0-5]\d(?![\d:])"  # 12:34:56, not x[10:20:30]
        r"|\b(?:19|20)\d\d-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])(?!\d)"  # 2026-01-02
        r"|(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?"
        r"\s?(?:ns|us|[µμ]s|ms|s|sec|secs|seconds?|minutes?)\b"
        r"|\b\d+:\d\d<|\d\s?(?:it/s|s/it)"  # a progress bar
    ),
}
REMOTE_IMAGE = re.compile(
    r"!\[[^\]]*\]\(\s*<?(?:https?:)?//"
    r"|<(?:img|iframe|video|audio|source|script)\b[^>]*\bsrc\s*=\s*[\"']?(?:https?:)?//",
    re.IGNORECASE,
)
# A picture inside HTML is not text: its letters may spell anything.
EMBEDDED = re.compile(r"data:[\w/+.-]+;base64,[\w/+=]+|<svg\b.*?</svg>", re.DOTALL)


def text_of(output: NotebookNode) -> str:
    """What a reader reads of one output: nothing of a picture."""
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    if "image/png" in output.data:
        return ""  # its words are those of the source
    texts = [text for mime, text in output.data.items() if mime.startswith("text/")]
    return EMBEDDED.sub("", "\n".join(texts))


def is_executed_in_order(notebook: NotebookNode) -> list[str]:
    """A stripped notebook passes nbval, since there is nothing to compare."""
    counts = [cell.execution_count for _, cell in code_cells(notebook)]
    if counts == list(range(1, len(counts) + 1)) and counts:
        return []
    return [f"execution counts are {counts}, not 1 to {len(counts)}: run `make course`"]


def has_only_allowed_tags(notebook: NotebookNode) -> list[str]:
    return [
        f"cell {number} has the unknown tag {tag!r}; known are {', '.join(sorted(ALLOWED_TAGS))}"
        for number, cell in enumerate(notebook.cells, start=1)
        for tag in sorted(tags(cell) - ALLOWED_TAGS)
    ]


def titles_its_slides_in_short(notebook: NotebookNode) -> list[str]:
    """A cell's `slide_title` fits one line of a slide; a figure for slides is folded and drawn."""
    complaints = []
    for number, cell in enumerate(notebook.cells, start=1):
        title = cell.metadata.get(TITLE)
        if title is not None and (not title.strip() or letters(title) > MESSAGE):
            complaints.append(
                f"cell {number} has the title {title!r}, not one of 1 to {MESSAGE} letters"
            )
        if {"slide"} <= set(tags(cell)) and "figure" not in tags(cell):
            complaints.append(f"cell {number} has the tag slide, and isn't a figure")
    return complaints


def has_one_version_cell(notebook: NotebookNode) -> list[str]:
    """The one cell whose output may differ between machines prints versions and nothing else. It is
    the last cell, since nobody opens a chapter to read them.
    """
    cells = [cell for _, cell in code_cells(notebook) if tags(cell) & VERSION_TAGS]
    good = [
        tags(cell) == VERSION_TAGS
        and "version" in cell.source
        and [output.output_type for output in cell.outputs] == ["stream"]
        and cell is notebook.cells[-1]
        for cell in cells
    ]
    if good == [True]:
        return []
    return [f"only the last cell has the tags {sorted(VERSION_TAGS)}, and prints versions: {good}"]


def opens_with_its_picture(notebook: NotebookNode) -> list[str]:
    """Title, promise, picture: no code is open before a chapter's first picture.

    A lab may begin with a calculation.
    """
    if not re.match(r"# \d\d · ", notebook.cells[0].source):
        return []
    for number, cell in code_cells(notebook):
        if not cell.metadata.get("jupyter", {}).get("source_hidden"):
            return [f"cell {number} shows code before the first picture"]
        if any("image/png" in output.get("data", {}) for output in cell.outputs):
            return []
    return ["there is no picture"]


@of_code_cells
def shows_every_picture_untrusted(cell):
    """JupyterLab draws no SVG in a notebook that it doesn't trust, but it draws a PNG. nbval
    compares no PNG; ours names the SVG that it was drawn with.
    """
    for output in cell.outputs:
        data = output.get("data", {})
        if svg := data.get("image/svg+xml"):
            drawn_with = f"Source\0{hashlib.sha256(svg.encode()).hexdigest()}".encode()
            if drawn_with not in b64decode(data.get("image/png", "")):
                yield "has an SVG without a PNG that was drawn with it"


@of_code_cells
def has_no_nbval_comments(cell):
    if match := NBVAL_COMMENT.search(cell.source):
        yield f"steers nbval by a comment: {match.group()!r}"


@of_code_cells
def fails_only_where_announced(cell):
    fails = any(output.output_type == "error" for output in cell.outputs)
    if fails != ("raises-exception" in tags(cell)):
        yield "fails, or has the tag raises-exception, but not both"


@of_code_cells
def prints_nothing_of_one_machine(cell):
    for output in cell.outputs:
        for what, pattern in OF_ONE_MACHINE.items():
            if match := pattern.search(text_of(output)):
                yield f"prints {what}: {match.group()!r}"


@of_code_cells
def stores_what_nbval_compares(cell):
    """No widget, no stderr, no line that a carriage return hides, no traceback but the build's."""
    for output in cell.outputs:
        if any("widget" in mime for mime in output.get("data", {})):
            yield "shows a widget"
        if output.get("name") == "stderr":
            yield f"writes to stderr: {output.text.strip()!r}"
        if output.output_type == "stream" and re.search("[\r\b]", output.text):
            yield "overwrites what it has printed"
        if output.output_type == "error" and output.traceback != text_of(output).splitlines()[:1]:
            yield "stores another traceback than the build does"


@of_code_cells
def ran_with_the_kernels(cell):
    """Where they are missing, the kernel cells say so: right for a reader, not for the record."""
    if any("kernel rung: not run" in text_of(output) for output in cell.outputs):
        yield "was run without mamba-ssm's kernels: build it on Linux"


def shows_no_remote_image(notebook: NotebookNode) -> list[str]:
    """The course is read without a network, and an address may die."""
    return [
        f"cell {number} loads from the network: {match.group()!r}"
        for number, cell in enumerate(notebook.cells, start=1)
        for text in [cell.source, *map(text_of, cell.get("outputs", []))]
        for match in REMOTE_IMAGE.finditer(text)
    ]


def keeps_its_tables_whole(notebook: NotebookNode) -> list[str]:
    """A row after an empty line is outside of its table."""
    texts = (cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return [row for text in texts for row in re.findall(r"\n\n(\|.*+)(?!\n\|[ :|-]+\|)", text)]


def begins_lists_after_empty_lines(notebook: NotebookNode) -> list[str]:
    """A line of a paragraph that happens to begin with "- ", "+ " or "1. " is an item of a list, to
    the site and the slides also within a formula.
    """
    within = re.compile(r"^(?![-+*|>#<]|\d+\. | ).+\n((?:1\.|[-+*]) .*)", re.MULTILINE)
    texts = (cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return [line for text in texts for line in within.findall(text)]


RULES = [
    is_executed_in_order,
    has_only_allowed_tags,
    titles_its_slides_in_short,
    has_no_nbval_comments,
    has_one_version_cell,
    fails_only_where_announced,
    prints_nothing_of_one_machine,
    shows_no_remote_image,
    keeps_its_tables_whole,
    begins_lists_after_empty_lines,
    opens_with_its_picture,
    shows_every_picture_untrusted,
    stores_what_nbval_compares,
    ran_with_the_kernels,
    *lessons.RULES,
]


def complaints_of(notebook: NotebookNode) -> list[str]:
    return [complaint for rule in RULES for complaint in rule(notebook)]


def differences(notebook: NotebookNode, source: NotebookNode) -> list[str]:
    """Only the build writes an .ipynb, so all but the outputs is what `read_source` gives."""
    parts = ("cell_type", "source", "metadata", "id", "attachments")
    pairs = zip_longest(notebook.cells, source.cells, fillvalue={})
    found = [] if notebook.metadata == source.metadata else ["the metadata are not the build's"]
    return found + [
        f"cell {number} has another {part} than in the .py: run `make course`"
        for number, (cell, written) in enumerate(pairs, start=1)
        for part in parts
        if cell.get(part) != written.get(part)
    ]


# The guard at work.


@pytest.mark.parametrize("path", STORED, ids=[path.stem for path in STORED])
def test_notebook(path):
    """Its rules, its source, and its figures: nbval compares no PNG, and nothing in figures/."""
    notebook = stored(path)
    assert complaints_of(notebook) == []
    assert differences(notebook, read_source(path.with_suffix(".py"))) == []
    data = [o.data for _, cell in code_cells(notebook) for o in cell.outputs if "data" in o]
    shown = {d["image/svg+xml"] for d in data if "image/svg+xml" in d}
    shown |= {
        b64decode(d["image/png"]) for d in data if "image/svg+xml" not in d and "image/png" in d
    }
    files = (NOTEBOOKS.parent / "figures").glob(f"{path.stem.partition('_')[0]}_*.*")
    drawn = {SVG(f.read_bytes()).data if f.suffix == ".svg" else f.read_bytes() for f in files}
    assert drawn == shown


def test_each_source_has_its_notebook_and_most_cells_are_short():
    sources = [path for folder in FOLDERS for path in sorted(NOTEBOOKS.glob(f"{folder}.py"))]
    assert [path.with_suffix(".ipynb") for path in sources] == STORED
    cells = [cell for path in STORED for _, cell in code_cells(stored(path))]
    counts = [lessons.lines(cell.source) for cell in cells]
    assert sum(count > lessons.SHORT for count in counts) < len(counts) / 8


def test_a_number_names_one_equation():
    """In all chapters and labs, which share their site."""
    sources = [path.with_suffix(".py").read_text(encoding="utf-8") for path in STORED]
    numbers = [number for text in sources for number in re.findall(r"\\tag\{([^}]+)\}", text)]
    assert len(numbers) > 80
    assert [number for number, count in Counter(numbers).items() if count > 1] == []


def test_every_output_is_compared_but_for_the_kernels_verdict_and_texts_of_a_new_model():
    """Strict nbval, which overlooks two things: lines about kernels that may be missing, and what a
    model writes that was trained in the run.
    """
    project = tomllib.loads((NOTEBOOKS.parent / "pyproject.toml").read_text())
    options = project["tool"]["pytest"]["ini_options"]["addopts"].split()
    assert "--nbval" in options and "--nbval-lax" not in options
    config = Path(__file__).with_name("nbval_sanitize.cfg").read_text()
    rules = re.findall(r"^regex: (.*)$\n^replace: (.*)$", config, re.MULTILINE)
    (pattern, replacement), (bar, a_text) = rules
    run = "✓ kernel: output = recurrence  [float64, tolerance 1e-05]\nkernel rung: they agree\n"
    missing = "kernel rung: not run here. mamba-ssm's kernels cannot be imported (...): run ...\n"
    line = "✓ chunks of 7 = recurrence  [float64, tolerance 1e-10]\n"
    for text in (run, missing):
        assert re.sub(pattern, replacement, line + text + line) == line + replacement + line
    written = f"{line}│ The banef the\n│ thangin\n{line}"
    assert re.sub(bar, a_text, written) == line + a_text + line
    barred = [p.stem for p in STORED for _, c in code_cells(stored(p)) if "│ " in str(c.outputs)]
    assert barred == 3 * ["00_cheems_in_one_sitting"] + ["07_cheems_language_model"]


# The guard on trial: a good notebook, and what the rules say where one cell of it is spoilt.


def printed(text: str, name: str = "stdout") -> dict:
    return dict(outputs=[new_output("stream", name=name, text=text)])


def tagged(*names: str) -> dict:
    return dict(metadata=NotebookNode(tags=list(names)))


def picture(svg: str, drawn_with: str) -> dict:
    """The output of a figure, with all that a PNG has for these rules: what it was drawn with."""
    png = b"Source\0" + hashlib.sha256(drawn_with.encode()).hexdigest().encode()
    data = {"image/svg+xml": svg, "image/png": b64encode(png).decode()}
    return dict(outputs=[new_output("display_data", data)])


def good_notebook() -> NotebookNode:
    """Six cells: 1 title, 2 set-up, 3 a picture, 4 a value, 5 an expected error, 6 versions."""
    error = new_output("error", ename="ValueError", evalue="odd", traceback=["ValueError: odd"])
    svg = "<svg>12:34:56 at 0x7f0011223344 /tmp/x</svg>"
    folded = [
        dict(metadata=NotebookNode(tags=[tag], jupyter={"source_hidden": True}))
        for tag in ("setup", "figure")
    ]
    versions = dict(tagged(*VERSION_TAGS), **printed("torch 2.13.0\n"))
    cells = [
        new_markdown_cell("# 01 · Title\n\n![states](../figures/01_states.svg)"),
        new_code_cell("import torch", **folded[0]),
        new_code_cell("torch.draw()", **picture(svg, svg), **folded[1]),
        new_code_cell("2 + 3", **printed("5\n")),
        new_code_cell("int('odd')", outputs=[error], **tagged("raises-exception")),
        new_code_cell("print(torch.version)", **versions),
    ]
    for count, cell in enumerate(cells[1:], start=1):
        cell.execution_count = count
    return new_notebook(cells=cells)


FUNCTION = "def f(x):\n" + "    x = x + 1\n" * 6
SPOILT = [
    (is_executed_in_order, 4, dict(execution_count=None, outputs=[])),
    (has_only_allowed_tags, 4, tagged("nbval-skip")),
    (titles_its_slides_in_short, 1, dict(metadata={"slide_title": 76 * "a"})),
    (titles_its_slides_in_short, 1, dict(metadata={"slide_title": " "})),
    (titles_its_slides_in_short, 4, tagged("slide")),
    (has_no_nbval_comments, 4, dict(source="# NBVAL_SKIP\n2 + 3")),
    (has_one_version_cell, 6, dict(metadata={})),
    (has_one_version_cell, 4, tagged(*VERSION_TAGS)),
    (has_one_version_cell, 6, tagged("nbval-ignore-output")),
    (fails_only_where_announced, 5, dict(metadata={})),
    (fails_only_where_announced, 5, dict(outputs=[])),
    (prints_nothing_of_one_machine, 4, printed("saved /home/me/x.pt")),
    (shows_no_remote_image, 1, dict(source="![a](https://a.org/b.png)")),
    (keeps_its_tables_whole, 1, dict(source="# T\n\n| a |\n|---|\n| 1 |\n\n| 2 |")),
    (begins_lists_after_empty_lines, 1, dict(source="# T\n\nLet $a\n- b$ be 1.")),
    (begins_lists_after_empty_lines, 1, dict(source="# T\n\nAt 0 and\n1. Then.")),
    (opens_with_its_picture, 2, tagged("setup")),
    (opens_with_its_picture, 3, tagged("figure")),
    (shows_every_picture_untrusted, 3, picture("<svg>1</svg>", "<svg>2</svg>")),
    (stores_what_nbval_compares, 4, printed("error 42\rerror 0\n")),
    (stores_what_nbval_compares, 4, printed("UserWarning", name="stderr")),
    (ran_with_the_kernels, 4, printed("kernel rung: not run here")),
    (lessons.has_no_long_cell, 4, dict(source="2 + 3\n" * 31)),
    (lessons.draws_in_figure_cells, 3, dict(metadata={"jupyter": {"source_hidden": True}})),
    (lessons.draws_in_figure_cells, 3, dict(source="torch.draw()\n" * 9)),
    (lessons.says_what_functions_do, 4, dict(source=FUNCTION)),
    (lessons.sections_stand_alone, 4, dict(source="[2 + three for i in range(2)]")),
]


def test_each_rule_refuses_what_it_is_for_and_nothing_else():
    assert complaints_of(good_notebook()) == []
    assert {rule for rule, _, _ in SPOILT} == set(RULES)
    for rule, number, changes in SPOILT:
        notebook = good_notebook()
        notebook.cells[number - 1].update(changes)
        assert [r for r in RULES if r(notebook)] == [rule], (rule, changes)
    moved = good_notebook()
    moved.cells.insert(3, moved.cells.pop())
    assert has_one_version_cell(moved) and opens_with_its_picture(moved) == []
    bare = good_notebook()
    del bare.cells[2].outputs[0].data["image/png"]
    assert shows_every_picture_untrusted(bare)


def test_patterns_find_what_depends_on_a_machine_and_nothing_else():
    for texts, found in (
        (["file:///home/me/x", r"C:\Users\me", "lib/site-packages/torch"], True),
        (["<function f at 0x1a2b>", "9:05:00.", "2026-01-02T10", "20 µs", "[00:01<00:00,"], True),
        (["torch.Size([2, 3]), x[10:20:30]", "torch 2.13.0, 1e-10, 0x7f", "t4 s, 1-2-3"], False),
        (["../figures/01_a.svg, and/or", "https://home.example.org/usr/x", "ratio 1:2"], False),
    ):
        for text in texts:
            assert any(p.search(text) for p in OF_ONE_MACHINE.values()) == found, text


def test_a_section_shares_functions_and_setup_alone():
    code, text = new_code_cell, new_markdown_cell
    function, heading = code("def f(y):\n    return x + y"), text("## Another section")
    cells = [code("x = 1"), function, text("### A part of it"), code("f(x)"), heading, code("f(x)")]
    notebook = new_notebook(cells=cells)
    complaint = "cell 6 uses x, which its section does not define"
    assert lessons.sections_stand_alone(notebook) == [complaint]
    cells[0].metadata.tags = ["setup"]
    assert lessons.sections_stand_alone(notebook) == []


def test_a_notebook_that_differs_from_its_source_is_refused(tmp_path):
    path = tmp_path / "01_a.py"
    path.write_text("# %% [markdown]\n# # Title\n\n# %% tags=['guard']\nprint(2 + 3)\n")
    source = read_source(path)
    assert source.cells[1].metadata == {"tags": ["guard"], "jupyter": {"source_hidden": True}}
    path.write_text('# %% slide_title="It is 5." tags=["figure", "slide"]\nprint(2 + 3)\n')
    folded = {"source_hidden": True}
    titled = {"tags": ["figure", "slide"], "slide_title": "It is 5.", "jupyter": folded}
    assert read_source(path).cells[0].metadata == titled
    path.write_text('# %% tags=["guard", "quoted"]\nprint(2 + 3)\n')
    assert read_source(path).cells[0].metadata.jupyter == folded | {"outputs_hidden": True}
    for part, change in {"source": "print(2 + 4)", "metadata": {"tags": ["guard"]}}.items():
        notebook = deepcopy(source)
        notebook.cells[1].update({part: change}, execution_count=1)
        assert differences(notebook, source) == [
            f"cell 2 has another {part} than in the .py: run `make course`"
        ]
