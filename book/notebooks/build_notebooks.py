"""Execute the course: each NN_name.py of notebooks/, of its labs/ and of its reference/, becomes an
.ipynb and its figures.

    python -m book.notebooks [--check] [--jobs N] [--root DIR] [NAME ...]

The .py file (jupytext py:percent) is the source that people edit. The .ipynb beside it, with all
outputs, and the files in figures/ are written by this script alone, and are the same bytes
whenever and wherever it runs, so that a difference in git means a difference in what the course
says. Two things depend on the machine. So what is stored stays where nothing else has changed:
lines that begin with a bar, │, which a model wrote that was trained in the run; and the PNG beside
an SVG, which JupyterLab and VS Code show where they don't trust a notebook. Cells tagged `setup`,
`figure` or `guard` are stored folded, those with `quoted` together with their output.

NAME is the beginning of a notebook's name (`03`); without one, all notebooks run, and figures that
none of them draws any more are removed. `--check` writes nothing, names every file that would
change and exits with 1 if there is one. Up to N notebooks run at a time, by default one per core,
and share the cores; what they print may not depend on N. One that is named may take a minute; among
all, where a machine may be slow or busy, ten.

A notebook draws into the folder named by the variable CHEEMS_FIGURES, and its figures' names
begin with its own number: `03_decay.svg`.
"""

import argparse
import asyncio
import hashlib
import math
import os
import re
import sys
import time
from base64 import b64decode
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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

from book.notebooks.forked_kernels import start_by_forking
from book.project import ROOT, BuildError, chapter_number, chapters

LIMIT_S = 60  # a lecture does not wait longer for a notebook
LIMIT_AMONG_ALL_S = 600
STARTS = 3  # of a kernel, until one is up
FIGURE_SUFFIXES = {".svg", ".png", ".pdf"}
MADE = re.compile(r"\d\d[a-z]?_\w+")  # the name of a figure; others in the folder are not ours

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # sets of strings print in one order
    "SOURCE_DATE_EPOCH": "0",  # matplotlib dates its files with it
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # whatever the caller's shell says
}
FOLDED = {"setup", "figure", "guard"}  # the tags of cells whose code is hidden until one clicks
QUOTED = "quoted"  # beside `guard`: what is printed is hidden, too, since only chapter 12 quotes it
# The metadata beside the tags: what the slides of the cell say, and which figure they show.
TITLE, SHOWS = "slide_title", "slide_figure"
WRITTEN = re.compile(r"(?m)(?:^│[^\n]*\n)+")  # by a model that was trained in the run
ANSI_COLOR = re.compile(r"\x1b\[[0-9;]*m")


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
        of_slides = {name: cell.metadata[name] for name in (TITLE, SHOWS) if name in cell.metadata}
        cell.metadata = NotebookNode(tags=tags) if tags else NotebookNode()
        cell.metadata |= of_slides
        if FOLDED & set(tags or []):
            cell.metadata.jupyter = NotebookNode(source_hidden=True)
            if QUOTED in tags:
                cell.metadata.jupyter.outputs_hidden = True
        notebook.cells.append(cell)
    return notebook


def kernel_manager() -> AsyncKernelManager:
    """A kernel of the interpreter that runs this script.

    An installed kernelspec named python3 may belong to another environment. With no folder to
    search, jupyter_client falls back on the ipykernel that it can import itself.
    """
    specs = KernelSpecManager(kernel_dirs=[])
    # One that has started processes waits for them when it ends, until it is terminated.
    return AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=specs, shutdown_wait_time=1.0
    )


@asynccontextmanager
async def running_kernel(client: NotebookClient, folder: Path, env: dict) -> AsyncIterator[None]:
    """Start the client's kernel in `folder`, and leave none behind, whatever happens.

    In place of nbclient's own, which takes Ctrl-C for itself and stops one kernel with it. A kernel
    is given ports that are free, and may find them taken when it comes to use them: then the next
    one is tried.
    """
    kernel = client.km
    try:
        for attempt in range(1, STARTS + 1):
            try:
                await client.async_start_new_kernel(cwd=str(folder), env=env)
                await client.async_start_new_kernel_client()
                break
            except RuntimeError:
                if attempt == STARTS:
                    raise
                client.km = kernel = kernel_manager()
        yield
        await kernel.shutdown_kernel()
    finally:
        if client.kc is not None:
            client.kc.stop_channels()
        if kernel.has_kernel:
            await kernel.shutdown_kernel(now=True)


