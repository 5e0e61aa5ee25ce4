"""Rules for cells that teach: short, one thing at a time, no name out of nowhere.

Each rule takes a notebook and returns its complaints, one line each. test_notebooks.py applies the
rules. Blank lines don't count.
"""

import ast
import builtins
import symtable
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
LONGEST = 30  # lines of a cell
SHORT = 15  # lines of most cells: all but one in eight
DRAWING = 8  # lines of a figure, beside the call that saves it with its alt text
UNDOCUMENTED = 5  # lines of a function's body that go without a docstring


@cache
def stored(path: Path) -> NotebookNode:
    """A notebook as it is committed; do not change it."""
    return nbformat.read(path, as_version=4)


def tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def code_cells(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """The code cells with their numbers, counted from 1 among all cells."""
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type == "code":
            yield number, cell


def lines(source: str) -> int:
    return sum(bool(line.strip()) for line in source.splitlines())


def statements_of(cell: NotebookNode) -> list[ast.stmt]:
    return ast.parse(cell.source).body


def has_no_long_cell(notebook: NotebookNode) -> list[str]:
    return [
        f"cell {number} has {lines(cell.source)} lines, more than {LONGEST}"
        for number, cell in code_cells(notebook)
        if lines(cell.source) > LONGEST
    ]


def is_save(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("plotting.save(")


def draws_in_figure_cells(notebook: NotebookNode) -> list[str]:
    """A cell tagged `figure` draws, or defines what draws; book and slides fold it."""
    complaints = []
    for number, cell in code_cells(notebook):
        shows = any(
            mime.startswith("image/") for output in cell.outputs for mime in output.get("data", {})
        )
        statements = statements_of(cell)
        defines = all(isinstance(s, (ast.FunctionDef, ast.ClassDef)) for s in statements)
        if shows and "figure" not in tags(cell):
            complaints.append(f"cell {number} shows a picture without the tag figure")
        if "figure" in tags(cell) and not shows and not defines:
            complaints.append(f"cell {number} is tagged figure, and neither draws nor defines")
        saved = "".join(ast.get_source_segment(cell.source, s) for s in statements if is_save(s))
        drawing = lines(cell.source) - lines(saved)
        if shows and drawing > DRAWING:
            complaints.append(f"cell {number} draws in {drawing} lines, more than {DRAWING}")
    return complaints


def says_what_functions_do(notebook: NotebookNode) -> list[str]:
    return [
        f"cell {number}: {node.name} has no docstring"
        for number, cell in code_cells(notebook)
        for node in statements_of(cell)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and node.body[-1].end_lineno - node.body[0].lineno >= UNDOCUMENTED
        and not ast.get_docstring(node)
    ]


def names_taken(table: symtable.SymbolTable) -> set[str]:
    """Names that a cell, or a function in it, reads and does not bind."""
    taken = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_referenced() and symbol.is_global()
    }
    return taken.union(*map(names_taken, table.get_children()))


def sections_stand_alone(notebook: NotebookNode) -> list[str]:
    """A section uses names that it binds itself, functions, imports, and names of `setup` cells."""
    shared, here, complaints = set(dir(builtins)), set(), []
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type == "markdown" and "\n## " in f"\n{cell.source}":
            here = set()
        if cell.cell_type != "code":
            continue
        table = symtable.symtable(cell.source, f"cell {number}", "exec")
        bound = {s for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
        here |= {s.get_name() for s in bound}
        shared |= {
            s.get_name()
            for s in bound
            if "setup" in tags(cell) or s.is_imported() or s.is_namespace()
        }
        complaints += [
            f"cell {number} uses {name}, which its section does not define"
            for name in sorted(names_taken(table) - shared - here)
        ]
    return complaints


RULES = [
    has_no_long_cell,
    draws_in_figure_cells,
    says_what_functions_do,
    sections_stand_alone,
]
