"""book/build.py on small projects: what it writes, what it leaves alone, what it refuses."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import build
import nbformat
import pytest

COURSE = {
    "01_first.py": """\
# %% [markdown]
# # First

# %% tags=["check"]
import os
from pathlib import Path

figures = Path(os.environ["CHEEMS_FIGURES"])
_ = (figures / "01_curve.svg").write_text("<svg>1</svg>")
print({"a", "b", "c"}, os.environ["SOURCE_DATE_EPOCH"])

# %%
for word in "one", "two":
    print(word, flush=True)

# %%
for word in "one", "two":
    print(word, flush=True)
""",
    "02_second.py": """\
# %% tags=["raises-exception"]
raise ValueError("d_model must be even,\\nnot 3")

# %%
1 + 1
""",
}
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
DRAW = 'import os\nopen(os.environ["CHEEMS_FIGURES"] + "/{name}", "w").close()\n'


def project(root: Path, notebooks: dict[str, str]) -> Path:
    (root / "notebooks").mkdir()
    for name, source in notebooks.items():
        (root / "notebooks" / name).write_text(source)
    return root


def files(root: Path) -> dict[str, bytes]:
    """All files under `root`, by their path."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def run_build(root: Path, *arguments: str) -> int:
    return build.main(["--root", str(root), *arguments])


