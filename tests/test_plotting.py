"""Figures: same bytes on every run, readable by everyone, written only where the build asks."""

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from PIL import Image

from cheems_ref import plotting


@pytest.fixture
def shown(monkeypatch):
    """What `save` displays, in place of a notebook."""
    outputs = []
    monkeypatch.setattr(plotting, "display", outputs.append)
    return outputs


def line_plot():
    fig, ax = plotting.figure()
    ax.plot([0, 1, 4], label="squares")
    ax.legend()
    ax.set_title("$x^2$")
    return fig


def picture():
    fig, ax = plotting.figure()
    plotting.heatmap(ax, torch.eye(3), title="unit matrix")
    return fig


@pytest.mark.parametrize("draw, name", [(line_plot, "03_a.svg"), (picture, "03_a.png")])
def test_same_bytes_on_every_run(draw, name, shown, tmp_path, monkeypatch):
    monkeypatch.setenv(plotting.FIGURES, str(tmp_path))
    contents = []
    for _ in range(2):
        plotting.save(draw(), "03_a", "what there is to see")
        assert [path.name for path in tmp_path.iterdir()] == [name]
        contents.append((tmp_path / name).read_bytes())
        (tmp_path / name).unlink()
    assert contents[0] == contents[1] and len(shown) == 2


def test_a_name_is_used_once(shown, tmp_path, monkeypatch):
    monkeypatch.setenv(plotting.FIGURES, str(tmp_path))
    plotting.save(line_plot(), "03_a", "squares")
    with pytest.raises(ValueError, match="a figure 03_a already"):
        plotting.save(picture(), "03_a", "a unit matrix")


def test_a_reader_writes_no_file(shown, tmp_path, monkeypatch):
    monkeypatch.delenv(plotting.FIGURES, raising=False)
    monkeypatch.chdir(tmp_path)
    plotting.save(line_plot(), "03_a", "squares")
    assert list(tmp_path.iterdir()) == [] and "svg" in shown[0].data


def test_alt_text_is_there_for_both_kinds(shown):
    plotting.save(line_plot(), "03_a", 'squares of "x" & more')
    plotting.save(picture(), "03_b", "a unit matrix")
    svg, png = shown
    assert 'role="img" aria-label="squares of &quot;x&quot; &amp; more"' in svg.data
    assert png.alt == "a unit matrix"
    with pytest.raises(ValueError, match="needs an alt text"):
        plotting.save(line_plot(), "03_a", " ")


@pytest.mark.parametrize("name", ["03_a.png", "figures/03_a", "../03_a"])
def test_names_are_bare_words(name):
    with pytest.raises(ValueError, match="bare word"):
        plotting.save(line_plot(), name, "squares")


def test_heat_map_draws_the_matrix_it_was_given(shown, tmp_path, monkeypatch):
    """nbval does not compare pictures, so the drawing itself is checked here."""
    monkeypatch.setenv(plotting.FIGURES, str(tmp_path))
    fig, ax = plotting.figure(size=(3.0, 3.0))
    plotting.heatmap(ax, torch.tensor([[1.0, 0.0], [-1.0, torch.nan]]), colorbar=False)
    plotting.save(fig, "03_a", "four fields")
    pixels = np.asarray(Image.open(tmp_path / "03_a.png").convert("RGB")).astype(int)
    (left, bottom), (right, top) = ax.get_window_extent().get_points().astype(int)
    rows, columns = pixels.shape[0] - np.array([top, bottom]), np.array([left, right])

    def field(row, column):
        y = rows[0] + (rows[1] - rows[0]) * (2 * row + 1) // 4
        x = columns[0] + (columns[1] - columns[0]) * (2 * column + 1) // 4
        return pixels[y, x]

    red, blue = field(0, 0), field(1, 0)
    assert red[0] > red[2] + 50 and blue[2] > blue[0] + 50
    assert field(0, 1).min() > 240  # zero is white
    assert set(field(1, 1)) == {0xDD}  # NaN is grey


def test_heat_map_takes_matrices_only():
    _, ax = plotting.figure()
    with pytest.raises(ValueError, match=r"\(2, 2, 2\)"):
        plotting.heatmap(ax, torch.zeros(2, 2, 2))
    with pytest.raises(ValueError, match=r"\(0, 3\)"):
        plotting.heatmap(ax, torch.zeros(0, 3))
    with pytest.raises(ValueError, match="infinity"):
        plotting.heatmap(ax, torch.full((2, 2), -torch.inf))
    plotting.heatmap(ax, np.zeros((2, 2)))  # all zero: no division by zero


def luminance(color):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def test_type_is_large_and_ink_is_dark():
    plotting.figure()
    assert min(matplotlib.rcParams[f"{axis}tick.labelsize"] for axis in "xy") >= 12
    assert (1.05) / (luminance(plotting.INK) + 0.05) > 7  # the contrast that WCAG calls AAA
    neighbours = zip(plotting.COLORS[:3], plotting.COLORS[1:4], strict=True)
    assert all(abs(luminance(a) - luminance(b)) > 0.03 for a, b in neighbours)
