"""Kernels that start at once: forked from a process that has imported what most notebooks import.

To import torch with its optimisers, matplotlib and IPython takes over four seconds of processor
time, more than many a notebook computes, and there are 24 notebooks. After `start_by_forking`,
jupyter_client forks them on Linux. Elsewhere a library may not survive a fork, and nothing changes.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
from importlib.metadata import EntryPoint
from multiprocessing import forkserver
from unittest.mock import patch

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

from book.project import ROOT

IMPORTED = ["ipykernel.ipkernel", "matplotlib.pyplot", "torch._dynamo", "jupytext", "nbclient"]
ENVIRONMENT = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}  # whatever is set here
OURS = {str(ROOT), str(ROOT / "tests")}  # where a notebook doesn't look for modules


def start_by_forking(**environment):
    """Let this process fork its kernels. What imports read of the environment is given here."""
    if sys.platform == "linux":
        ENVIRONMENT.update(environment)
        factory = KernelProvisionerFactory.instance()
        name, value = "forking", f"{__name__}:ForkingProvisioner"
        factory.provisioners[name] = EntryPoint(name, value, factory.GROUP_NAME)
        factory.default_provisioner_name = name


class ForkingProvisioner(LocalProvisioner):
    """What starts a kernel and stops it."""

    async def launch_kernel(self, cmd, env, cwd=None, **_):
        """Start the kernel that `cmd` would start."""
        forkserver.set_forkserver_preload(IMPORTED)
        with patch.dict(os.environ, ENVIRONMENT):
            forkserver.ensure_running()
        self.process = Forked(cmd[cmd.index("-f") :], env, cwd)
        self.pid = self.pgid = self.process.pid
        return self.connection_info


class Forked:
    """A kernel, with as much of Popen as jupyter_client uses."""

    stdin = stdout = stderr = None

    def __init__(self, arguments, env, cwd):
        forks = multiprocessing.get_context("forkserver")
        self.process = forks.Process(target=run, args=(arguments, env, cwd))
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def wait(self):
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


def run(arguments, env, cwd):
    """Be a kernel, in a session of its own, until the process that forks is gone."""
    from ipykernel.kernelapp import IPKernelApp

    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # which cleans up
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd or ".")
    ours = OURS - set(env.get("PYTHONPATH", "").split(os.pathsep))  # which any kernel would search
    sys.path[:] = [folder for folder in sys.path if folder not in ours]
    for name in [name for name in sys.modules if name.partition(".")[0] == "book"]:
        del sys.modules[name]  # a notebook can't import what JupyterLab doesn't find either
    IPKernelApp.launch_instance([*arguments, f"--IPKernelApp.parent_handle={os.getppid()}"])
