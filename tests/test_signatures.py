"""Shapes in signatures are checked in this run, where it has --jaxtyping-packages."""

import jaxtyping
import pytest
from torch import zeros

from cheems_ref import rope, ssd


def test_shapes_in_signatures_are_checked_in_this_run(request):
    if not request.config.getoption("--jaxtyping-packages", default=None):
        pytest.skip("pytest runs without --jaxtyping-packages")
    x, dt, A, B = zeros(2, 5, 4, 3), zeros(2, 5, 4), zeros(4), zeros(2, 5, 2, 2)
    with pytest.raises(jaxtyping.TypeCheckError):
        ssd.ssd_chunked(x, dt, A[:2], B, B)
    with pytest.raises(jaxtyping.TypeCheckError):
        rope.apply_rope(x[..., :2], B[:, :, 0], B[:, :4, 0])
