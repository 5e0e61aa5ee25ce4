"""nbgrader's settings for this course. Run its commands in the folder that holds this file."""

from pathlib import Path

c = get_config()  # noqa: F821 (nbgrader calls this file with it)

# The chapters read ../figures/records and the like. So their kernels start in notebooks/, to
# whichever folder nbgrader has copied them.
notebooks = str(Path("notebooks").resolve())
c.Execute.extra_arguments = [f"--IPKernelApp.exec_lines=import os; os.chdir({notebooks!r})"]
c.Execute.timeout = 300  # seconds for one cell; chapter 07 trains a model in one
