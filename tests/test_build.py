"""The build on small projects: what it writes, what it leaves alone, what it refuses."""

import os
import re
import shutil
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import nbformat
import psutil
import pytest

from book.notebooks import build_notebooks

SAME = """
# %%
for word in "one", "two":
    print(word, flush=True)
"""
FIRST = """\
# %% [markdown]
# # First

# %% tags=["guard"]
import importlib.util, os

with open(os.environ["CHEEMS_FIGURES"] + "/01_curve.svg", "w") as file:
    _ = file.write("<svg>1</svg>")
print({"a", "b", "c"}, os.environ["SOURCE_DATE_EPOCH"], importlib.util.find_spec("book"))
"""
SECOND = """\
# %% tags=["raises-exception"]
raise ValueError("d_model must be even,\\nnot 3")
"""
COURSE = {"01_first.py": FIRST + SAME.replace("%%", "%% tags=['check']") + SAME}
COURSE["02_second.py"] = SECOND
# A notebook that says who it is, waits for another's word, and goes on.
MEET = """\
# %%
import os, time
from pathlib import Path

Path("{name}.pid").write_text(str(os.getpid()))
while not Path("{other}.pid").exists():
    time.sleep(0.01)

# %%
{then}
"""
FOREVER = "while True:\n    time.sleep(0.01)"


def project(root: Path, notebooks: dict[str, str]) -> Path:
    (root / "notebooks").mkdir()
    for name, source in notebooks.items():
        (root / "notebooks" / name).write_text(source)
    return root


def meeting(root: Path, then: str) -> Path:
    """A project of two notebooks that run at the same time, and one that waits: the first."""
    first = MEET.format(name="01", other="02", then=then)
    second = MEET.format(name="02", other="01", then=FOREVER)
    third = "# %%\nopen('00.pid', 'w').close()\n"
    return project(root, {"01_a.py": first, "02_b.py": second, "00_c.py": third})


def kernels_that_run(root: Path) -> list[str]:
    """Of the two notebooks made from MEET, by the notes that they leave."""
    notes = [(root / "notebooks" / f"0{number}.pid").read_text() for number in (1, 2)]
    return [pid for pid in notes if psutil.pid_exists(int(pid))]


def files(root: Path) -> dict[str, bytes]:
    """All files under `root`, by their path."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def run_build(root: Path, *arguments: str) -> int:
    return build_notebooks.main(["--root", str(root), *arguments])


@pytest.fixture(scope="module", autouse=True)
def as_installed():
    """Without PYTHONPATH, where a notebook does look for modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        yield


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """The small course, built once, both notebooks at a time. Do not change it."""
    root = project(tmp_path_factory.mktemp("course"), COURSE)
    assert run_build(root, "--jobs", "2") == 0
    return root


@pytest.fixture
def copy(course, tmp_path) -> Path:
    """The built course at another path, free to change."""
    return Path(shutil.copytree(course, tmp_path / "a copy elsewhere"))


def test_what_is_written(course):
    stems = "notebooks/01_first", "notebooks/02_second"
    written = {f"{stem}.{ending}" for stem in stems for ending in ("py", "ipynb")}
    assert set(files(course)) == written | {"figures/01_curve.svg"}
    path = course / "notebooks/01_first.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata == build_notebooks.METADATA
    assert [cell.get("execution_count") for cell in notebook.cells] == [None, 1, 2, 3]
    folded = {"tags": ["guard"], "jupyter": {"source_hidden": True}}
    assert [cell.metadata for cell in notebook.cells] == [{}, folded, {"tags": ["check"]}, {}]
    assert notebook.cells[1].outputs[0].text.endswith("} 0 None\n")  # it can't import book/
    assert [output.text for output in notebook.cells[2].outputs] == ["one\ntwo\n"]
    assert str(course) not in path.read_text()
    ids = [cell.id for cell in build_notebooks.read_source(path.with_suffix(".py")).cells]
    assert ids == [cell.id for cell in notebook.cells] and len(set(ids)) == 4
    (error,) = nbformat.read(course / f"{stems[1]}.ipynb", as_version=4).cells[0].outputs
    assert error.evalue == "d_model must be even,\nnot 3"
    assert error.traceback == ["ValueError: d_model must be even,"]


def test_check_names_every_file_that_would_change_and_a_full_run_repairs_them(copy, capsys):
    """With the same bytes at another path, and one at a time. A run by name removes no figure, and
    figures/drawings is not the build's.
    """
    right = files(copy)
    stored = copy / "notebooks/01_first.ipynb"
    stored.write_text(stored.read_text().replace("two", "three", 1))
    (copy / "notebooks/02_second.ipynb").unlink()
    (copy / "figures/01_curve.svg").write_text("<svg>2</svg>")
    (copy / "figures/09_left_over.png").write_bytes(b"")
    (copy / "figures/drawings").mkdir()
    (copy / "figures/drawings/timings.svg").write_text("kept")
    (copy / "figures/my holiday.png").write_bytes(b"kept")
    before = files(copy)
    assert run_build(copy, "--check") == 1
    found = capsys.readouterr().out.splitlines()
    assert found[-5:] == [
        "different: figures/01_curve.svg",
        "stale: figures/09_left_over.png",
        "different: notebooks/01_first.ipynb",
        "missing: notebooks/02_second.ipynb",
        "4 files would change",
    ]
    times = sorted(re.sub(r"\d+\.\d s", "0 s", line) for line in found[:-5])
    assert times == ["01_first  0 s  1 figures", "02_second  0 s  0 figures"]
    assert files(copy) == before
    assert run_build(copy, "02") == 0 and (copy / "figures/09_left_over.png").exists()
    assert run_build(copy, "--jobs", "1") == 0
    kept = {"figures/drawings/timings.svg": b"kept", "figures/my holiday.png": b"kept"}
    assert files(copy) == right | kept


