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


def drawn(folder, monkeypatch, chosen):
    """The notebook of one cell that saves two matrices, with the stages that `chosen` picks."""
    shown = []
    monkeypatch.setattr(plotting, "display", shown.append)
    monkeypatch.setenv(plotting.FIGURES, str(folder))
    fig, axes = plotting.heatmaps({"one": torch.eye(3), "two": -torch.eye(3)})
    plotting.save(fig, "03_a", "two matrices", stages=chosen(axes))
    output = new_output(
        "display_data",
        {"image/png": b64encode(shown[0].data).decode()},
        metadata={"image/png": {"alt": shown[0].alt}},
    )
    return new_notebook(cells=[new_code_cell("plotting.save()", outputs=[output])])


def test_layers_of_a_picture_add_up_to_it(tmp_path, monkeypatch):
    """Without its stages first, then each at its place."""
    notebook = drawn(tmp_path, monkeypatch, lambda axes: [[axes[1]], axes[0].images])
    stages.add_layers(notebook, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["03_a.png"]
    first, *others = notebook.cells[0].outputs[0].metadata["image/png"]["stages"]
    assert first["box"] == [0, 0, 1, 1] and len(others) == 2
    canvas, states = opened(b64decode(first["png"])), []
    for stage in others:
        states.append(canvas.copy())
        corner = zip(stage["box"][:2], canvas.size, strict=True)
        canvas.paste(
            opened(b64decode(stage["png"])), tuple(round(share * side) for share, side in corner)
        )
    assert canvas.tobytes() == opened((tmp_path / "03_a.png").read_bytes()).tobytes()
    assert states[0].tobytes() != states[1].tobytes() != canvas.tobytes()
    left, _, width, _ = others[0]["box"]
    assert left > 0.3 and width < 0.6, "the second matrix is on the right"


def test_a_stage_that_shows_nothing_is_rejected(tmp_path, monkeypatch):
    notebook = drawn(tmp_path, monkeypatch, lambda axes: [axes[0].images, []])
    with pytest.raises(ValueError, match="03_a: stage 2 adds nothing to be seen"):
        stages.add_layers(notebook, tmp_path)
