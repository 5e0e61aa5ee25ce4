import os
import signal
import sys

import jaxtyping
import pytest
import torch
from unchanged import Unchanged, everything
from xdist.scheduler import LoadScopeScheduling

from book.notebooks.forked_kernels import start_by_forking


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="unchanged notebooks and programs, too")


def pytest_collection_modifyitems(config, items):
    """Leave out what is marked `program`, unless all is asked for or the test is named."""
    if everything(config) or any("::" in word for word in config.args):
        return
    programs = [item for item in items if item.get_closest_marker("program")]
    items[:] = [item for item in items if item not in programs]
    config.hook.pytest_deselected(items=programs)


def pytest_configure(config):
    config.addinivalue_line("markers", "program: takes seconds; ALL=1 runs it")
    start_by_forking(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
    if getattr(config, "cache", None) is not None:  # without it there is no earlier run to know of
        config.pluginmanager.register(Unchanged(config), "unchanged-notebooks")


@pytest.fixture(scope="session", autouse=True)
def one_thread_per_worker():
    """`make test` runs two workers; torch, here or in a process started from here, would give each
    of them all cores. OMP_NUM_THREADS=2 asks for two threads.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(threads))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(os.environ, "OMP_NUM_THREADS", threads)
        yield


@pytest.fixture
def torch_as_before():
    """Sets back what a notebook sets for torch, and the modules that it hides."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    modules = dict(sys.modules)
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    for name in [name for name, module in sys.modules.items() if module is None]:
        del sys.modules[name]
        if name in modules:
            sys.modules[name] = modules[name]


@pytest.fixture
def unchecked(monkeypatch):
    """Turns jaxtyping's checks off, which would answer before the function itself does."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def ctrl_c_works():
    """Also in the processes that are started, which inherit it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """The directory of a run of one step, to be read; a test that changes it takes a copy."""
    from test_commands import run, succeeds, training

    folder = tmp_path_factory.mktemp("tiny")
    succeeds(run(*training(folder, "--steps", 1)))
    return folder / "run"


@pytest.fixture(scope="session")
def editions(tmp_path_factory):
    """A folder with the student edition and the instructor's copy."""
    # Here, since it takes the extra `course`, which a machine with a GPU may lack.
    from book.editions import build_editions

    folder = tmp_path_factory.mktemp("editions")
    build_editions.make(folder)
    return folder


TOGETHER = (".ipynb", "test_build.py", "test_wheel.py", "test_pages.py", "test_nbgrader.py")
TOGETHER += ("test_trainer_example.py", "test_gpu.py")


class Singly(LoadScopeScheduling):
    """Hands out one test at a time, but the cells of a notebook, and the tests of a file whose
    fixture takes long to make, together and in their order. The longest of these come first.

    xdist's own `--dist loadgroup` groups nothing under pytest 9.2 (pytest-xdist issue 1386).
    """

    def _split_scope(self, nodeid):
        path = nodeid.split("::")[0]
        return path if path.endswith(TOGETHER) else nodeid


@pytest.hookimpl(optionalhook=True)  # without xdist nobody knows it
def pytest_xdist_make_scheduler(config, log):
    """What `-n 2` means here, unless --dist says otherwise."""
    return Singly(config, log) if config.getvalue("dist") == "load" else None
