"""nbgrader's settings for this course. Run its commands in the folder that holds this file."""

from pathlib import Path

from nbgrader.preprocessors import (
    CheckCellMetadata,
    ClearOutput,
    NbGraderPreprocessor,
    OverwriteCells,
    OverwriteKernelspec,
)

c = get_config()  # noqa: F821 (nbgrader calls this file with it)


class UnmarkCopies(NbGraderPreprocessor):
    """Take nbgrader's marks off a cell that a student has copied: the last copy keeps them.

    Two cells with one name stop nbgrader, for all students. The last one also runs last.
    """

    def preprocess(self, nb, resources):
        seen = set()
        for cell in reversed(nb.cells):
            name = cell.metadata.get("nbgrader", {}).get("grade_id")
            if name in seen:
                del cell.metadata["nbgrader"]
                self.log.warning("%s: a copy of %s", resources["nbgrader"]["student"], name)
            elif name:
                seen.add(name)
        return nb, resources


c.CourseDirectory.course_id = "cheems"  # which nbgrader's exchange asks for
c.Autograde.sanitize_preprocessors = [
    ClearOutput,
    UnmarkCopies,  # in the place of nbgrader's DeduplicateIds, whose result nbgrader refuses
    OverwriteKernelspec,
    OverwriteCells,
    CheckCellMetadata,
]
c.OverwriteCells.add_missing_cells = True  # a check that was deleted is put back

# The chapters read ../experiments/records and the like. So their kernels start in notebooks/, to
# whichever folder nbgrader has copied them.
start = f"import os; os.chdir({str(Path('notebooks').resolve())!r})"
c.Execute.extra_arguments = [f"--IPKernelApp.exec_lines={start}", "--log-level=ERROR"]
# In the feedback, an error is the sentence that the check raises, without the frames above it.
c.Execute.extra_arguments.append("--InteractiveShell.xmode=Minimal")
# Seconds for one cell, so that an endless loop costs a minute. Chapter 07 trains a model in a cell:
# there, `nbgrader autograde 07 --Execute.timeout=300`.
c.Execute.timeout = 60
