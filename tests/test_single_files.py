"""Lessons can be copied: without their argument checks they run beside a few small modules."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cheems_ref.verify import check

PACKAGE = Path(__file__).parents[1] / "cheems_ref"
START = """
import sys, torch
torch.manual_seed(0)
x, positions = torch.randn(2, 11, 16), torch.arange(11).expand(2, -1)
"""
END = """
torch.save(y.detach(), "y.pt")
print(*(name[11:] for name in sys.modules if name.startswith("cheems_ref.")))
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
# The files that are copied without checks, the modules that they import, and a forward pass.
# `check` is there for the modules, which keep their checks.
COPIES = [
    ("ssd", "check rope convolution", SSD),
    ("attention", "check precision rope", ATTENTION),
    ("experts retrieval", "check feed_forward precision", EXPERTS),
]


class WithoutChecks(ast.NodeTransformer):
    """Deletes the import of `check` and the statements that only call it."""

    def visit_ImportFrom(self, node):
        node.names = [alias for alias in node.names if alias.name != "check"]
        return node if node.names else None

    def visit_Expr(self, node):
        call = ast.unparse(node.value)
        return ast.copy_location(ast.Pass(), node) if call.startswith("check.") else node


@pytest.mark.parametrize(("files", "modules", "forward"), COPIES)
def test_a_copy_without_checks_computes_the_same(files, modules, forward, tmp_path):
    files, modules = files.split(), modules.split()
    (tmp_path / "cheems_ref").mkdir()
    for module in ("__init__", *files, *modules):
        source = (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
        if module in files:
            source = ast.unparse(WithoutChecks().visit(ast.parse(source)))
        (tmp_path / "cheems_ref" / f"{module}.py").write_text(source, encoding="utf-8")
    (tmp_path / "run.py").write_text(START + forward + END)
    command = [sys.executable, "run.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert {*run.stdout.split()} == {*files, *modules}, "an import that COPIES does not declare"
    package = {}
    exec(START + forward, package)
    check("copy = package", torch.load(tmp_path / "y.pt"), package["y"].detach())
