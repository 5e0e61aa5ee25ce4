"""The packages: what imports what, and where a reader starts."""

import ast
import importlib
import re
from functools import reduce
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "cheems_ref"
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
ROOMS = {path.stem: path for path in FILES if not path.stem.startswith("__")}
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): room
    for room, path in ROOMS.items()
}
# What only one module may import, or a few.
ALONE = {
    "mamba_ssm": {"kernels"},
    "triton": {"kernels", "triton_ssd", "compiler"},
    "matplotlib": {"plotting"},
    "IPython": {"plotting"},
    "tqdm": {"train"},
}
NOWHERE = ("cheems_lab", "argparse", "safetensors", "transformers", "tokenizers", "lm_eval")
ALONE |= {name: set() for name in NOWHERE}


def imports(source):
    """What a module imports, wherever in it: rooms of the package, and other packages."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    rooms = {MODULES[name] for name in names if name in MODULES}
    return rooms, {name.partition(".")[0] for name in names} - {"cheems_ref"}


def test_rooms_import_one_way():
    """In the order of the course; a circle is named by graphlib."""
    graph = {name: imports(path.read_text())[0] for name, path in ROOMS.items()}
    height = {}
    for room in TopologicalSorter(graph).static_order():
        height[room] = 1 + max((height[below] for below in graph[room]), default=-1)
    order = ["check", "rope", "ssd", "attention", "config", "model", "train"]
    assert [height[room] for room in order] == sorted(height[room] for room in order)
    assert height["config"] < height["roofline"] < height["budget"]
    assert not {"ssd", "attention", "model"} & (graph["state_space"] | graph["mamba"])
    assert not graph["check"]
    in_one_file = imports(ROOMS["minimal"].read_text())
    assert in_one_file == (set(), {"torch", "math", "functools", "pydoc_data"})


def test_what_one_room_alone_may_know():
    others = {path.stem: imports(path.read_text())[1] for path in FILES}
    for package, allowed in ALONE.items():
        assert {room for room, known in others.items() if package in known} <= allowed, package


def test_the_reader_s_list_names_every_room_once_and_where_to_start():
    text = (PACKAGE / "README.md").read_text()
    listed = re.findall(r"^\| \[`(\w+)`\]\(([\w/]+\.py)\)", text, re.M)
    assert all(PACKAGE / link == ROOMS[name] for name, link in listed)
    assert sorted(name for name, _ in listed) == sorted(ROOMS)
    rows = re.findall(r"^\| \[`(\w+)`\].*\| (`[^|]*`) \|$", text, re.M)
    assert len(rows) > 10
    modules = {room: module for module, room in MODULES.items()}
    for name, functions in rows:
        room = importlib.import_module(modules[name])
        for function in re.findall(r"`([\w.]+)`", functions):
            assert reduce(getattr, function.split("."), room) is not None
