"""The guard: what nbval lets pass in a stored notebook, and this course does not.

nbval runs every cell and compares what it prints with what is stored. But a notebook that stores
nothing compares nothing, and passes; so does a cell that is tagged to be skipped. Each rule here
takes a notebook and returns its complaints, one line each.

Conventions. Tags come from `ALLOWED_TAGS`. Exactly one cell of a notebook prints the versions of
what it runs on; it is tagged `versions` and `nbval-ignore-output`, and nothing else may be
ignored. A cell that shows an error on purpose is tagged `raises-exception`.
"""

import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import lessons
import nbformat
import pytest
from build import read_source
from IPython.core.displayhook import DisplayHook
from IPython.display import SVG
from lessons import code_cells, tags
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"

ALLOWED_TAGS = {
    "check",
    "exercise",
    "figure",
    "nbval-ignore-output",
    "raises-exception",
    "setup",
    "versions",
}
VERSION_TAGS = {"versions", "nbval-ignore-output"}

# nbval obeys comments too; PYTEST_VALIDATE_... is what they were called before.
NBVAL_COMMENT = re.compile(r"#\s*(?:NBVAL|PYTEST_VALIDATE)[_-]\w+", re.IGNORECASE)

ABSOLUTE_PATH = re.compile(
    r"(?<![\w)])(?<!:/)/(?:home|Users|tmp|root|opt|usr|var|private|mnt)\b"  # not https://home.org
    r"|(?<!\w)[A-Za-z]:\\\w\w"
    r"|\bsite-packages\b"
)
ADDRESS = re.compile(r"\bat 0x[0-9a-f]+|\b0x[0-9a-f]{9,}", re.IGNORECASE)
TIME = re.compile(
    r"(?<![\d:\[])(?:[01]?\d|2[0-3]):[0-5]\d:[0-5]\d(?![\d:])"  # 12:34:56, not x[10:20:30]
    r"|\b(?:19|20)\d\d-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])(?!\d)"  # 2026-01-02
    r"|(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?\s?(?:ns|us|[µμ]s|ms|s|sec|secs|seconds?|minutes?)\b"
    r"|\b\d+:\d\d<|\d\s?(?:it/s|s/it)"  # a progress bar
)
REMOTE_IMAGE = re.compile(
    r"!\[[^\]]*\]\(\s*<?(?:https?:)?//"
    r"|<(?:img|iframe|video|audio|source|script)\b[^>]*\bsrc\s*=\s*[\"']?(?:https?:)?//",
    re.IGNORECASE,
)
# A picture inside HTML is not text: its letters may spell anything.
EMBEDDED = re.compile(r"data:[\w/+.-]+;base64,[\w/+=]+|<svg\b.*?</svg>", re.DOTALL)


