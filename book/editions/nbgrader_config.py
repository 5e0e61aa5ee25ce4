"""nbgrader's settings for this course. Run its commands in the folder that holds this file."""

from pathlib import Path

c = get_config()  # noqa: F821 (nbgrader calls this file with it)

# The chapters read ../experiments/records and the like. So their kernels start in notebooks/, to
# whichever folder nbgrader has copied them.
start = f"import os; os.chdir({str(Path('notebooks').resolve())!r})"
c.Execute.extra_arguments = [f"--IPKernelApp.exec_lines={start}", "--log-level=ERROR"]
c.Execute.timeout = 300  # seconds for one cell; chapter 07 trains a model in one
