"""Take functions from a notebook, and keep the result of each run as soon as it ends."""

import ast
import concurrent.futures
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "experiments" / "records"
CELL = re.compile(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", re.MULTILINE)  # its head, its source

# Let glibc keep the memory of freed tensors. Else every step asks the system for it anew, and two
# processes wait for one another there: a step of two at once took 0.45 s instead of 0.28.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**36)}
KEEP_MEMORY |= {"MALLOC_TOP_PAD_": str(2**26)}


def from_notebook(notebook):
    """Take the definitions from a notebook's cells tagged `experiment`.

    So a record comes from the code that the reader runs. The definitions are functions, classes and
    constants (names in capitals); besides them only the notebook's imports run. The default dtype
    becomes float64, as in the notebooks.

    Args:
        notebook: its name under notebooks/, such as "labs/08a_needle".

    Returns:
        A namespace with all of them as attributes.

    Raises:
        ValueError: no cell has the tag, or a name is defined twice.
    """
    imports, taken = tagged(notebook)
    if not taken:
        raise ValueError(f"{notebook} has no cell tagged experiment that defines anything")
    names = [name for statement in taken for name in defined(statement)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{notebook} defines {', '.join(twice)} twice")
    torch.set_default_dtype(torch.float64)
    namespace = {}
    exec(compile(ast.Module([*imports, *taken], []), notebook, "exec"), namespace)
    return SimpleNamespace(**{name: namespace[name] for name in names})


def tagged(notebook):
    """The imports of a notebook, and what its cells tagged `experiment` define, as statements."""
    text = (ROOT / "notebooks" / f"{notebook}.py").read_text(encoding="utf-8")
    imports, taken = [], []
    for head, source in CELL.findall(text):  # of markdown all lines are comments
        for statement in ast.parse(source).body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                imports.append(statement)
            elif '"experiment"' in head and defined(statement):
                taken.append(statement)
    return imports, taken


def defined(statement):
    """The names that an experiment takes from a statement: a function, a class, or constants."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    if not isinstance(statement, ast.Assign):
        return []
    parts = (part for target in statement.targets for part in ast.walk(target))
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    return names if all(name.isupper() for name in names) else []


def resumed(name, jobs, run, folder=ROOT / "runs" / "records"):
    """The results of all jobs, in their order, each from a process with one thread.

    Each result is kept in runs/records/NAME.jsonl as soon as it is there, and found there after a
    stop. A line that was not finished is run again.
    """
    path = folder / f"{name}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    lines = [line for line in lines if line.endswith("\n")]
    path.write_text("".join(lines))
    done = {json.dumps(job): result for job, result in map(json.loads, lines)}
    missing = [job for job in jobs if json.dumps(job) not in done]
    print(f"{name}: {len(jobs) - len(missing)} of {len(jobs)} runs are there", flush=True)
    workers = dict(initializer=torch.set_num_threads, initargs=(1,))
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), **workers) as pool:
        running = {pool.submit(run, job): job for job in missing}
        for future in concurrent.futures.as_completed(running):
            job = running[future]
            done[json.dumps(job)] = future.result()
            with path.open("a") as file:
                file.write(json.dumps([job, future.result()]) + "\n")
            print(f"{name}: {json.dumps(job)}", flush=True)
    return [done[json.dumps(job)] for job in jobs]


def jobs_and_results(name, run, jobs):
    """Every job together with what came of it."""
    return [job | result for job, result in zip(jobs, resumed(name, jobs, run), strict=True)]


def rounded(rows):
    """The rows with three decimals."""
    return [[round(entry, 3) for entry in row] for row in rows]
