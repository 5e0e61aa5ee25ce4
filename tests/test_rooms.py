"""The packages: what imports what, how large a lesson may be, and where a reader starts."""

import ast
import importlib
import io
import re
import tokenize
from functools import reduce
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "cheems_ref"
LAB = PACKAGE.with_name("cheems_lab")
FILES = sorted(path for path in PACKAGE.glob("*.py"))
ROOMS = {path.stem: path for path in FILES if not path.stem.startswith("__")}
MOST_CODE_LINES = 300
# What only one module may import, or a few.
ALONE = {
    "mamba_ssm": {"kernels"},
    "triton": {"kernels", "triton_ssd"},
    "matplotlib": {"plotting"},
    "IPython": {"plotting"},
    "tqdm": {"train"},
    "argparse": set(),
    "safetensors": set(),
    "transformers": set(),
    "tokenizers": set(),
    "lm_eval": set(),
    "cheems_lab": {"__main__"},
}


def imports(source):
    """What a module imports, wherever in it: rooms of the package, and other packages."""
    rooms, others = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "cheems_ref":
            names = [f"cheems_ref.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first != "cheems_ref":
                others.add(first)
            elif rest:
                rooms.add(rest.partition(".")[0])
    return rooms, others


def code_lines(source):
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    docstrings, code = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    quiet = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in quiet:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def floors(graph):
    """Rooms by floor, each above all that it imports; a circle raises ValueError and is named."""
    height, standing = {}, []

    def climb(room):
        if room in standing:
            circle = [*standing[standing.index(room) :], room]
            raise ValueError("rooms import one another: " + " -> ".join(circle))
        if room not in height:
            standing.append(room)
            height[room] = 1 + max((climb(below) for below in sorted(graph[room])), default=-1)
            standing.pop()
        return height[room]

    for room in graph:
        climb(room)
    return height


GRAPH = {name: imports(path.read_text())[0] for name, path in ROOMS.items()}


def test_rooms_import_one_way():
    height = floors(GRAPH)
    order = ["check", "rope", "ssd", "attention", "config", "model", "train"]
    assert [height[room] for room in order] == sorted(height[room] for room in order)
    assert height["config"] < height["roofline"] < height["budget"]
    assert not {"ssd", "attention", "model"} & (GRAPH["state_space"] | GRAPH["mamba"])
    assert not GRAPH["check"]


def test_a_circle_is_named():
    with pytest.raises(ValueError, match="a -> b -> a"):
        floors({"a": {"b"}, "b": {"c", "a"}, "c": set()})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_room_is_read_in_one_sitting(path):
    assert code_lines(path.read_text()) <= MOST_CODE_LINES


def test_the_packages_stay_compact():
    """Lines of code, against their limits (DESIGN.md §1)."""
    for package, most in ((PACKAGE, 3800), (LAB, 1600)):
        lines = sum(code_lines(path.read_text()) for path in package.rglob("*.py"))
        assert lines <= most, f"{package.name} has {lines} lines of code"


def test_code_lines_are_counted():
    source = (
        '"""Doc.\n\nMore.\n"""\n\n# why\nx = (\n    1,  # one\n)\n\n\ndef f():\n    """Doc."""\n'
    )
    assert code_lines(source) == 4


@pytest.mark.parametrize("package", ALONE)
def test_what_one_room_alone_may_know(package):
    knowing = {path.stem for path in FILES if package in imports(path.read_text())[1]}
    assert knowing <= ALONE[package]


def test_the_reader_s_list_names_every_room_once():
    listed = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.py\)", (PACKAGE / "README.md").read_text(), re.M)
    assert all(name == link for name, link in listed)
    assert sorted(name for name, _ in listed) == sorted(ROOMS)


def test_the_reader_s_list_starts_with_what_is_there():
    rows = re.findall(
        r"^\| \[`(\w+)`\].*\| (`[^|]*`) \|$", (PACKAGE / "README.md").read_text(), re.M
    )
    assert len(rows) > 10
    for name, functions in rows:
        room = importlib.import_module(f"cheems_ref.{name}")
        for function in re.findall(r"`([\w.]+)`", functions):
            assert reduce(getattr, function.split("."), room) is not None
