"""Mutants: lessons with one small mistake each, made by machine, which the tests have to catch.

    python tests/mutate.py rope convolution      these modules; all lessons if none is named

A mutant is one edit of the syntax tree (`edits` has the kinds). A first run of the judges, which
are the tables and the module's own test file, notes which tests reach which function, and how long
they take. Each mutant is then shown to the tests that reach its function, the fastest first, until
one fails. torch is imported once; each mutant is a fork of that process in which one module comes
from another source. Verdicts are kept in build/mutants, by the hash of source and tests.

tests/survivors.txt has the mutants that may survive, one reviewed line each: what the edit is, and
after " # " why no test should see it. The command fails on a survivor that is not in the list, and
on a line of the list that is caught or gone.
"""

import argparse
import ast
import contextlib
import hashlib
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CACHE, SURVIVORS = ROOT / "build" / "mutants", ROOT / "tests" / "survivors.txt"
TABLES = ("test_layers", "test_operators", "test_refusals")
LESSONS = (
    "convolution", "rope", "mamba", "state_space", "linear_attention", "ssd", "attention",
    "feed_forward", "retrieval", "experts", "config", "model", "train", "tasks", "compare",
)  # fmt: skip
SECONDS_PER_MUTANT, LONGEST_TEST = 20, 3  # of tests that are asked, by their times without a mutant
PYTEST = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
PYTEST += [
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
]  # for what is imported before the fork

# --- edits ----------------------------------------------------------------------------------------

