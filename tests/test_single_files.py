"""Lessons can be copied: without their argument checks they run beside a few small modules."""

import ast
from pathlib import Path

import pytest
import torch
from einops import rearrange, repeat

import cheems_ref.ssd as ssd
from cheems_ref.verify import check

PACKAGE = Path(__file__).parents[1] / "cheems_ref"
START = """
import torch
torch.manual_seed(0)
x, positions = torch.randn(2, 11, 16), torch.arange(11).expand(2, -1)
"""
SSD = """
from cheems_ref.ssd import SSD
layers = [SSD(16, n_heads=4, n_groups=2, position=name) for name in ("rope", "conv", "decay")]
y = torch.stack([layer(x, positions)[0] for layer in layers])
"""
ATTENTION = """
from cheems_ref.attention import QCAttn
y, _ = QCAttn(16, n_heads=4, n_kv_heads=2)(x, positions)
"""
EXPERTS = """
from cheems_ref.experts import MoE, CDMoE
y = MoE(16, 8, n_experts=4, k=2)(x) + CDMoE(16, n_experts=16, n_heads=2, k=3, d_query=8, d_ff=8)(x)
"""
# The files that are copied without checks, and a forward pass.
COPIES = {
    "ssd": ("ssd", SSD),
    "attention": ("attention", ATTENTION),
    "experts": ("experts retrieval", EXPERTS),
}


def imported_by(module):
    """The modules of the package that a module imports at once, and those that they import."""
    names = set()
    for node in ast.parse(path_of(module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "cheems_ref":
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    names = {name.partition(".")[2] for name in names}
    found = {name for name in names if path_of(name).is_file()}
    return found.union(*map(imported_by, found))


def path_of(module, package=PACKAGE):
    """The file of a module, which may be in a subpackage."""
    return package.joinpath(*module.split(".")).with_suffix(".py")


class WithoutChecks(ast.NodeTransformer):
    """Deletes the import of `check` and the statements that only call it."""

    def visit_ImportFrom(self, node):
        node.names = [alias for alias in node.names if alias.name != "check"]
        return node if node.names else None

    def visit_Expr(self, node):
        call = ast.unparse(node.value)
        return ast.copy_location(ast.Pass(), node) if call.startswith("check.") else node


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_without_checks_computes_the_same(copied, tmp_path, monkeypatch):
    """Beside at most three modules, in a package of another name."""
    files, forward = COPIES[copied]
    name, wanted = f"copied_{copied}", set().union(files.split(), *map(imported_by, files.split()))
    assert len(wanted - {*files.split()}) <= 3
    for module in ("__init__", *wanted):
        source = path_of(module).read_text(encoding="utf-8")
        if module in files.split():
            source = ast.unparse(WithoutChecks().visit(ast.parse(source)))
        target = path_of(module, tmp_path / name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.replace("cheems_ref", name), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    package, copy = {}, {}
    exec(START + forward, package)
    exec(START + forward.replace("cheems_ref", name), copy)
    check("copy = package", copy["y"], package["y"])


def test_the_chunked_form_can_be_copied_alone():
    """`_chunked` and what it calls need torch and einops only, as the docstring of ssd.py says."""
    tree = ast.parse((PACKAGE / "ssd.py").read_text(encoding="utf-8"))
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    defined |= {node.targets[0].id: node for node in tree.body if isinstance(node, ast.Assign)}
    copied, waiting = {}, ["_chunked"]
    while waiting:
        name = waiting.pop()
        if name in defined and name not in copied:
            copied[name] = defined[name]
            waiting += [n.id for n in ast.walk(defined[name]) if isinstance(n, ast.Name)]
    assert {"_chunked", "_four_steps", "CHUNKS_PER_BLOCK"} <= {*copied} and len(copied) < 8
    namespace = dict(torch=torch, F=torch.nn.functional, rearrange=rearrange, repeat=repeat)
    exec("\n".join(map(ast.unparse, copied.values())), namespace)

    x, dt, A, D = torch.randn(2, 11, 4, 3), torch.rand(2, 11, 4), -torch.rand(4), torch.randn(4)
    B, C, state = torch.randn(2, 11, 2, 5), torch.randn(2, 11, 2, 5), torch.randn(2, 4, 3, 5)
    y, final = namespace["_chunked"](x, dt, A, B, C, state, 4)
    options = dict(D=D, chunk_size=4, initial_state=state, return_final_state=True)
    truth, final_truth = ssd.ssd_chunked(x, dt, A, B, C, **options)
    check("copy + D x = package", y + D[:, None] * x, truth)
    check("final state", final, final_truth)
