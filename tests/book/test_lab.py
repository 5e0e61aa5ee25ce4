"""The stored notebooks in a JupyterLab that has never seen them, as after a fresh clone: it doesn't
trust them, runs nothing, and yet shows every picture and hides the plumbing.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
CHAPTERS = [next((ROOT / "notebooks").glob(f"{number}_*.ipynb")) for number in ("00", "03", "07")]
WAIT_MS = 240_000  # generous: a slow machine takes half a minute to load JupyterLab once
# All cells at once, not only those near the window; and no question about news.
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
PICTURES = """() => [...document.querySelectorAll(".jp-OutputArea-output img")]
    .filter(image => image.complete && image.naturalWidth > 50).length"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def lab(home: Path, notebooks: Path):
    """A JupyterLab whose own folders are all new; yields its address."""
    for name, setting in SETTINGS.items():
        file = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(setting))
    folders = {"CONFIG": "config", "DATA": "data", "RUNTIME": "runtime"}
    around = {f"JUPYTER_{name}_DIR": str(home / folder) for name, folder in folders.items()}
    around |= {
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    port = free_port()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += ["--IdentityProvider.token=", "--ServerApp.port_retries=0"]
    with open(home / "log", "w") as log:
        server = subprocess.Popen(
            [*command, f"--notebook-dir={notebooks}"],
            env=os.environ | around,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/api").close()
                break
            except urllib.error.URLError:
                assert server.poll() is None, (home / "log").read_text()
                time.sleep(0.5)
        yield address
    finally:
        # With its kernels, and without asking: a server that waits for a kernel may wait for ever.
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="module")
def address(browser, tmp_path_factory):
    notebooks = tmp_path_factory.mktemp("clone")
    for path in CHAPTERS:
        shutil.copy(path, notebooks)
    with lab(tmp_path_factory.mktemp("home"), notebooks) as where:
        yield where


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_an_untrusted_notebook_shows_every_picture_and_hides_the_plumbing(browser, address, path):
    cells = nbformat.read(path, as_version=4).cells
    stored = [o for cell in cells for o in cell.get("outputs", []) if "image/png" in str(o)]
    folded = [c for c in cells if {"setup", "figure", "guard"} & set(c.metadata.get("tags", []))]
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    try:
        page = context.new_page()
        # In a workspace of its own, where no other notebook is open.
        page.goto(f"{address}/lab/workspaces/{path.stem}/tree/{path.name}", timeout=WAIT_MS)
        last = f".jp-Notebook .jp-Cell:nth-of-type({len(cells)})"
        page.wait_for_selector(last, state="attached", timeout=WAIT_MS)
        page.wait_for_function(f"({PICTURES})() >= {len(stored)}", timeout=30_000)
        assert page.evaluate(PICTURES) == len(stored) >= 2
        assert page.locator(".jp-RenderedText", has_text="<IPython.core").count() == 0
        assert page.locator(".jp-RenderedSVG").count() == 0, "JupyterLab trusts the notebook"
        assert page.locator(".jp-Cell .jp-InputPlaceholder").count() == len(folded) > 3
    finally:
        context.close()
