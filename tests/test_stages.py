"""Figures that grow on slides: the build cuts a picture into layers."""

import io
from base64 import b64decode, b64encode

import pytest
import stages
import torch
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image

from cheems_ref import plotting


def opened(png):
    return Image.open(io.BytesIO(png)).convert("RGB")


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Saves two matrices with the stages that a function picks; the notebook of this one cell."""

    def draw(chosen):
        shown = []
        monkeypatch.setattr(plotting, "display", shown.append)
        monkeypatch.setenv(plotting.FIGURES, str(tmp_path))
        fig, axes = plotting.heatmaps({"one": torch.eye(3), "two": -torch.eye(3)})
        plotting.save(fig, "03_a", "two matrices", stages=chosen(axes))
        picture = {"image/png": b64encode(shown[0].data).decode()}
        about = {"image/png": {"alt": shown[0].alt}}
        output = new_output("display_data", picture, metadata=about)
        return new_notebook(cells=[new_code_cell("plotting.save()", outputs=[output])])

    return draw


def test_layers_of_a_picture_add_up_to_it(drawn, tmp_path):
    """Without its stages first, then each at its place."""
    notebook = drawn(lambda axes: [[axes[1]], axes[0].images])
    stages.add_layers(notebook, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["03_a.png"]
    first, *others = notebook.cells[0].outputs[0].metadata["image/png"]["stages"]
    assert first["box"] == [0, 0, 1, 1] and len(others) == 2
    canvas, states = opened(b64decode(first["png"])), []
    for stage in others:
        states.append(canvas.tobytes())
        left, top = (round(s * n) for s, n in zip(stage["box"], canvas.size, strict=False))
        canvas.paste(opened(b64decode(stage["png"])), (left, top))
    assert canvas.tobytes() == opened((tmp_path / "03_a.png").read_bytes()).tobytes()
    assert states[0] != states[1] != canvas.tobytes()
    left, _, width, _ = others[0]["box"]
    assert left > 0.3 and width < 0.6, "the second matrix is on the right"


def test_a_stage_that_shows_nothing_is_rejected(drawn, tmp_path):
    notebook = drawn(lambda axes: [axes[0].images, []])
    with pytest.raises(ValueError, match="03_a: stage 2 adds nothing to be seen"):
        stages.add_layers(notebook, tmp_path)