def process_exists(pid: Path) -> bool:
    try:
        os.kill(int(pid.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def pairs(root: Path) -> list[Path]:
    """The two notes that the notebooks made from MEET leave, with the numbers of their kernels."""
    return [root / "notebooks" / f"0{number}.pid" for number in (1, 2)]


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """The small course, built once by the command that `make course` uses. Do not change it."""
    root = project(tmp_path_factory.mktemp("course"), COURSE)
    command = [sys.executable, build.__file__, "--root", str(root), "--jobs", "2"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "01_first  " in finished.stdout and "  1 figures" in finished.stdout
    assert "make lab" in finished.stdout
    assert finished.stderr == "", "a bar or a warning where there is no terminal"
    return root


@pytest.fixture
def copy(course, tmp_path) -> Path:
    """The built course at another path, free to change."""
    return Path(shutil.copytree(course, tmp_path / "a copy elsewhere"))


def test_what_is_written(course):
    assert set(files(course)) == {
        "notebooks/01_first.py",
        "notebooks/01_first.ipynb",
        "notebooks/02_second.py",
        "notebooks/02_second.ipynb",
        "figures/01_curve.svg",
    }
    notebook = nbformat.read(course / "notebooks/01_first.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata == build.METADATA
    assert [cell.get("execution_count") for cell in notebook.cells] == [None, 1, 2, 3]
    assert [cell.metadata for cell in notebook.cells] == [{}, {"tags": ["check"]}, {}, {}]
    assert [output.text for output in notebook.cells[2].outputs] == ["one\ntwo\n"]
    assert str(course) not in (course / "notebooks/01_first.ipynb").read_text()


def test_ids_come_from_the_text(course):
    source = course / "notebooks/01_first.py"
    stored = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    ids = [cell.id for cell in build.read_source(source).cells]
    assert ids == [cell.id for cell in stored.cells]
    assert len(set(ids)) == 4, "two cells of the same text have one id"


def test_an_expected_error_is_stored_in_one_line(course):
    notebook = nbformat.read(course / "notebooks/02_second.ipynb", as_version=4)
    (output,) = notebook.cells[0].outputs
    assert output.ename == "ValueError"
    assert output.evalue == "d_model must be even,\nnot 3"
    assert output.traceback == ["ValueError: d_model must be even,"]
    assert notebook.cells[1].outputs[0].data == {"text/plain": "2"}


def test_a_fresh_clone_and_a_second_run_give_the_same_bytes(course, tmp_path, capsys):
    clone = project(tmp_path, COURSE)
    assert run_build(clone, "--jobs", "1") == 0
    assert files(clone) == files(course)
    capsys.readouterr()
    assert run_build(clone, "01") == 0
    assert files(clone) == files(course)
    assert "written" not in capsys.readouterr().out


def test_check_accepts_what_the_build_wrote(course):
    before = files(course)
    assert run_build(course, "--check") == 0
    assert files(course) == before


def test_check_names_every_file_that_would_change(copy, capsys):
    stored = copy / "notebooks/01_first.ipynb"
    stored.write_text(stored.read_text().replace("two", "three", 1))
    (copy / "notebooks/02_second.ipynb").unlink()
    (copy / "figures/01_curve.svg").write_text("<svg>2</svg>")
    (copy / "figures/09_left_over.png").write_bytes(b"")
    (copy / "figures/records").mkdir()
    (copy / "figures/records/timings.svg").write_text("not the build's")
    before = files(copy)
    assert run_build(copy, "--check") == 1
    printed = capsys.readouterr().out
    assert "different: notebooks/01_first.ipynb\n" in printed
    assert "missing: notebooks/02_second.ipynb\n" in printed
    assert "different: figures/01_curve.svg\n" in printed
    assert "stale: figures/09_left_over.png\n" in printed
    assert "4 files would change" in printed
    assert files(copy) == before


@pytest.mark.parametrize(
    "path, content",
    [("notebooks/02_second.ipynb", "{}"), ("figures/09_left_over.png", "")],
    ids=["edited output", "stale figure"],
)
def test_check_sees_each_kind_of_drift_alone(copy, path, content):
    (copy / "notebooks/01_first.py").unlink()
    (copy / "figures/01_curve.svg").unlink()
    (copy / path).write_text(content)
    assert run_build(copy, "--check") == 1


def test_only_a_full_run_removes_stale_figures(copy, capsys):
    (copy / "notebooks/02_second.py").unlink()
    stale = copy / "figures/09_left_over.png"
    stale.write_bytes(b"")
    record = copy / "figures/records/timings.svg"
    record.parent.mkdir()
    record.write_text("not the build's")
    assert run_build(copy, "01_first") == 0
    assert stale.exists()
    assert run_build(copy) == 0
    assert not stale.exists() and record.exists() and (copy / "figures/01_curve.svg").exists()
    assert "removed: figures/09_left_over.png" in capsys.readouterr().out


def test_a_failing_cell_stops_the_build_and_leaves_the_files(copy, capsys):
    source = copy / "notebooks/01_first.py"
    source.write_text(
        "# %% [markdown]\n# # Title\n\n# %%\n"
        + DRAW.format(name="01_curve.svg")
        + "\n# %%\nnumerator = 7\nnumerator / 0\n"
    )
    before = files(copy)
    assert run_build(copy) == 1
    message = capsys.readouterr().err
    assert "01_first, cell 3 of 3 (code cell 2)" in message
    assert "numerator = 7\nnumerator / 0" in message
    assert "Traceback" in message and "ZeroDivisionError: division by zero" in message
    assert "\x1b" not in message
    assert files(copy) == before


@pytest.mark.parametrize("name", ["02_curve.svg", "curve.svg", "01_notes.txt"])
def test_a_figure_of_another_name_is_refused(tmp_path, capsys, name):
    root = project(tmp_path, {"01_only.py": "# %%\n" + DRAW.format(name=name)})
    before = files(root)
    assert run_build(root) == 1
    assert f"01_only drew {name}" in capsys.readouterr().err
    assert files(root) == before


@pytest.mark.parametrize(
    "limit, source, message",
    [
        (0.1, "1 + 1", "takes more than 0.1 s: it took"),
        (1, "while True:\n    pass", "takes more than 1 s; stopped in 01_only, cell 1 of 1"),
    ],
    ids=["slow in all", "endless cell"],
)
def test_a_slow_notebook_is_refused(tmp_path, monkeypatch, capsys, limit, source, message):
    monkeypatch.setattr(build, "LIMIT_S", limit)
    root = project(tmp_path, {"01_only.py": f"# %%\n{source}\n"})
    before = files(root)
    assert run_build(root, "01") == 1
    assert message in capsys.readouterr().err
    assert files(root) == before


def test_a_kernel_that_dies_is_an_error(tmp_path, capsys):
    root = project(tmp_path, {"01_only.py": "# %%\nimport os\n\nos._exit(1)\n"})
    assert run_build(root) == 1
    assert "01_only, cell 1 of 1 (code cell 1) killed its kernel" in capsys.readouterr().err


def test_an_unknown_name_is_refused(course, capsys):
    assert run_build(course, "07") == 1
    message = capsys.readouterr().err
    assert "'07'" in message and "01_first, 02_second" in message


def test_a_course_without_notebooks_is_refused(tmp_path, capsys):
    assert run_build(tmp_path) == 1
    assert "no notebook" in capsys.readouterr().err


def test_the_kernel_is_this_interpreter_whatever_is_installed(tmp_path, monkeypatch):
    spec = tmp_path / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text('{"argv": ["another-python"], "display_name": "x", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    assert build.kernel_manager().kernel_spec.argv[0] == sys.executable


@pytest.mark.parametrize("failures, status", [(1, 0), (build.STARTS, 1)])
def test_a_port_that_was_taken_meanwhile_costs_one_start(tmp_path, monkeypatch, failures, status):
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    managers, original = [], build.kernel_manager

    def manager():
        one = original()
        if len(managers) < failures:
            one.cache_ports, one.shell_port = False, taken.getsockname()[1]
        managers.append(one)
        return one

    monkeypatch.setattr(build, "kernel_manager", manager)
    root = project(tmp_path, {"01_only.py": "# %%\nprint('up')\n"})
    if status:
        with pytest.raises(RuntimeError, match="Kernel died"):
            run_build(root)
    else:
        assert run_build(root) == 0
        assert "up" in (root / "notebooks" / "01_only.ipynb").read_text()
    assert len(managers) == min(failures + 1, build.STARTS)
    taken.close()


def test_two_at_a_time(tmp_path, capsys):
    notebooks = {
        "01_first.py": MEET.format(name="01", other="02", then="print('met')"),
        "02_second.py": MEET.format(name="02", other="01", then="print('met')"),
    }
    root = project(tmp_path, notebooks)
    assert run_build(root, "--jobs", "2") == 0
    assert "more than" not in capsys.readouterr().out
    assert not any(map(process_exists, pairs(root)))


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_never_more_than_jobs_at_a_time(tmp_path, monkeypatch, jobs):
    at_work, most = 0, 0

    async def execute(*_):
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0.01)
        at_work -= 1

    monkeypatch.setattr(build, "execute", execute)
    root = project(tmp_path, {f"0{i}_x.py": "# %%\n1\n" for i in range(9)})
    assert run_build(root, "--jobs", str(jobs)) == 0
    assert most == jobs and len(files(root)) == 18


def test_a_failure_stops_the_others(tmp_path, capsys):
    """The first one fails while the second runs, before the third begins."""
    notebooks = {
        "01_first.py": MEET.format(name="01", other="02", then="1 / 0"),
        "02_second.py": MEET.format(name="02", other="01", then=FOREVER),
        "03_third.py": "# %%\nopen('03.pid', 'w').close()\n",
    }
    root = project(tmp_path, notebooks)
    assert run_build(root, "--jobs", "2") == 1
    message = capsys.readouterr().err
    assert message.startswith("build stopped: 01_first, cell 2 of 2 (code cell 2) failed\n")
    assert "02_second" not in message
    assert not any(map(process_exists, pairs(root)))
    assert set(files(root)) == {f"notebooks/{name}" for name in (*notebooks, "01.pid", "02.pid")}


def test_the_first_failure_is_the_one_named(tmp_path, monkeypatch, capsys):
    async def execute(notebook, source, figures, threads, limit):
        try:
            await asyncio.sleep(0.01 if source.stem == "02" else 60)
        finally:
            raise build.BuildError(source.stem)

    monkeypatch.setattr(build, "execute", execute)
    root = project(tmp_path, {"01.py": "# %%\n1\n", "02.py": "# %%\n1\n", "03.py": ""})
    assert run_build(root, "--jobs", "2") == 1
    assert capsys.readouterr().err == "build stopped: 02\n"


@pytest.mark.usefixtures("ctrl_c_works")
def test_ctrl_c_leaves_no_kernel_and_no_file(tmp_path):
    notebooks = {
        "01_first.py": MEET.format(name="01", other="02", then=FOREVER),
        "02_second.py": MEET.format(name="02", other="01", then=FOREVER),
    }
    root = project(tmp_path, notebooks)
    command = [sys.executable, build.__file__, "--root", str(root), "--jobs", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        while not all(pid.exists() and pid.read_text() for pid in pairs(root)):
            assert running.poll() is None
            time.sleep(0.05)
        assert all(map(process_exists, pairs(root)))
        running.send_signal(signal.SIGINT)
        said = running.communicate()[1].splitlines()
    # A kernel may find the time to say that it was interrupted, before it is killed.
    assert [line for line in said if "[IPKernelApp]" not in line] == ["build stopped by Ctrl-C"]
    assert running.returncode == 130
    assert not any(map(process_exists, pairs(root)))
    assert set(files(root)) == {f"notebooks/{name}" for name in (*notebooks, "01.pid", "02.pid")}


@pytest.mark.parametrize("names, limit", [(["01"], 60), ([], 600)], ids=["named", "among all"])
def test_how_long_a_notebook_may_take(tmp_path, monkeypatch, names, limit):
    given = []

    async def execute(notebook, source, figures, threads, limit):
        given.append(limit)

    monkeypatch.setattr(build, "execute", execute)
    root = project(tmp_path, {"01.py": "# %%\n1\n"})
    assert run_build(root, *names) == 0
    assert given == [limit]


@pytest.mark.parametrize(
    "arguments, threads",
    [
        (["--jobs", "2"], [4, 4]),
        (["--jobs", "9"], [4, 4]),
        (["--jobs", "1"], [None, None]),
        (["01"], [None]),
        ([], [4, 4]),
    ],
    ids=["two", "no more than there are", "one at a time", "one alone", "no option"],
)
def test_notebooks_share_the_cores(tmp_path, monkeypatch, arguments, threads):
    given = []

    async def execute(notebook, source, figures, threads, limit):
        given.append(threads)

    monkeypatch.setattr(build, "execute", execute)
    monkeypatch.setattr(build, "cores", lambda: 8)
    root = project(tmp_path, {"01.py": "# %%\n1\n", "02.py": "# %%\n1\n"})
    assert run_build(root, *arguments) == 0
    assert given == threads


@pytest.mark.parametrize("of_the_caller, seen", [(None, "4"), ("3", "3")])
def test_the_kernel_learns_its_share(tmp_path, monkeypatch, of_the_caller, seen):
    monkeypatch.setattr(build, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if of_the_caller:
        monkeypatch.setenv("OMP_NUM_THREADS", of_the_caller)
    source = "# %%\nimport os\n\nos.environ['OMP_NUM_THREADS']\n"
    root = project(tmp_path, {"01.py": source, "02.py": "# %% [markdown]\n# text\n"})
    assert run_build(root, "--jobs", "2") == 0
    notebook = nbformat.read(root / "notebooks/01.ipynb", as_version=4)
    assert notebook.cells[0].outputs[0].data["text/plain"] == repr(seen)


def test_jobs_is_at_least_one(course, capsys):
    with pytest.raises(SystemExit):
        run_build(course, "--jobs", "0")
    assert "--jobs must be at least 1, got 0" in capsys.readouterr().err