def outputs(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """All outputs with the number of their cell."""
    for number, cell in code_cells(notebook):
        for output in cell.outputs:
            yield number, output


def text_of(output: NotebookNode) -> str:
    """What a reader reads of one output: no pictures."""
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"  # and the traceback is the same, see below
    texts = [text for mime, text in output.data.items() if mime.startswith("text/")]
    return EMBEDDED.sub("", "\n".join(texts))


def found_in_outputs(notebook: NotebookNode, pattern: re.Pattern, what: str) -> list[str]:
    return [
        f"cell {number} prints {what}: {match.group()!r}"
        for number, output in outputs(notebook)
        for match in pattern.finditer(text_of(output))
    ]


def is_executed_in_order(notebook: NotebookNode) -> list[str]:
    """A stripped notebook passes nbval, since there is nothing to compare."""
    counts = [cell.execution_count for _, cell in code_cells(notebook)]
    if not counts:
        return ["there is no code cell"]
    if counts != list(range(1, len(counts) + 1)):
        return [f"execution counts are {counts}, not 1 to {len(counts)}: run `make course`"]
    return []


def has_only_allowed_tags(notebook: NotebookNode) -> list[str]:
    return [
        f"cell {number} has the unknown tag {tag!r}; known are {', '.join(sorted(ALLOWED_TAGS))}"
        for number, cell in enumerate(notebook.cells, start=1)
        for tag in sorted(tags(cell) - ALLOWED_TAGS)
    ]


def has_no_nbval_comments(notebook: NotebookNode) -> list[str]:
    return [
        f"cell {number} steers nbval by a comment: {match.group()!r}"
        for number, cell in code_cells(notebook)
        for match in NBVAL_COMMENT.finditer(cell.source)
    ]


def has_one_version_cell(notebook: NotebookNode) -> list[str]:
    """The one cell whose output may differ between machines prints versions and nothing else."""
    cells = [(number, cell) for number, cell in code_cells(notebook) if tags(cell) & VERSION_TAGS]
    if len(cells) != 1:
        numbers = [number for number, _ in cells]
        return [f"one cell, no more and no less, has the tags of the version cell: {numbers}"]
    [(number, cell)] = cells
    complaints = []
    if tags(cell) != VERSION_TAGS:
        complaints.append(f"cell {number}: the version cell has the tags {sorted(VERSION_TAGS)}")
    if "version" not in cell.source:
        complaints.append(f"cell {number} is tagged as the version cell and names no version")
    if [output.output_type for output in cell.outputs] != ["stream"]:
        complaints.append(f"cell {number}: the version cell prints, and has no other output")
    return complaints


def has_no_stderr(notebook: NotebookNode) -> list[str]:
    return [
        f"cell {number} writes to stderr: {output.text.strip()!r}"
        for number, output in outputs(notebook)
        if output.output_type == "stream" and output.name == "stderr"
    ]


def fails_only_where_announced(notebook: NotebookNode) -> list[str]:
    complaints = []
    for number, cell in code_cells(notebook):
        failed = any(output.output_type == "error" for output in cell.outputs)
        announced = "raises-exception" in tags(cell)
        if failed and not announced:
            complaints.append(f"cell {number} fails without the tag raises-exception")
        if announced and not failed:
            complaints.append(f"cell {number} is tagged raises-exception and does not fail")
    return complaints


def ends_no_cell_with_a_semicolon(notebook: NotebookNode) -> list[str]:
    """In JupyterLab a last `;` hides the value; in nbval, which keeps no history, it does not."""
    return [
        f"cell {number} ends with `;`: assign to `_` instead"
        for number, cell in code_cells(notebook)
        if DisplayHook.semicolon_at_end_of_expression(cell.source)
    ]


def prints_no_absolute_path(notebook: NotebookNode) -> list[str]:
    return found_in_outputs(notebook, ABSOLUTE_PATH, "a path of one machine")


def prints_no_address(notebook: NotebookNode) -> list[str]:
    return found_in_outputs(notebook, ADDRESS, "a memory address")


def prints_no_time(notebook: NotebookNode) -> list[str]:
    return found_in_outputs(notebook, TIME, "a time")


def shows_no_remote_image(notebook: NotebookNode) -> list[str]:
    """The course is read without a network, and an address may die."""
    texts = [
        (number, cell.source)
        for number, cell in enumerate(notebook.cells, start=1)
        if cell.cell_type == "markdown"
    ]
    texts += [(number, text_of(output)) for number, output in outputs(notebook)]
    return [
        f"cell {number} loads from the network: {match.group()!r}"
        for number, text in texts
        for match in REMOTE_IMAGE.finditer(text)
    ]


def has_no_widgets(notebook: NotebookNode) -> list[str]:
    """A widget's state is random numbers, and nbval does not compare it."""
    complaints = ["the metadata hold widgets"] if "widgets" in notebook.metadata else []
    complaints += [
        f"cell {number} shows a widget"
        for number, output in outputs(notebook)
        if any("jupyter.widget" in mime for mime in output.get("data", {}))
    ]
    return complaints


def stores_plain_lines(notebook: NotebookNode) -> list[str]:
    """nbval drops what a carriage return hides, and never compares a traceback."""
    complaints = [
        f"cell {number} overwrites what it has printed"
        for number, output in outputs(notebook)
        if output.output_type == "stream" and re.search("[\r\b]", output.text)
    ]
    return complaints + [
        f"cell {number} stores another traceback than the build does"
        for number, output in outputs(notebook)
        if output.output_type == "error"
        and output.traceback != [f"{output.ename}: {output.evalue}".splitlines()[0]]
    ]


def ran_with_the_kernels(notebook: NotebookNode) -> list[str]:
    """Where they are missing, the kernel cells say so: right for a reader, not for the record."""
    return [
        f"cell {number} was run without mamba-ssm's kernels: build it on Linux"
        for number, output in outputs(notebook)
        if "kernel rung: not run" in text_of(output)
    ]


RULES = [
    is_executed_in_order,
    has_only_allowed_tags,
    has_no_nbval_comments,
    has_one_version_cell,
    has_no_stderr,
    fails_only_where_announced,
    ends_no_cell_with_a_semicolon,
    prints_no_absolute_path,
    prints_no_address,
    prints_no_time,
    shows_no_remote_image,
    has_no_widgets,
    stores_plain_lines,
    ran_with_the_kernels,
    *lessons.RULES,
]


def differs_from_source(notebook: NotebookNode, source: NotebookNode) -> list[str]:
    """Only the build writes an .ipynb, so all but the outputs is what `read_source` gives."""
    if len(notebook.cells) != len(source.cells):
        return [f"{len(notebook.cells)} cells, and {len(source.cells)} in the .py"]
    complaints = []
    if notebook.metadata != source.metadata:
        complaints.append("the notebook's metadata are not the build's")
    pairs = zip(notebook.cells, source.cells, strict=True)
    for number, (stored, written) in enumerate(pairs, start=1):
        complaints += [
            f"cell {number} has another {part} than in the .py: run `make course`"
            for part in ("cell_type", "source", "metadata", "id", "attachments")
            if stored.get(part) != written.get(part)
        ]
    return complaints


def unpaired(folder: Path) -> list[str]:
    """The notebooks that lack their .py or their .ipynb."""
    sources = {path.stem for path in folder.glob("*.py")}
    stored = {path.stem for path in folder.glob("*.ipynb")}
    return [f"{name}.py has no .ipynb: run `make course`" for name in sorted(sources - stored)] + [
        f"{name}.ipynb has no .py" for name in sorted(stored - sources)
    ]


# The guard at work.

STORED = sorted(NOTEBOOKS.glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", STORED, ids=[path.stem for path in STORED])


def test_there_are_notebooks():
    assert STORED, f"no notebook in {NOTEBOOKS}: everything below would pass for want of any"


def test_each_source_has_its_notebook():
    assert unpaired(NOTEBOOKS) == []


@every_notebook
@pytest.mark.parametrize("rule", RULES, ids=[rule.__name__ for rule in RULES])
def test_notebook(path, rule):
    assert rule(nbformat.read(path, as_version=4)) == []


@every_notebook
def test_notebook_is_its_source(path):
    source = read_source(path.with_suffix(".py"))
    assert differs_from_source(nbformat.read(path, as_version=4), source) == []


def test_most_cells_are_short():
    counts = [
        lessons.lines(cell.source)
        for path in STORED
        for _, cell in code_cells(nbformat.read(path, as_version=4))
    ]
    long = sum(count > lessons.SHORT for count in counts)
    assert long < len(counts) / 8, f"{long} of {len(counts)} cells have over {lessons.SHORT} lines"


# The one thing that nbval is told to overlook.


SANITISER = re.findall(
    r"^regex: (.*)$\n^replace: (.*)$",  # as nbval reads it
    (Path(__file__).parent / "nbval_sanitize.cfg").read_text(),
    re.MULTILINE,
)


def sanitised(text: str) -> str:
    for pattern, replacement in SANITISER:
        text = re.sub(pattern, replacement, text)
    return text


def test_the_kernel_rung_reads_the_same_with_and_without_the_kernels():
    run = "✓ kernel: output = recurrence  [float64, tolerance 1e-05]\n"
    run += "✗ kernel: groups swapped: caught  [differs by more than 0.001]\n"
    run += "kernel rung: mamba-ssm's kernels and the recurrence agree\n"
    missing = "kernel rung: not run here. mamba-ssm's kernels cannot be imported (...): run ...\n"
    assert sanitised(run) == sanitised(missing) == sanitised(sanitised(run)) != run


def test_nothing_else_is_overlooked():
    assert len(SANITISER) == 1
    line = "✓ chunks of 7 = recurrence  [float64, tolerance 1e-10]\n"
    assert sanitised(line) == line
    assert (
        sanitised("the kernel rung: 3.14\nkernel: 2.71\n")
        == "the kernel rung: 3.14\nkernel: 2.71\n"
    )
    before_and_after = line + "kernel rung: x\n" + line
    assert sanitised(before_and_after) == line + "kernel rung" + line


@every_notebook
def test_figures_are_what_the_notebook_shows(path):
    """nbval compares no PNG, and nothing in figures/: the two hold the same pictures."""
    data = [o.data for _, o in outputs(nbformat.read(path, as_version=4)) if "data" in o]
    shown = {d["image/svg+xml"] for d in data if "image/svg+xml" in d}
    shown |= {b64decode(d["image/png"]) for d in data if "image/png" in d}
    files = (NOTEBOOKS.parent / "figures").glob(f"{path.stem[:2]}_*.*")
    drawn = {SVG(f.read_bytes()).data if f.suffix == ".svg" else f.read_bytes() for f in files}
    assert drawn == shown


# The guard on trial: a good notebook, and what each rule says to one that is spoilt in one place.


def printed(text: str, name: str = "stdout") -> NotebookNode:
    return new_output("stream", name=name, text=text)


def shown(**data: str) -> NotebookNode:
    """A displayed value; `text_html` stands for the type text/html."""
    return new_output("display_data", {key.replace("_", "/", 1): data[key] for key in data})


def good_notebook() -> NotebookNode:
    """Five cells: 1 title, 2 versions, 3 a value, 4 an expected error, 5 a picture."""
    failure = new_output(
        "error", ename="ValueError", evalue="odd: 3", traceback=["ValueError: odd: 3"]
    )
    value = new_output("execute_result", {"text/plain": "5"}, execution_count=2)
    return new_notebook(
        cells=[
            new_markdown_cell("# Title\n\n![states](../figures/01_states.svg)"),
            new_code_cell(
                "import torch\nprint(torch.version)",
                execution_count=1,
                outputs=[printed("torch 2.13.0\n")],
                metadata={"tags": ["versions", "nbval-ignore-output"]},
            ),
            new_code_cell("2 + 3  # a sum;", execution_count=2, outputs=[value]),
            new_code_cell(
                "int('odd')",
                execution_count=3,
                outputs=[failure],
                metadata={"tags": ["raises-exception"]},
            ),
            new_code_cell(
                "torch.draw()",
                execution_count=4,
                metadata={"tags": ["figure"]},
                outputs=[
                    new_output(
                        "display_data",
                        {
                            "image/svg+xml": "<svg>12:34:56 at 0x7f0011223344 /tmp/x</svg>",
                            "text/html": '<img src="data:image/png;base64,aa/0x7f0011223344+/tmp">',
                        },
                    )
                ],
            ),
        ]
    )


def spoilt(number: int, **changes) -> NotebookNode:
    """The good notebook with some fields of one cell changed."""
    notebook = good_notebook()
    notebook.cells[number - 1].update(nbformat.from_dict(changes))
    return notebook


def printing(text: str) -> NotebookNode:
    return spoilt(3, outputs=[printed(text)])


def with_widget_metadata() -> NotebookNode:
    notebook = good_notebook()
    notebook.metadata.widgets = {}
    return notebook


ERROR = new_output("error", ename="ValueError", evalue="odd", traceback=["ValueError: odd"])
PATH_IN_ERROR = new_output(
    "error", ename="OSError", evalue="/root/x", traceback=["OSError: /root/x"]
)
OTHER_TRACEBACK = new_output("error", ename="ValueError", evalue="odd: 3", traceback=["odd: 4"])
VERSIONS = {"tags": ["versions", "nbval-ignore-output"]}
DRAWING = "torch.draw()\n\n" * 8 + 'plotting = torch\nplotting.save(\n"a",\n"b",\n)\n'
FUNCTION = "def f(x):\n" + "    x = x + 1\n" * 6

BAD = [
    ("stripped", is_executed_in_order, spoilt(3, execution_count=None, outputs=[])),
    ("run twice", is_executed_in_order, spoilt(5, execution_count=5)),
    ("skipped by tag", has_only_allowed_tags, spoilt(3, metadata={"tags": ["nbval-skip"]})),
    ("tag on markdown", has_only_allowed_tags, spoilt(1, metadata={"tags": ["slide"]})),
    ("comment", has_no_nbval_comments, spoilt(3, source="# NBVAL_SKIP\n2 + 3")),
    ("comment, lower case", has_no_nbval_comments, spoilt(3, source="2\n##nbval_ignore_output")),
    ("no version cell", has_one_version_cell, spoilt(2, metadata={})),
    ("two version cells", has_one_version_cell, spoilt(3, metadata=VERSIONS)),
    (
        "ignored without versions",
        has_one_version_cell,
        spoilt(2, metadata={"tags": ["nbval-ignore-output"]}),
    ),
    ("not a version", has_one_version_cell, spoilt(2, source="import torch\nprint(2)")),
    ("a value in the version cell", has_one_version_cell, spoilt(2, outputs=[shown(text_x="1")])),
    ("silent version cell", has_one_version_cell, spoilt(2, outputs=[])),
    ("hidden line", stores_plain_lines, spoilt(3, outputs=[printed("error 42\rerror 0\n")])),
    ("another traceback", stores_plain_lines, spoilt(4, outputs=[OTHER_TRACEBACK])),
    ("no kernels", ran_with_the_kernels, spoilt(3, outputs=[printed("kernel rung: not run here")])),
    ("warning", has_no_stderr, spoilt(3, outputs=[printed("UserWarning", name="stderr")])),
    ("unannounced error", fails_only_where_announced, spoilt(3, outputs=[ERROR])),
    ("no error", fails_only_where_announced, spoilt(4, outputs=[])),
    ("semicolon", ends_no_cell_with_a_semicolon, spoilt(3, source="int(0);")),
    ("and a comment", ends_no_cell_with_a_semicolon, spoilt(3, source="int(0);  # quiet\n\n")),
    ("path", prints_no_absolute_path, printing("saved /home/me/x.pt")),
    ("path in HTML", prints_no_absolute_path, spoilt(3, outputs=[shown(text_html="<b>/tmp</b>")])),
    (
        "path in an error",
        prints_no_absolute_path,
        spoilt(4, outputs=[PATH_IN_ERROR]),
    ),
    ("address", prints_no_address, printing("<object at 0x7f0011223344>")),
    ("time", prints_no_time, printing("started 12:34:56")),
    ("remote image", shows_no_remote_image, spoilt(1, source="![a](https://a.org/b.png)")),
    (
        "remote image in HTML",
        shows_no_remote_image,
        spoilt(3, outputs=[shown(text_html="<img width=3 src='//a.org/b.png'>")]),
    ),
    (
        "widget",
        has_no_widgets,
        spoilt(
            3,
            outputs=[new_output("display_data", {"application/vnd.jupyter.widget-view+json": {}})],
        ),
    ),
    ("widget state", has_no_widgets, with_widget_metadata()),
    ("long", lessons.has_no_long_cell, spoilt(3, source="2 + 3\n" * 31)),
    ("picture untagged", lessons.draws_in_figure_cells, spoilt(5, metadata={})),
    ("no picture", lessons.draws_in_figure_cells, spoilt(3, metadata={"tags": ["figure"]})),
    ("much drawing", lessons.draws_in_figure_cells, spoilt(5, source=DRAWING + "torch.draw()")),
    ("undocumented", lessons.says_what_functions_do, spoilt(3, source=FUNCTION)),
    ("out of nowhere", lessons.sections_stand_alone, spoilt(3, source="2 + three")),
    ("no code", is_executed_in_order, new_notebook(cells=[new_markdown_cell("# Title")])),
]


@pytest.mark.parametrize(
    "change",
    [
        dict(source="2 + 3\n" * 30 + "\n\n"),
        dict(source=FUNCTION.replace("):\n", "):\n    'Count on.'\n")),
        dict(source="def f(x):\n" + "    x = x + 1\n" * 5),
        dict(source="def draw(ax):\n    ax.draw()", metadata={"tags": ["figure"]}),
    ],
    ids=["30 lines", "documented", "5 lines", "defines what draws"],
)
def test_a_cell_that_teaches_is_accepted(change):
    assert [rule.__name__ for rule in lessons.RULES if rule(spoilt(3, **change))] == []


def test_a_figure_of_eight_lines_and_its_saving():
    notebook = spoilt(5, source=DRAWING.replace("torch.draw()\n\n", "", 1))
    assert lessons.draws_in_figure_cells(notebook) == []


@pytest.mark.parametrize(
    "source",
    [
        "y = 1\nx = [y, *(z for z in range(y))]\nx[0] = y",
        "for i, (a, *b) in enumerate([]):\n    c = a + b\n    i += c",
        "with open('a') as file:\n    text = file.read()\nif text:\n    n = 1\nelse:\n    n = 2\nn",
        "import torch.nn.functional as F\nfrom a import b as c\nF.relu(c)",
        "def f(x, y=1):\n    def g():\n        return x + f(z)\n    z = y\n    return g\nf(2)",
        "class A(list):\n    n = 2\n    def f(self):\n        return A(), self.n\nA().f()",
        "f = lambda x: [x + i for i in range(x)]\nf(2)",
        "try:\n    x = 1\nexcept ValueError as error:\n    x = str(error)\nprint(f'{x!r:>{x}}')",
    ],
)
def test_a_section_may_use_what_it_binds(source):
    assert lessons.sections_stand_alone(spoilt(3, source=source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "x = x + 1",
        "x += 1",
        "x[0] = 1",
        "for i in range(x):\n    pass",
        "print(x)\nx = 1",
        "def f():\n    return x",
        "class A:\n    def f(self):\n        return [x for i in self]",
        "with x:\n    x = 2",
        "print(f'{x}')",
        "f = lambda y: x + y",
    ],
)
def test_a_section_may_not_use_what_it_does_not_bind(source):
    complaint = "cell 3 uses x, which its section does not define"
    assert lessons.sections_stand_alone(spoilt(3, source=source)) == [complaint]


def test_a_section_shares_functions_and_setup_alone():
    def cells(*tags):
        return [
            new_markdown_cell("Before"),
            new_code_cell("x = 1", metadata={"tags": list(tags)}),
            new_code_cell("def f(y):\n    return x"),
            new_markdown_cell("### A part of the section"),
            new_code_cell("f(x)"),
            new_markdown_cell("## Another section"),
            new_code_cell("f(x)"),
        ]

    assert lessons.sections_stand_alone(new_notebook(cells=cells("setup"))) == []
    complaints = lessons.sections_stand_alone(new_notebook(cells=cells()))
    assert complaints == ["cell 7 uses x, which its section does not define"]


@pytest.mark.parametrize("rule", RULES, ids=[rule.__name__ for rule in RULES])
def test_rule_accepts_the_good_notebook(rule):
    assert rule(good_notebook()) == []


@pytest.mark.parametrize(
    "rule, notebook",
    [pytest.param(rule, notebook, id=f"{rule.__name__}: {name}") for name, rule, notebook in BAD],
)
def test_rule_refuses(rule, notebook):
    assert len(rule(notebook)) == 1


@pytest.mark.parametrize("name, rule, notebook", BAD[:-1], ids=[name for name, _, _ in BAD[:-1]])
def test_no_other_rule_refuses(name, rule, notebook):
    assert [other.__name__ for other in RULES if other(notebook)] == [rule.__name__]


def test_every_rule_is_on_trial():
    assert {rule for _, rule, _ in BAD} == set(RULES)


PATTERNS = [ABSOLUTE_PATH, ADDRESS, TIME, REMOTE_IMAGE]


@pytest.mark.parametrize(
    "pattern, text",
    [
        (ABSOLUTE_PATH, "/Users/me/x"),
        (ABSOLUTE_PATH, "file:///home/me/x"),
        (ABSOLUTE_PATH, "in '/root'"),
        (ABSOLUTE_PATH, "/opt/conda"),
        (ABSOLUTE_PATH, "/usr/bin/python"),
        (ABSOLUTE_PATH, r"C:\Users\me"),
        (ABSOLUTE_PATH, "lib/site-packages/torch"),
        (ADDRESS, "0x7F0011223344"),
        (ADDRESS, "<function f at 0x1a2b>"),
        (TIME, "at 9:05:00."),
        (TIME, "2026-01-02"),
        (TIME, "2026-01-02T10"),
        (TIME, "took 3.2 s"),
        (TIME, "15 ms"),
        (TIME, "(1.5e-3s)"),
        (TIME, "20 µs"),
        (TIME, "2 minutes"),
        (TIME, "3/3 [00:01<00:00,  2.5it/s]"),
        (REMOTE_IMAGE, "![a b](http://a.org/x.svg)"),
        (REMOTE_IMAGE, '<iframe\nsrc="https://a.org">'),
    ],
)
def test_pattern_finds(pattern, text):
    assert pattern.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "torch.Size([2, 3, 4]), x[10:20:30], 4 states, 3 steps, 2 heads",
        "torch 2.13.0, triton 3.7.1, 1e-10, 0x7f, 0x3f800000",
        "1/root(d), and/or, 2/usr, ../figures/01_a.svg, notebooks/01_a.py",
        "https://home.example.org/usr/x and https://tmp.example.org",
        "quadratic form = recurrence: agree within 1e-10",
        "pattern SESESESESESESEIE, s=4, t4 s, 1-2-3, 2026-13-45",
        "[link](https://a.org/x) and ![local](../figures/x.svg)",
        'dt:\n"A:\\n", ratio 1:2, 12:34',
    ],
)
def test_patterns_leave_alone(text):
    assert [match.group() for pattern in PATTERNS for match in pattern.finditer(text)] == []