DRAW = 'open(os.environ["CHEEMS_FIGURES"] + "/{}", "w").close()\n'
FAILS = DRAW.format("01_curve.svg") + "# %%\nnumerator / 0"


@pytest.mark.parametrize(
    "source, limit, message",
    [
        (FAILS, 60, r"01_only, cell 2 of 2 \(code cell 2\) failed\n.*numerator / 0.*NameError: "),
        (DRAW.format("02_curve.svg"), 60, "01_only drew 02_curve.svg"),
        ("while True:\n    pass", 1, "takes more than 1 s; stopped in 01_only, cell 1 of 1"),
        ("os._exit(1)", 60, r"01_only, cell 1 of 1 \(code cell 1\) killed its kernel"),
    ],
    ids=["a cell that fails", "a figure of another name", "an endless cell", "a dead kernel"],
)
def test_a_notebook_is_refused(tmp_path, monkeypatch, capsys, source, limit, message):
    """And nothing of it is written."""
    monkeypatch.setattr(build_notebooks, "LIMIT_S", limit)
    root = project(tmp_path, {"01_only.py": f"# %%\nimport os\n{source}\n"})
    before = files(root)
    assert run_build(root, "01") == 1
    said = capsys.readouterr().err
    assert re.search(message, said, re.DOTALL) and "\x1b" not in said
    assert files(root) == before


def test_a_failure_stops_the_others(tmp_path, capsys):
    """The first one fails while the second runs, before the third begins."""
    root = meeting(tmp_path, then="1 / 0")
    before = files(root)
    assert run_build(root, "--jobs", "2") == 1
    message = capsys.readouterr().err
    assert message.startswith("build stopped: 01_a, cell 2 of 2 (code cell 2) failed\n")
    assert "02_b" not in message and not kernels_that_run(root)
    assert files(root).keys() - before == {"notebooks/01.pid", "notebooks/02.pid"}


@pytest.mark.usefixtures("ctrl_c_works")
def test_ctrl_c_leaves_no_kernel_and_no_file(tmp_path, capfd):
    root = meeting(tmp_path, then=FOREVER)
    before = files(root)

    def interrupt():
        while len([p for p in root.glob("notebooks/*.pid") if p.read_text()]) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert run_build(root, "--jobs", "2") == 130 and not kernels_that_run(root)
    said = capfd.readouterr().err.splitlines()
    # A kernel may find the time to say that it was interrupted, before it is killed.
    assert [line for line in said if "[IPKernelApp]" not in line] == ["build stopped by Ctrl-C"]
    assert files(root).keys() - before == {"notebooks/01.pid", "notebooks/02.pid"}


def test_what_a_model_wrote_stays_unless_something_else_changed(tmp_path):
    """Lines after a bar differ from run to run; a line without one doesn't, or is news."""
    cell = "# %%\nimport time\nprint('a', {}, '\\n│', time.time_ns(), '\\n│ b')\n"
    root = project(tmp_path, {"01_a.py": cell.format(1)})
    stored = root / "notebooks/01_a.ipynb"
    assert run_build(root) == 0
    first = stored.read_bytes()
    assert run_build(root) == 0 and stored.read_bytes() == first
    text = nbformat.read(stored, as_version=4).cells[0].outputs[0].text
    stored.write_bytes(first.replace(b"a 1", b"a 3"))
    assert run_build(root) == 0
    news = nbformat.read(stored, as_version=4).cells[0].outputs[0].text
    assert news != text and news.startswith("a 1")


PICTURE = """\
# %%
import base64, time
from IPython.display import display

def shown(svg, width):  # with a PNG that comes out otherwise on every run, as on another machine
    head = b"\\x89PNG\\r\\n\\x1a\\n\\0\\0\\0\\rIHDR\\0\\0\\0" + bytes([width]) + bytes(4)
    png = base64.b64encode(head + str(time.time_ns()).encode()).decode()
    display({"image/svg+xml": svg, "image/png": png}, raw=True)

"""
SHOWS = "# %%\nshown('<svg>{}</svg>', {})\n"


def test_a_png_stays_while_the_svg_beside_it_and_its_size_do(tmp_path):
    root = project(tmp_path, {})
    stored = []
    for svg, width in ((1, 8), (1, 8), (2, 8), (2, 9), (2, 9)):
        (root / "notebooks/01_a.py").write_text(PICTURE + SHOWS.format(svg, width))
        assert run_build(root) == 0
        stored.append((root / "notebooks/01_a.ipynb").read_bytes())
    assert [a == b for a, b in pairwise(stored)] == [True, False, False, True]
    data = [nbformat.reads(text, as_version=4).cells[1].outputs[0].data for text in stored]
    assert [one["image/svg+xml"] for one in data] == [f"<svg>{n}</svg>" for n in (1, 1, 2, 2, 2)]
    assert len({one["image/png"] for one in data}) == 3
