"""Rules for cells that teach: short, one thing at a time, no name out of nowhere.

Each rule takes a notebook and returns its complaints, one line each. test_notebooks.py applies the
rules. Blank lines don't count.
"""

import ast
import builtins
import symtable
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path

import nbformat
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
LONGEST = 30  # lines of a cell
SHORT = 15  # lines of most cells: all but one in eight
DRAWING = 8  # lines of a figure, beside the call that saves it with its alt text
UNDOCUMENTED = 5  # lines of a function's body that go without a docstring
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


@cache
def stored(path: Path) -> NotebookNode:
    """A notebook as it is committed; do not change it."""
    return nbformat.read(path, as_version=4)


def tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def lines(source: str) -> int:
    return sum(bool(line.strip()) for line in source.splitlines())


def code_cells(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """The code cells with their numbers, counted from 1 among all cells."""
    numbered = enumerate(notebook.cells, start=1)
    return ((number, cell) for number, cell in numbered if cell.cell_type == "code")


def definitions(cell: NotebookNode) -> str:
    """What other sections may use of a cell: all of a `setup` cell, imports, functions, classes."""
    if "setup" in tags(cell):
        return cell.source
    kept = (*DEFINITIONS, ast.Import, ast.ImportFrom)
    body = [statement for statement in ast.parse(cell.source).body if isinstance(statement, kept)]
    return ast.unparse(ast.Module(body, []))


def of_code_cells(rule: Callable[[NotebookNode], Iterator[str]]) -> Callable:
    """A rule for notebooks, from one for a code cell."""

    @wraps(rule)
    def complaints(notebook: NotebookNode) -> list[str]:
        return [f"cell {number} {said}" for number, c in code_cells(notebook) for said in rule(c)]

    return complaints


@of_code_cells
def has_no_long_cell(cell):
    if lines(cell.source) > LONGEST:
        yield f"has {lines(cell.source)} lines, more than {LONGEST}"


@of_code_cells
def draws_in_figure_cells(cell):
    """A cell tagged `figure` draws, or defines what draws; book and slides fold it."""
    statements = ast.parse(cell.source).body
    shows = any(mime.startswith("image/") for o in cell.outputs for mime in o.get("data", {}))
    defines = all(isinstance(s, DEFINITIONS) for s in statements)
    if shows != ("figure" in tags(cell)) and not defines:
        yield "is tagged figure if and only if it draws"
    calls = [ast.get_source_segment(cell.source, s) for s in statements]
    drawing = lines(cell.source) - sum(
        lines(c) for c in calls if c.startswith(("plotting.save(", "plotting.show_drawing("))
    )
    if shows and drawing > DRAWING:
        yield f"draws in {drawing} lines, more than {DRAWING}"


@of_code_cells
def says_what_functions_do(cell):
    for node in ast.parse(cell.source).body:
        if isinstance(node, DEFINITIONS) and not ast.get_docstring(node):
            long = node.body[-1].end_lineno - node.body[0].lineno >= UNDOCUMENTED
            yield from [f"defines {node.name} without a docstring"] * long


def names_taken(table: symtable.SymbolTable) -> set[str]:
    """Names that a cell, or a function in it, reads and does not bind."""
    symbols = table.get_symbols()
    taken = {s.get_name() for s in symbols if s.is_referenced() and s.is_global()}
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
        for s in table.get_symbols():
            if s.is_assigned() or s.is_imported():
                everywhere = "setup" in tags(cell) or s.is_imported() or s.is_namespace()
                (shared if everywhere else here).add(s.get_name())
        complaints += [
            f"cell {number} uses {name}, which its section does not define"
            for name in sorted(names_taken(table) - shared - here)
        ]
    return complaints


RULES = [has_no_long_cell, draws_in_figure_cells, says_what_functions_do, sections_stand_alone]
