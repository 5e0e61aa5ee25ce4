"""Mutants: lessons with one small mistake each, made by machine, which the tests have to catch.

    python tests/mutate.py rope convolution      these modules; all lessons if none is named
    python tests/mutate.py ssd --sample 24       24 mutants, spread evenly over the module

A mutant is one edit of the syntax tree (`edits` has the kinds). A first run of the judges notes
which tests reach which function, and how long they take. The judges are the tables, the properties
that the planted mistakes break, and the module's own test file. Each mutant is then shown to the
tests that reach its function, the fastest first, until one fails.

Importing torch and collecting the tests takes much longer than most mutants live, so it is done
once. Each mutant is a fork of that process in which the module's functions get the mutant's code
and defaults. What ran at import, such as a decorator, has run without the mutant. Times are those
of the processor, so a busy machine changes no verdict. Verdicts are kept in build/mutants, by the
hash of source and tests.

tests/survivors.txt has the mutants that may survive, one reviewed line each: what the edit is, and
after " # " why no test should see it. The command fails on a survivor that is not in the list, and
on a line of the list that is caught or gone. It also fails on a row of planted/ whose source has
changed: the tests skip such a row, so it controls nothing until somebody quotes the new source.
"""

import argparse
import ast
import gc
import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHE, SURVIVORS = ROOT / "build" / "mutants", ROOT / "tests" / "survivors.txt"
TABLES = ("test_layers", "test_operators", "test_refusals", "test_planted")
OTHERS = dict(model=["test_generate"], train=["test_training"], config=["test_model"])
OTHERS |= dict(feed_forward=["test_experts"], retrieval=["test_experts"], attention=["test_model"])
LESSONS = (
    "convolution", "rope", "mamba", "state_space", "linear_attention", "ssd", "attention",
    "feed_forward", "retrieval", "experts", "config", "model", "train", "tasks", "compare",
)  # fmt: skip
PATHS = {path.stem: path for path in (ROOT / "cheems_ref").rglob("*.py") if path.stem in LESSONS}
SECONDS_PER_MUTANT, LONGEST_TEST = 20, 5  # of tests asked, by their times without a mutant
PYTEST = ["-qq", "--capture=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
PYTEST += ["-k", "not test_planted or has_the_property"]  # the others copy the module's file

# --- edits ----------------------------------------------------------------------------------------

COMPARED = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq}
COMPARED |= {ast.Is: ast.IsNot, ast.In: ast.NotIn}
COMPARED |= {other: one for one, other in COMPARED.items()}
COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult}
COMPUTED |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
COMPUTED |= {ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
NOT_TENSORS = ("int", "float", "bool", "str", "dtype", "Config", "Callable", "Sequence")
NOT_TENSORS += ("Generator", "Int[", "Bool[", "Integer[", "Ids", "Mask", "Allowed", "Positions")
WITHOUT_GRADIENTS = ("tasks", "compare", "config")


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
        case ast.Name(id=name, ctx=ast.Load()) if name in scope.differentiable:
            argument = isinstance(parent, ast.Call) and node in parent.args
            checked = argument and "check" in ast.unparse(parent.func)  # without a gradient
            if isinstance(parent, ast.BinOp) or (argument and not checked):
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
    """Names in a function: those that may have gradients, and the modules that the file imports."""

    differentiable: set[str]
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
    tree, seen, cut = ast.parse(source), Counter(), module not in WITHOUT_GRADIENTS
    unchanged = [ast.unparse(node) for node in tree.body]
    modules = {
        (alias.asname or alias.name).partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }

    def visit(node, name, scope, statement, top):
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
                        if kind == "gradient cut" and not cut:
                            continue
                        source = edited(node, field, i, new, top)
                        if source != unchanged[top]:
                            edit = title(kind, child, new, around)
                            whole = [*unchanged[:top], source, *unchanged[top + 1 :]]
                            yield Mutant(f"{module}.{name}: {edit}", kind, name, "\n".join(whole))
                yield from visit(child, inner, own, around, top)

    def edited(parent, field, i, new, top):
        value = getattr(parent, field)
        changed = [*value[:i], new, *value[i + 1 :]] if isinstance(value, list) else new
        setattr(parent, field, changed)
        source = ast.unparse(ast.fix_missing_locations(tree.body[top]))
        setattr(parent, field, value)
        return source

    def title(kind, old, new, statement):
        """Without line numbers, which move."""
        short = [ast.unparse(n).partition("\n")[0][:60] for n in (old, new, statement)]
        place = "" if old is statement else f" in {short[2]}"
        said = f"{kind}: {short[0]} -> {short[1]}{place}"
        seen[said] += 1
        return f"{said} ({seen[said]})" if seen[said] > 1 else said

    for top, node in enumerate(tree.body):
        own = scope_of(node, modules) if isinstance(node, ast.FunctionDef) else None
        yield from visit(node, getattr(node, "name", ""), own, node, top)


# --- judges ---------------------------------------------------------------------------------------


def codes(code: CodeType) -> dict[str, CodeType]:
    """The code of everything that is defined in a code, by its qualified name."""
    inside = [c for c in code.co_consts if isinstance(c, CodeType)]
    return {c.co_qualname: c for c in inside} | {n: d for c in inside for n, d in codes(c).items()}


def swap(source: str, path: Path, live: dict[str, list[FunctionType]]) -> None:
    """Give the functions of a module, whoever holds them, the code and defaults of a source."""
    new = codes(compile(source, path, "exec"))

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix + getattr(child, "name", "")
            if isinstance(child, ast.FunctionDef):
                empty = ast.Expression(ast.Lambda(child.args, ast.Constant(None)))
                empty = compile(ast.fix_missing_locations(empty), path, "eval")
                for f in live.get(name, []):
                    # What no longer says super() goes on holding the class.
                    free = new[name].co_freevars or f.__code__.co_freevars
                    f.__code__ = new[name].replace(co_freevars=free)
                    like = eval(empty, f.__globals__)
                    f.__defaults__, f.__kwdefaults__ = like.__defaults__, like.__kwdefaults__
                visit(child, f"{name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{name}.")

    visit(ast.parse(source), "")


class Notes:
    """A pytest plugin: how long each test takes, and which functions of the lessons it reaches."""

    def __init__(self, paths: dict[str, str]):
        self.paths, self.tests, self.reached, self.start = paths, {}, set(), 0.0

    def trace(self, frame, event, argument):  # returns no tracer of lines, so calls alone are seen
        if module := self.paths.get(frame.f_code.co_filename):
            self.reached.add(f"{module}.{frame.f_code.co_qualname}".replace(".<locals>", ""))

    def too_long(self, *of_signal):
        pytest.skip("no judge: takes too long")

    def pytest_runtest_logstart(self):
        self.reached, self.start = set(), time.process_time()
        signal.signal(signal.SIGPROF, self.too_long)
        signal.setitimer(signal.ITIMER_PROF, 2 * LONGEST_TEST)
        sys.settrace(self.trace)

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.settrace(None)
            seconds = time.process_time() - self.start
            if report.passed:
                self.tests[report.nodeid] = dict(seconds=seconds, reached=sorted(self.reached))


def forked(run: Callable[[], bool], seconds: float) -> int:
    """Start run() in a fork that says nothing and ends with its result, or after some seconds."""
    pid = os.fork()
    if pid == 0:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor, which others may use
        signal.alarm(int(100 * seconds))
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        status = 3
        try:
            status = 0 if run() else 1
        finally:
            os._exit(status)
    return pid


def passes(items: list[pytest.Item]) -> bool:
    for item, following in zip(items, [*items[1:], None], strict=False):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if item.session.testsfailed:
            return False
    return True


def files_of(module: str) -> list[Path]:
    names = [*TABLES, f"test_{module}", *OTHERS.get(module, ())]
    return [path for name in names if (path := ROOT / "tests" / f"{name}.py").exists()]


class Judges:
    """A pytest plugin that shows mutants to the collected tests, instead of running them once."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.fine = options, True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for row in stale_rows():
            print(f"  its source has changed: {row}", flush=True)
            self.fine = False
        self.items = {item.nodeid: item for item in session.items}
        self.live = {module: {} for module in LESSONS}
        self.modules = {str(path): module for module, path in PATHS.items()}
        for f in gc.get_objects():
            if type(f) is FunctionType and (module := self.modules.get(f.__code__.co_filename)):
                self.live[module].setdefault(f.__code__.co_qualname, []).append(f)
        helpers = [ROOT / "tests" / f"{name}.py" for name in ("definitions", "properties")]
        self.helpers = b"".join(path.read_bytes() for path in helpers if path.exists())
        self.notes = {}
        for module in self.options.modules or LESSONS:
            for file in files_of(module):
                if file not in self.notes:
                    self.notes[file] = self.notes_on(file, session.config)
            self.fine &= report(module, *self.judge(module))
        return True

    def notes_on(self, file: Path, config: pytest.Config) -> dict[str, dict]:
        """Its tests by name: how long they take and what they reach, when nothing is wrong."""
        sources = b"".join(path.read_bytes() for path in PATHS.values())
        base = hashlib.sha256(sources + self.helpers + file.read_bytes()).hexdigest()[:16]
        kept = CACHE / f"{file.stem}-{base}.json"

        def run():
            # What a mutant goes through, too: code of a source without comments.
            for module, path in PATHS.items():
                swap(ast.unparse(ast.parse(path.read_text())), path, self.live[module])
            notes = Notes(self.modules)
            config.pluginmanager.register(notes)
            fine = passes([item for item in self.items.values() if item.path == file])
            if fine:
                kept.write_text(json.dumps(notes.tests))
            return fine

        if not kept.exists():
            os.waitpid(forked(run, 1800), 0)
            if not kept.exists():
                raise SystemExit(f"{file.name} fails without a mutant")
        return json.loads(kept.read_text())

    def tests_for(self, mutant: Mutant, module: str) -> list[pytest.Item]:
        """Those that reach its function, fastest first, as many as fit into a mutant's time."""
        notes = {name: n for file in files_of(module) for name, n in self.notes[file].items()}
        of_function = f"{module}.{mutant.function}"
        reaching = sorted(
            (n["seconds"], name) for name, n in notes.items() if of_function in n["reached"]
        )
        chosen, total = [], 0.0
        for seconds, name in reaching:
            total += seconds
            if seconds <= LONGEST_TEST and total <= SECONDS_PER_MUTANT:
                chosen.append(self.items[name])
        return chosen

    def judge(self, module: str) -> tuple[dict[str, bool], list[Mutant], float]:
        """Whether each mutant that was asked is caught, all mutants, and how long it took."""
        path, start = PATHS[module], time.monotonic()
        files = b"".join(file.read_bytes() for file in files_of(module)) + self.helpers
        tests = hashlib.sha256(files).hexdigest()
        found = list(mutants(path.read_text(), module))
        verdicts = CACHE / f"{module}-verdicts.json"
        keys = {m: hashlib.sha256((m.source + tests).encode()).hexdigest()[:24] for m in found}
        known = json.loads(verdicts.read_text()) if verdicts.exists() else {}
        known = {key: caught for key, caught in known.items() if key in set(keys.values())}
        n = min(self.options.sample or len(found), len(found))
        sample = [found[i * len(found) // n] for i in range(n)]
        # Those of every part of the module first, so that a budget that ends has seen all of it.
        waiting = [m for i in range(7) for m in sample[i::7] if keys[m] not in known]
        running = {}
        while running or waiting:
            if time.monotonic() - start > self.options.budget:
                waiting = []
            while waiting and len(running) < self.options.jobs:
                mutant = waiting.pop(0)
                asked = self.tests_for(mutant, module)

                def run(mutant=mutant, asked=asked):
                    swap(mutant.source, path, self.live[module])
                    return passes(asked)

                running[forked(run, 10 + SECONDS_PER_MUTANT)] = mutant
            if running:
                pid, status = os.wait()
                mutant = running.pop(pid)
                if os.waitstatus_to_exitcode(status) == 3:
                    print(f"  cannot be judged: {mutant.title}", flush=True)
                else:
                    known[keys[mutant]] = status != 0  # a failure, an error, or too long
                verdicts.write_text(json.dumps(known))
        asked = {m.title: known[keys[m]] for m in sample if keys[m] in known}
        return asked, found, time.monotonic() - start


# --- the report -----------------------------------------------------------------------------------


def reviewed() -> dict[str, str]:
    """The accepted survivors, and why."""
    lines = SURVIVORS.read_text().splitlines() if SURVIVORS.exists() else []
    pairs = (line.rpartition(" # ") for line in lines if line and not line.startswith("#"))
    return {title: why for title, _, why in pairs}


def report(module: str, verdicts: dict[str, bool], found: list[Mutant], took: float) -> bool:
    """Print what became of a module's mutants; whether all is as reviewed."""
    survivors = [title for title, caught in verdicts.items() if not caught]
    accepted = {title for title in reviewed() if title.startswith(f"{module}.")}
    new = [title for title in survivors if title not in accepted]
    stale = [
        title for title in accepted if verdicts.get(title, title not in {m.title for m in found})
    ]
    kinds = Counter(m.kind for m in found if m.title in verdicts)
    caught = Counter(m.kind for m in found if verdicts.get(m.title))
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


def stale_rows() -> list[str]:
    """The planted mistakes that no longer find the source they quote, and why."""
    import ranks  # not at the top: the folders of the tests are on the path only in main
    from planting import stale
    from test_planted import TABLES

    tables = TABLES | {"ranks": ranks}
    found = [
        (f"{name}: {mistake.title}", stale(mistake, table.ROOMS))
        for name, table in tables.items()
        for mistake in table.MISTAKES
    ]
    return [f"{title}: {why}" for title, why in found if why]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", choices=[*LESSONS, []], help="lessons; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--budget", type=float, default=1800, help="seconds per module")
    parser.add_argument("--sample", type=int, help="mutants per module, spread evenly over it")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ["OMP_NUM_THREADS"] = "1"
    judges = Judges(options)
    files = {str(file): None for m in options.modules or LESSONS for file in files_of(m)}
    status = pytest.main([*PYTEST, *files], plugins=[judges])
    return 0 if status == 0 and judges.fine else 1


if __name__ == "__main__":
    sys.exit(main())
