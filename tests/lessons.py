"""What makes a cell teach: short, one thing at a time, nothing out of nowhere.

Each rule takes a notebook and returns its complaints, one line each, as those of test_notebooks.py
do, which applies them. Blank lines are not counted.
"""

import ast
import builtins
import copy
import symtable
from collections.abc import Iterable, Iterator

from nbformat import NotebookNode

LONGEST = 30  # lines of a cell
SHORT = 15  # lines of most cells: all but one in eight
DRAWING = 8  # lines of a figure, beside the call that saves it with its alt text
UNDOCUMENTED = 5  # lines of a function's body that go without a docstring


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
        if shows and lines(cell.source) - lines(saved) > DRAWING:
            count = lines(cell.source) - lines(saved)
            complaints.append(f"cell {number} draws in {count} lines, more than {DRAWING}")
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


def one_by_one(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in the order in which they run, those inside `for`, `with` and `if` included."""
    for statement in statements:
        inner = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
        for handler in getattr(statement, "handlers", []):
            caught = ast.Assign(
                [ast.Name(handler.name or "_", ast.Store())], handler.type, lineno=0
            )
            inner.append([caught, *handler.body])
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) or not any(inner):
            yield statement
            continue
        if isinstance(statement, ast.For):
            yield ast.Assign([statement.target], statement.iter, lineno=0)
        elif isinstance(statement, ast.With):
            for item in statement.items:
                target = item.optional_vars or ast.Name("_", ast.Store())
                yield ast.Assign([target], item.context_expr, lineno=0)
        elif isinstance(statement, (ast.If, ast.While)):
            yield ast.Expr(statement.test)
        for body in inner:
            yield from one_by_one(body)


class AsGenerators(ast.NodeTransformer):
    """Makes every comprehension a generator: from Python 3.12 on the others have no scope of their
    own, and their variables stand among the names around them.
    """

    def visit_ListComp(self, node):
        return self.generic_visit(ast.GeneratorExp(node.elt, node.generators))

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node):
        pair = ast.Tuple([node.key, node.value], ast.Load())
        return self.generic_visit(ast.GeneratorExp(pair, node.generators))


def names(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """What a statement takes from outside itself, and what it binds."""
    statement = AsGenerators().visit(copy.deepcopy(statement))
    outermost = symtable.symtable(ast.unparse(statement), "a cell", "exec")
    taken = {s.get_name() for s in outermost.get_symbols() if s.is_referenced()}
    bound = {s.get_name() for s in outermost.get_symbols() if s.is_assigned() or s.is_imported()}
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        taken.add(statement.target.id)
    inner = list(outermost.get_children())
    while inner:
        table = inner.pop()
        inner += table.get_children()
        taken |= {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
    definition = isinstance(statement, (ast.FunctionDef, ast.ClassDef))
    return taken - ({statement.name} if definition else set()), bound


def sections_stand_alone(notebook: NotebookNode) -> list[str]:
    """A section uses what it binds itself, functions and imports, and what `setup` cells bind."""
    shared, complaints, here = set(dir(builtins)) | {"_"}, [], set()
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type != "code":
            if any(line.startswith("## ") for line in cell.source.splitlines()):
                here = set()
            continue
        for statement in one_by_one(statements_of(cell)):
            taken, bound = names(statement)
            complaints += [
                f"cell {number} uses {name}, which its section does not define"
                for name in sorted(taken - shared - here)
            ]
            common = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
            if "setup" in tags(cell) or isinstance(statement, common):
                shared |= bound
            here |= bound
    return complaints


RULES = [
    has_no_long_cell,
    draws_in_figure_cells,
    says_what_functions_do,
    sections_stand_alone,
]