async def execute(
    notebook: NotebookNode, source: Path, figures: Path, threads: int | None, limit: float
) -> None:
    """Run the cells in order, in the notebook's own folder, and store outputs in `notebook`.

    `threads` is for torch; None leaves it all cores. The clock starts here, so waiting for others
    does not count; `limit` is in seconds.
    """
    start = time.monotonic()
    too_slow = f"{source.stem} takes more than {limit} s"

    def time_left(cell: NotebookNode) -> int:
        return max(1, math.ceil(limit - (time.monotonic() - start)))

    client = NotebookClient(
        notebook,
        km=kernel_manager(),
        timeout_func=time_left,
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],  # else every kernel warns that it uses TCP
    )
    environment = os.environ | ENVIRONMENT | {"CHEEMS_FIGURES": str(figures)}
    if threads:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    cells = notebook.cells
    with tqdm(cells, desc=source.stem, unit="cell", leave=False, disable=None) as bar:
        async with running_kernel(client, source.parent, environment):
            for number, cell in enumerate(bar, start=1):
                count = client.code_cells_executed + 1
                place = f"{source.stem}, cell {number} of {len(cells)} (code cell {count})"
                try:
                    await client.async_execute_cell(cell, number - 1, execution_count=count)
                except CellExecutionError as error:
                    # nbclient's message holds the cell's source, what it printed, the traceback.
                    text = ANSI_COLOR.sub("", str(error))
                    raise BuildError(f"{place} failed\n{text}") from error
                except DeadKernelError as error:
                    if asyncio.current_task().cancelling():  # nbclient takes the one for the other
                        raise asyncio.CancelledError from error
                    raise BuildError(f"{place} killed its kernel\n{cell.source}") from error
                except CellTimeoutError as error:
                    raise BuildError(f"{too_slow}; stopped in {place}\n{cell.source}") from error
    elapsed = time.monotonic() - start
    if elapsed > limit:
        raise BuildError(f"{too_slow}: it took {elapsed:.1f} s")