COMPARED = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
}
COMPARED |= {other: one for one, other in COMPARED.items()}
COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult}
COMPUTED |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
COMPUTED |= {ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
NOT_TENSORS = (
    "int",
    "float",
    "bool",
    "str",
    "dtype",
    "Config",
    "Callable",
    "Sequence",
    "Generator",
)


class Mutant(NamedTuple):
    """One edit: its title, which is a line of survivors.txt, its function, and the source."""

    title: str
    kind: str
    function: str
    source: str


def edits(node: ast.AST, parent: ast.AST, scope: "Scope") -> Iterator[tuple[str, ast.AST]]:
    """The kind of each edit that a node offers, and what takes the node's place."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right) if type(op) in COMPARED:
            yield "comparison", ast.Compare(left, [COMPARED[type(op)]()], right)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED:
            yield "operator", ast.BinOp(left, COMPUTED[type(op)](), right)
        case ast.UnaryOp(op=ast.USub() | ast.Invert() | ast.Not(), operand=operand):
            yield "unary dropped", operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
            yield "constant", ast.Constant(value - 1)
        case ast.Call():
            yield from edits_of_call(node, scope)
        case ast.If(body=body, orelse=orelse):
            for value in (True, False):
                yield "condition", ast.If(ast.Constant(value), body, orelse)
        case ast.IfExp(body=body, orelse=orelse):
            yield "condition", body
            yield "condition", orelse
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "statement deleted", ast.Pass()
        case ast.Assign(targets=[ast.Name(id=name)]) if name in names_in(node.value):
            yield "statement deleted", ast.Pass()
        case ast.Name(id=name, ctx=ast.Load()) if name in scope.tensors:
            if isinstance(parent, ast.BinOp) or (
                isinstance(parent, ast.Call) and node in parent.args
            ):
                cut = ast.Attribute(ast.Name(name, ast.Load()), "detach", ast.Load())
                yield "gradient cut", ast.Call(cut, [], [])


def edits_of_call(call: ast.Call, scope: "Scope") -> Iterator[tuple[str, ast.AST]]:
    f, plain = call.func, not any(isinstance(a, ast.Starred) for a in call.args)
    if isinstance(f, ast.Attribute):
        of_module = isinstance(f.value, ast.Name) and f.value.id in scope.modules
        if of_module and plain and len(call.args) and f.value.id in ("F", "torch"):
            yield "call dropped", call.args[0]
        elif not of_module and ast.unparse(f.value) not in ("self", "super()"):
            yield "call dropped", f.value
    for i in range(len(call.args) - 1 if plain else 0):
        swapped = [*call.args]
        swapped[i], swapped[i + 1] = swapped[i + 1], swapped[i]
        yield "arguments swapped", ast.Call(f, swapped, call.keywords)
    for i, keyword in enumerate(call.keywords):
        if keyword.arg:
            others = call.keywords[:i] + call.keywords[i + 1 :]
            yield "keyword forgotten", ast.Call(f, call.args, others)


class Scope(NamedTuple):
    """Names in a function: those that may be tensors, and the modules that the file imports."""

    tensors: set[str]
    modules: set[str]


def names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def scope_of(function: ast.FunctionDef, modules: set[str]) -> Scope:
    arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    tensors = {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and type(n.ctx) is ast.Store
    }
    for argument in arguments:
        said = "" if argument.annotation is None else ast.unparse(argument.annotation)
        if argument.arg != "self" and not any(kind in said for kind in NOT_TENSORS):
            tensors.add(argument.arg)
    return Scope(tensors, modules)


def mutants(source: str, module: str) -> Iterator[Mutant]:
    """All mutants of a source, in its order; docstrings, annotations and messages stay."""
    tree, seen = ast.parse(source), Counter()
    unchanged = ast.unparse(tree)
    modules = {
        (alias.asname or alias.name).partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }

    def visit(node, name, scope, statement):
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            items = value if isinstance(value, list) else [value]
            for i, child in enumerate(items):
                if not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.JoinedStr):
                    continue
                inner, own = name, scope
                around = child if isinstance(child, ast.stmt) else statement
                if isinstance(child, ast.FunctionDef | ast.ClassDef):
                    inner = f"{name}.{child.name}" if name else child.name
                    if isinstance(child, ast.FunctionDef):
                        own = scope_of(child, modules)
                if scope is not None:
                    for kind, new in edits(child, node, scope):
                        source = edited(node, field, i, new)
                        if source != unchanged:
                            edit = title(kind, child, new, around)
                            yield Mutant(f"{module}.{name}: {edit}", kind, name, source)
                yield from visit(child, inner, own, around)

    def edited(parent, field, i, new):
        value = getattr(parent, field)
        changed = [*value[:i], new, *value[i + 1 :]] if isinstance(value, list) else new
        setattr(parent, field, changed)
        source = ast.unparse(ast.fix_missing_locations(tree))
        setattr(parent, field, value)
        return source

    def title(kind, old, new, statement):
        """Without line numbers, which move."""
        short = [ast.unparse(n).partition("\n")[0][:60] for n in (old, new, statement)]
        place = "" if old is statement else f" in {short[2]}"
        said = f"{kind}: {short[0]} -> {short[1]}{place}"
        seen[said] += 1
        return f"{said} ({seen[said]})" if seen[said] > 1 else said

    yield from visit(tree, "", None, tree)


# --- judges ---------------------------------------------------------------------------------------


class OtherSource(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one module from a source of ours, without a compiled copy."""

    def __init__(self, name: str, path: Path, source: str):
        self.name, self.path, self.source = name, path, source

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def get_filename(self, name):
        return str(self.path)

    def get_data(self, path):
        return self.source.encode()


class Notes:
    """A pytest plugin: how long each test takes, and which functions of the module it reaches."""

    def __init__(self, path: Path):
        self.path, self.tests, self.reached = str(path), {}, set()

    def trace(self, frame, event, argument):  # returns no tracer of lines, so calls alone are seen
        if frame.f_code.co_filename == self.path:
            self.reached.add(frame.f_code.co_qualname)

    def pytest_runtest_logstart(self):
        self.reached = set()
        sys.settrace(self.trace)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            sys.settrace(None)
            reached = sorted(name.replace(".<locals>", "") for name in self.reached)
            self.tests[report.nodeid] = dict(seconds=report.duration, reached=reached)


def forked(run: Callable[[], int], seconds: float) -> int:
    """Start run() in a fork that says nothing and ends with its result, or after some seconds."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(seconds))
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        status = 3
        try:
            status = run()
        finally:
            os._exit(status)
    return pid


def judged(module: str, source: str, tests: list[str], plugins: list) -> int:
    """pytest's exit status, with a module imported from another source."""
    import pytest

    path = ROOT / "cheems_ref" / f"{module}.py"
    sys.meta_path.insert(0, OtherSource(f"cheems_ref.{module}", path, source))
    return int(pytest.main([*PYTEST, *tests], plugins=plugins))


def judges(module: str) -> list[Path]:
    names = [*TABLES, f"test_{module}"]
    return [path for name in names if (path := ROOT / "tests" / f"{name}.py").exists()]


def notes_on(module: str, source: str, base: str) -> dict[str, dict]:
    """Tests by their name: how long they take and what they reach, when nothing is wrong."""
    kept = CACHE / f"{module}-{base[:16]}.json"
    if not kept.exists():
        path = ROOT / "cheems_ref" / f"{module}.py"

        def run():
            # What a mutant goes through, too: a source without comments, by our own loader.
            notes = Notes(path)
            same = ast.unparse(ast.parse(source))
            status = judged(module, same, [str(p) for p in judges(module)], [notes])
            kept.write_text(json.dumps(notes.tests) if status == 0 else "{}")
            return status

        os.waitpid(forked(run, 1800), 0)
        if not kept.exists() or not json.loads(kept.read_text()):
            kept.unlink(missing_ok=True)
            raise SystemExit(f"{module}: its tests fail without a mutant")
    return json.loads(kept.read_text())


def tests_for(function: str, notes: dict[str, dict]) -> list[str]:
    """Those that reach a function, the fastest first, as many as fit into the time of a mutant."""
    reaching = sorted(
        (note["seconds"], name) for name, note in notes.items() if function in note["reached"]
    )
    chosen, total = [], 0.0
    for seconds, name in reaching:
        total += seconds
        if seconds <= LONGEST_TEST and total <= SECONDS_PER_MUTANT:
            chosen.append(name)
    return chosen


def judge(module: str, jobs: int, budget: float) -> tuple[dict[str, bool], list[Mutant]]:
    """Whether each mutant that was asked within the budget is caught, and all mutants."""
    source = (ROOT / "cheems_ref" / f"{module}.py").read_text()
    helpers = (ROOT / "tests" / f"{name}.py" for name in ("definitions", "properties"))
    files = b"".join(path.read_bytes() for path in [*judges(module), *helpers])
    tests = hashlib.sha256(files).hexdigest()
    base = hashlib.sha256((source + tests).encode()).hexdigest()
    notes, found = notes_on(module, source, base), list(mutants(source, module))
    verdicts = CACHE / f"{module}-verdicts.json"
    known = json.loads(verdicts.read_text()) if verdicts.exists() else {}
    keys = {m: hashlib.sha256((m.source + tests).encode()).hexdigest()[:24] for m in found}
    # Those of every part of the module first, so that a budget that ends has seen all of it.
    waiting = [m for i in range(7) for m in found[i::7] if keys[m] not in known]
    running, start = {}, time.monotonic()
    while running or (waiting and time.monotonic() - start < budget):
        while waiting and len(running) < jobs and time.monotonic() - start < budget:
            mutant = waiting.pop(0)
            asked = tests_for(mutant.function, notes)
            if not asked:
                known[keys[mutant]] = False
                continue
            run = lambda m=mutant, asked=asked: judged(module, m.source, asked, [])  # noqa: E731
            running[forked(run, 10 + 3 * SECONDS_PER_MUTANT)] = mutant
        if running:
            pid, status = os.wait()
            known[keys[running.pop(pid)]] = status != 0  # a failure, an error, or too long
    of_now = {key: caught for key, caught in known.items() if key in set(keys.values())}
    verdicts.write_text(json.dumps(of_now))
    return {m.title: of_now[keys[m]] for m in found if keys[m] in of_now}, found


# --- the report -----------------------------------------------------------------------------------


def reviewed() -> dict[str, str]:
    """The accepted survivors, and why."""
    lines = SURVIVORS.read_text().splitlines() if SURVIVORS.exists() else []
    pairs = (line.rpartition(" # ") for line in lines if line and not line.startswith("#"))
    return {title: why for title, _, why in pairs}


def report(module: str, jobs: int, budget: float) -> bool:
    """Print what became of a module's mutants; whether all is as reviewed."""
    start = time.monotonic()
    verdicts, found = judge(module, jobs, budget)
    survivors = [title for title, caught in verdicts.items() if not caught]
    accepted = {title for title in reviewed() if title.startswith(f"{module}.")}
    new = [title for title in survivors if title not in accepted]
    stale = [
        title for title in accepted if verdicts.get(title, title not in {m.title for m in found})
    ]
    kinds = Counter(m.kind for m in found if m.title in verdicts)
    caught = Counter(m.kind for m in found if verdicts.get(m.title))
    took = time.monotonic() - start
    print(
        f"{module}: {len(verdicts)} of {len(found)} mutants in {took:.0f} s, "
        f"{len(verdicts) - len(survivors)} caught, {len(survivors) - len(new)} accepted survivors",
        flush=True,
    )
    print("  " + ", ".join(f"{kind} {caught[kind]}/{n}" for kind, n in sorted(kinds.items())))
    for title in new:
        print(f"  survives: {title}")
    for title in stale:
        print(f"  not in need of its line any more: {title}")
    return not new and not stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", choices=[*LESSONS, []], help="lessons; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--budget", type=float, default=1800, help="seconds per module")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "book")]
    os.environ["OMP_NUM_THREADS"] = "1"
    for package in ("torch", "hypothesis", "einops", "jaxtyping", "triton", "transformers"):
        with contextlib.suppress(ImportError):
            importlib.import_module(package)  # once, for all forks
    results = [report(m, options.jobs, options.budget) for m in options.modules or LESSONS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
