"""Execute the course: each notebooks/NN_name.py becomes its .ipynb and its figures.

    python book/build.py [--check] [--root DIR] [NAME ...]

The .py file (jupytext py:percent) is the source that people edit. The .ipynb beside it, with all
outputs, and the files in figures/ are written by this script alone, and are the same bytes
whenever and wherever it runs, so that a difference in git means a difference in what the course
says. NAME is the beginning of a notebook's name (`03`); without one, all notebooks run, and
figures that none of them draws any more are removed. `--check` writes nothing, names every file
that would change and exits with 1 if there is one.

A notebook draws into the folder named by the variable CHEEMS_FIGURES, and its figures' names
begin with its own number: `03_decay.svg`.
"""

import argparse
import hashlib
import math
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext
import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 60  # a lecture does not wait longer for a notebook
FIGURE_SUFFIXES = {".svg", ".png", ".pdf"}

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # sets of strings print in one order
    "SOURCE_DATE_EPOCH": "0",  # matplotlib dates its files with it
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # whatever the caller's shell says
}
ANSI_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class BuildError(Exception):
    """What stops the build, in words for the author of the notebook."""


def read_source(path: Path) -> NotebookNode:
    """Read a py:percent file as the notebook that the build stores, only without outputs."""
    notebook = nbformat.v4.new_notebook(metadata=nbformat.from_dict(METADATA))
    seen = Counter()
    for cell in jupytext.read(path, fmt="py:percent").cells:
        # jupytext gives random ids. These follow the text, so that a cell keeps its id while
        # others come and go; the ordinal tells cells of the same text apart.
        key = (cell.cell_type, cell.source)
        identity = f"{cell.cell_type}\n{seen[key]}\n{cell.source}"
        seen[key] += 1
        cell.id = hashlib.sha1(identity.encode()).hexdigest()[:8]
        tags = cell.metadata.get("tags")
        cell.metadata = NotebookNode(tags=tags) if tags else NotebookNode()
        notebook.cells.append(cell)
    return notebook


def kernel_manager() -> AsyncKernelManager:
    """A kernel of the interpreter that runs this script.

    An installed kernelspec named python3 may belong to another environment. With no folder to
    search, jupyter_client falls back on the ipykernel that it can import itself.
    """
    specs = KernelSpecManager(kernel_dirs=[])
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)


def execute(notebook: NotebookNode, source: Path, figures: Path) -> None:
    """Run the cells in order, in the notebook's own folder, and store outputs in `notebook`."""
    start = time.monotonic()
    too_slow = f"{source.stem} takes more than {LIMIT_S} s"

    def time_left(cell: NotebookNode) -> int:
        return max(1, math.ceil(LIMIT_S - (time.monotonic() - start)))

    client = NotebookClient(
        notebook,
        km=kernel_manager(),
        timeout_func=time_left,
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],  # else every kernel warns that it uses TCP
    )
    environment = os.environ | ENVIRONMENT | {"CHEEMS_FIGURES": str(figures)}
    with client.setup_kernel(cwd=str(source.parent), env=environment, cleanup_kc=True):
        cells = tqdm(notebook.cells, desc=source.stem, unit="cell", leave=False, disable=None)
        for number, cell in enumerate(cells, start=1):
            count = client.code_cells_executed + 1
            place = f"{source.stem}, cell {number} of {len(notebook.cells)} (code cell {count})"
            try:
                client.execute_cell(cell, number - 1, execution_count=count)
            except CellExecutionError as error:
                # nbclient's message holds the cell's source, what it printed and the traceback.
                raise BuildError(f"{place} failed\n{ANSI_COLOR.sub('', str(error))}") from error
            except DeadKernelError as error:
                raise BuildError(f"{place} killed its kernel\n{cell.source}") from error
            except CellTimeoutError as error:
                raise BuildError(f"{too_slow}; stopped in {place}\n{cell.source}") from error
    elapsed = time.monotonic() - start
    if elapsed > LIMIT_S:
        raise BuildError(f"{too_slow}: it took {elapsed:.1f} s")


def normalise(notebook: NotebookNode) -> None:
    """Reduce every stored traceback to one line: its frames name files of this machine."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                output.traceback = [f"{output.ename}: {output.evalue}".splitlines()[0]]


def run(source: Path, figures: Path) -> dict[Path, bytes]:
    """Run one notebook; the files it makes, each by the path where it belongs."""
    notebook = read_source(source)
    prefix = source.stem.partition("_")[0] + "_"
    drawn = {}
    with TemporaryDirectory() as folder:
        execute(notebook, source, Path(folder))
        for path in sorted(Path(folder).iterdir()):
            if not path.name.startswith(prefix) or path.suffix not in FIGURE_SUFFIXES:
                raise BuildError(
                    f"{source.stem} drew {path.name}: its figures are named "
                    f"{prefix}*, with one of the endings {', '.join(sorted(FIGURE_SUFFIXES))}"
                )
            drawn[figures / path.name] = path.read_bytes()
    normalise(notebook)
    text = nbformat.writes(notebook) + "\n"
    return {source.with_suffix(".ipynb"): text.encode()} | drawn


def replace(path: Path, content: bytes) -> None:
    """Write a whole file or none of it."""
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def select(root: Path, names: list[str]) -> list[Path]:
    """The sources whose names begin with one of `names`; all of them where there is none."""
    sources = sorted((root / "notebooks").glob("*.py"))
    for name in names or [""]:
        if not any(source.stem.startswith(name) for source in sources):
            known = ", ".join(source.stem for source in sources) or "none"
            raise BuildError(f"no notebook begins with {name!r}; in {root / 'notebooks'}: {known}")
    return [s for s in sources if not names or s.stem.startswith(tuple(names))]


def build(root: Path, names: list[str], check: bool) -> dict[Path, str]:
    """Run the notebooks and, unless `check`, bring their files up to date.

    Returns what each file was that is not as it should be: missing, different or stale.
    """
    figures = root / "figures"
    found = {}
    made = set()
    for source in tqdm(select(root, names), desc="notebooks", disable=None):
        start = time.monotonic()
        files = run(source, figures)
        made |= files.keys()
        for path, content in files.items():
            if not path.exists():
                found[path] = "missing"
            elif path.read_bytes() != content:
                found[path] = "different"
            if path in found and not check:
                replace(path, content)
        seconds = time.monotonic() - start
        tqdm.write(f"{source.stem}  {seconds:.1f} s  {len(files) - 1} figures")
    if not names:
        for path in sorted(figures.glob("*")):
            if path.suffix in FIGURE_SUFFIXES and path not in made:
                found[path] = "stale"
                if not check:
                    path.unlink()
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Execute the notebooks and draw the figures.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the beginning of a name: 03")
    parser.add_argument("--check", action="store_true", help="write nothing, name what differs")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder that has notebooks/")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    try:
        found = build(root, options.names, options.check)
    except BuildError as error:
        print(f"build stopped: {error}", file=sys.stderr)
        return 1
    repair = {"missing": "written", "different": "rewritten", "stale": "removed"}
    for path, state in found.items():
        word = state if options.check else repair[state]
        print(f"{word}: {path.relative_to(root).as_posix()}")
    if options.check:
        print(f"{len(found)} files would change")
        return 1 if found else 0
    print("The notebooks are in notebooks/ (`make lab` opens them), the figures in figures/.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