def normalise(notebook: NotebookNode) -> None:
    """Reduce every stored traceback to one line: its frames name files of this machine."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                output.traceback = [f"{output.ename}: {output.evalue}".splitlines()[0]]


def keep_written(notebook: NotebookNode, path: Path) -> None:
    """Keep the stored lines that a model wrote, in outputs where nothing else changed."""
    stored = nbformat.read(path, as_version=4).cells if path.exists() else []
    before = {cell.id: cell.get("outputs", []) for cell in stored}
    for cell in notebook.cells:
        for now, then in zip(cell.get("outputs", []), before.get(cell.id, []), strict=False):
            texts = now.get("text", ""), then.get("text", "")
            if texts[0] and len({WRITTEN.sub("│", text) for text in texts}) == 1:
                now.text = then.text


def pixels(png: str) -> bytes:
    """Width and height of a PNG in base64, eight bytes."""
    return b64decode(png)[16:24]


def keep_pictures(notebook: NotebookNode, path: Path) -> None:
    """Keep the stored PNG beside an SVG that is the same: another machine draws other bytes."""
    stored = nbformat.read(path, as_version=4).cells if path.exists() else []
    before = {
        output.data["image/svg+xml"]: output.data["image/png"]
        for cell in stored
        for output in cell.get("outputs", [])
        if {"image/svg+xml", "image/png"} <= output.get("data", {}).keys()
    }
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            then, now = before.get(data.get("image/svg+xml")), data.get("image/png")
            if then and now and pixels(then) == pixels(now):
                data["image/png"] = then


async def run(source: Path, figures: Path, threads: int | None, limit: float) -> dict[Path, bytes]:
    """Run one notebook; the files it makes, each by the path where it belongs."""
    notebook = read_source(source)
    prefix = chapter_number(source) + "_"
    drawn = {}
    with TemporaryDirectory() as folder:
        await execute(notebook, source, Path(folder), threads, limit)
        for path in sorted(Path(folder).iterdir()):
            if not path.name.startswith(prefix) or path.suffix not in FIGURE_SUFFIXES:
                raise BuildError(
                    f"{source.stem} drew {path.name}: its figures are named "
                    f"{prefix}*, with one of the endings {', '.join(sorted(FIGURE_SUFFIXES))}"
                )
            drawn[figures / path.name] = path.read_bytes()
    normalise(notebook)
    keep_written(notebook, source.with_suffix(".ipynb"))
    keep_pictures(notebook, source.with_suffix(".ipynb"))
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
    sources = chapters(root)
    for name in names or [""]:
        if not any(source.stem.startswith(name) for source in sources):
            known = ", ".join(source.stem for source in sources) or "none"
            raise BuildError(f"no notebook begins with {name!r}; in {root / 'notebooks'}: {known}")
    return [s for s in sources if not names or s.stem.startswith(tuple(names))]


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


async def build(root: Path, names: list[str], check: bool, jobs: int) -> dict[Path, str]:
    """Run the notebooks and, unless `check`, bring their files up to date.

    Returns what each file was that is not as it should be: missing, different or stale.
    """
    figures = root / "figures"
    sources = select(root, names)
    jobs = min(jobs, len(sources))
    threads = None if jobs == 1 else max(1, cores() // jobs)
    limit = LIMIT_S if names else LIMIT_AMONG_ALL_S
    start_by_forking(**ENVIRONMENT, **({"OMP_NUM_THREADS": str(threads)} if threads else {}))
    waiting, states = reversed(sources), {}  # the last ones take longest
    bar = tqdm(total=len(sources), desc="notebooks", disable=None)

    async def bring_up_to_date(source: Path) -> None:
        start = time.monotonic()
        files = await run(source, figures, threads, limit)
        seconds = time.monotonic() - start
        # Nothing is awaited from here on, so no failure elsewhere stops it half way.
        for path, content in files.items():
            same = path.exists() and path.read_bytes() == content
            states[path] = None if same else "different" if path.exists() else "missing"
            if not same and not check:
                replace(path, content)
        tqdm.write(f"{source.stem}  {seconds:.1f} s  {len(files) - 1} figures")
        bar.update()

    async def work_through() -> None:
        for source in waiting:  # which all that work share
            await bring_up_to_date(source)

    with bar:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(jobs):
                    group.create_task(work_through())
        except ExceptionGroup as failures:
            first = failures.exceptions[0]  # for which the others were stopped
            raise first from first.__cause__
    if not names:
        for path in sorted(figures.glob("*")):
            made = MADE.fullmatch(path.stem) and path.suffix in FIGURE_SUFFIXES
            if made and path not in states:
                states[path] = "stale"
                if not check:
                    path.unlink()
    return {path: states[path] for path in sorted(states) if states[path]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m book.notebooks", description="Execute the notebooks and draw the figures."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="the beginning of a name: 03")
    parser.add_argument("--check", action="store_true", help="write nothing, name what differs")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="run N at a time (default: one per core)"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder that has notebooks/")
    options = parser.parse_args(arguments)
    jobs = cores() if options.jobs is None else options.jobs
    if jobs < 1:
        parser.error(f"--jobs must be at least 1, got {jobs}")
    root = options.root.resolve()
    try:
        found = asyncio.run(build(root, options.names, options.check, jobs))
    except BuildError as error:
        print(f"build stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("build stopped by Ctrl-C", file=sys.stderr)
        return 130
    repair = {"missing": "written", "different": "rewritten", "stale": "removed"}
    for path, state in found.items():
        word = state if options.check else repair[state]
        print(f"{word}: {path.relative_to(root).as_posix()}")
    if options.check:
        print(f"{len(found)} files would change")
        return 1 if found else 0
    print("The notebooks are in notebooks/ (`make lab` opens them), the figures in figures/.")
    return 0