# Agreement with the source.

SOURCE = """\
# %% [markdown]
# # Title

# %% tags=["check"]
print(2 + 3)
"""


@pytest.fixture
def source(tmp_path) -> NotebookNode:
    path = tmp_path / "01_a.py"
    path.write_text(SOURCE)
    return read_source(path)


def test_a_notebook_with_outputs_is_its_source(source):
    notebook = deepcopy(source)
    notebook.cells[1].update(execution_count=1, outputs=[printed("5\n")])
    assert differs_from_source(notebook, source) == []


@pytest.mark.parametrize(
    "change",
    [
        {"cell_type": "raw"},
        {"source": "print(2 + 4)"},
        {"metadata": {"tags": ["exercise"]}},
        {"metadata": {"tags": ["check"], "editable": True}},
        {"id": "0"},
    ],
    ids=["type", "source", "tags", "metadata", "id"],
)
def test_a_changed_cell_is_refused(source, change):
    notebook = deepcopy(source)
    notebook.cells[1].update(change)
    (complaint,) = differs_from_source(notebook, source)
    assert f"cell 2 has another {next(iter(change))}" in complaint


def test_a_missing_cell_and_other_metadata_are_refused(source):
    shorter, older = deepcopy(source), deepcopy(source)
    del shorter.cells[1]
    older.metadata.language_info["version"] = "3.11.7"
    assert differs_from_source(shorter, source) == ["1 cells, and 2 in the .py"]
    assert differs_from_source(older, source) == ["the notebook's metadata are not the build's"]


def test_an_unpaired_file_is_refused(tmp_path):
    for name in "01_a.py", "01_a.ipynb", "02_b.py", "03_c.ipynb":
        (tmp_path / name).touch()
    assert unpaired(tmp_path) == [
        "02_b.py has no .ipynb: run `make course`",
        "03_c.ipynb has no .py",
    ]


def test_nbval_passes_what_the_guard_refuses(tmp_path):
    """Why there is a guard; and that nbval does see one changed digit."""
    right = new_code_cell("print(2 + 3)", execution_count=1, outputs=[printed("5\n")])
    changed = deepcopy(right)
    changed.outputs[0].text = "6\n"
    stripped = new_code_cell("print(2 * 3)  # where the text says 5")
    notebooks = {"right": right, "changed": changed, "stripped": stripped}
    for name, cell in notebooks.items():
        nbformat.write(new_notebook(cells=[cell]), tmp_path / f"{name}.ipynb")
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-rA", "--color=no",
         "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert "PASSED right.ipynb::Cell 0" in finished.stdout, finished.stdout
    assert "FAILED changed.ipynb::Cell 0" in finished.stdout
    assert "PASSED stripped.ipynb::Cell 0" in finished.stdout
    assert is_executed_in_order(new_notebook(cells=[right])) == []
    assert is_executed_in_order(new_notebook(cells=[stripped])) != []
