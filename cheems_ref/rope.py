"""Rotary positions: rotate every pair of numbers by an angle that grows with the position.

A vector of even width is cut into pairs, and at position t pair i is rotated by the angle t θ_i:

    θ_i = base^(-2i/dim)        R_t = diag of 2 × 2 rotations by t θ_0, t θ_1, ...

Then ⟨R_t q, R_s k⟩ = ⟨q, R_{s-t} k⟩: an inner product of rotated vectors depends on the distance of
their positions only. That holds for Q and K of attention and for C and B of SSD, so one source of
position serves both.

    code             shape            in the papers
    frequencies      (dim/2,)         Θ = {θ_i}
    position_ids     (b, l)           j (of Q, C) and i (of K, B), our t and s
    rotation_matrix  (dim, dim)       R^d_{Θ,i}

Which numbers form pair i is a convention. "half" takes numbers i and i + dim/2, as the papers'
listings and transformers do; "interleaved" takes 2i and 2i + 1, as the papers' formulas and Meta's
Llama do. They differ by a permutation of the coordinates (`pairing_permutation`); `apply_rope` uses
"half". Notebook 04 derives the rotation. Arguments of a wrong shape, dtype or value raise
ValueError with the argument's name and its numbers.

Source: Su et al. (2021), RoFormer; WM §3.1, App. A, B.1; OTCE §3.1, App. A.
"""

import math
from typing import Literal, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cheems_ref import check

Pairing = Literal["half", "interleaved"]
Positions = Int[Tensor, "b l"]


def rope_frequencies(dim: int, base: float | int = 10000.0) -> Float[Tensor, " {dim//2}"]:
    """Return the angle per position of each pair: θ_i = base^(-2i/dim).

    Args:
        dim: width of the vectors to be rotated, even.
        base: > 0; a larger base rotates the last pairs more slowly.

    Returns:
        In radians per position, float64; the first is 1.

    Source: WM §3.1, eq. after (2); Ch eq. 3, whose k counts from 1.
    """
    check_turnable(dim=dim)
    check.numbers("(0, inf)", base=base)
    return _frequencies(dim, base, torch.device("cpu"))


def _frequencies(dim, base, device):
    """Compute them on the device: copying a list there would synchronise with it."""
    exact = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    return base ** (-torch.arange(0, dim, 2, dtype=exact, device=device) / dim)


def rope_cos_sin(
    position_ids: Positions,
    dim: int,
    base: float | int = 10000.0,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "b l {dim}"], Float[Tensor, "b l {dim}"]]:
    """Return cosine and sine of the angles of every position, laid out for `apply_rope`.

    Args:
        position_ids: int64 or int32, ≥ 0.
        dim: width of the vectors to be rotated, even.
        base: as in `rope_frequencies`.
        dtype: the model's dtype. Angles are float64 for float64 and float32 for every other dtype:
            bfloat16 cannot tell position 256 from 257. The relative error of a float32 angle is up
            to about 1e-7, so 0.1 radians at position 1,000,000.

    Returns:
        cos and sin, in the dtype of the angles; entry i + dim/2 equals entry i.

    Source: WM Listing 1.
    """
    _check_positions(position_ids, dtype)
    check_turnable(dim=dim)
    check.numbers("(0, inf)", base=base)
    return _cos_sin(position_ids, dim, base, dtype)


@no_type_check  # torch.compile makes no object whose constructor is checked
class RotaryTable:
    """Cosines and sines that the layers of a model share in one call.

    The first layer that needs a width and a base computes them; the others reuse them. A layer uses
    the table only if it is called with this very tensor; for any other tensor it computes its own.

    Args:
        position_ids: the positions that the model passes to its layers.
    """

    def __init__(self, position_ids: Positions):
        self.position_ids = position_ids
        self.made = {}  # (dim, base, dtype of the angles): (cos, sin)


def _cos_sin(position_ids, dim, base, dtype, table=None):
    """`rope_cos_sin` for layers: without value checks, and from the table if it fits."""
    made = table.made if table is not None and table.position_ids is position_ids else {}
    key = dim, base, _wide(dtype)
    if key not in made:
        frequencies = _frequencies(dim, base, position_ids.device).to(_wide(dtype))
        angles = position_ids[..., None].to(frequencies.dtype) * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        made[key] = angles.cos(), angles.sin()
    return made[key]


def apply_rope(
    x: Float[Tensor, "b l h dim"], cos: Float[Tensor, "b l dim"], sin: Float[Tensor, "b l dim"]
) -> Float[Tensor, "b l h dim"]:
    """Rotate the vectors of every head by the angles of their positions; norms do not change.

    transformers applies the same rotation to tensors (b, h, l, dim). Here length comes before
    heads: in the other order, and with l = h, a token would be rotated by the index of its head.

    Args:
        x: Q and K per head, or C and B per group.
        cos, sin: from `rope_cos_sin` with the dtype of x.

    Returns:
        In the dtype of x; computed in the dtype of the angles.

    Source: WM Listing 1, `apply_QK_rotary_pos_emb` and `apply_CB_rotary_pos_emb`.
    """
    check.floating(x=x)
    check.shapes(x=(x, "b l h dim"), cos=(cos, "b l dim"), sin=(sin, "b l dim"))
    check_turnable(dim=x.shape[-1])
    check.dtypes([_wide(x.dtype)], cos=cos, sin=sin)
    return _apply_rope(x, cos, sin)


def _apply_rope(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    quarter_turn = torch.cat([-second, first], dim=-1)
    return (cos[:, :, None] * x + sin[:, :, None] * quarter_turn).to(x.dtype)


def rotation_matrix(
    position: float | int, dim: int, base: float | int = 10000.0, pairing: Pairing = "half"
) -> Float[Tensor, "{dim} {dim}"]:
    """Return R_t, the matrix that `apply_rope` applies at position t.

    Args:
        position: t, any finite number: a difference of positions may be negative.
        dim: its size, even.
        base: as in `rope_frequencies`.
        pairing: "half" rotates coordinates i and i + dim/2 together, "interleaved" 2i and 2i + 1.

    Returns:
        An orthogonal matrix, float64. It acts on columns, R_t c, and on rows as c R_tᵀ.

    Source: WM §3.1 and App. A, with both indices of the last block equal; Ch eq. 4.
    """
    check.numbers("(-inf, inf)", position=position)
    check.choice(Pairing, pairing=pairing)
    angles = position * rope_frequencies(dim, base)
    cos, sin = angles.cos(), angles.sin()
    if pairing == "interleaved":
        blocks = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
        return torch.block_diag(*blocks)
    cos, sin = cos.diag(), sin.diag()
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)], 0)


def pairing_permutation(dim: int) -> Int[Tensor, " {dim}"]:
    """Return the permutation from the "half" pairing to the "interleaved" one: 0, 2, ..., 1, 3, ...

    With p = pairing_permutation(dim), x[..., p] lays an interleaved vector x out in halves, and
    R_half = R_interleaved[p][:, p]. With their output rows permuted by p, weights for one pairing
    fit the other.

    Source: WM §3.1 has the interleaved matrix, WM Listing 1 rotates halves.
    """
    check_turnable(dim=dim)
    return torch.arange(dim).view(-1, 2).T.flatten()


def ntk_base(
    length: int,
    dim: int,
    base: float | int = 10000.0,
    *,
    max_positions: int,
    scaling_factor: float | int = 1.0,
) -> float:
    """Return the base that stretches the slowest wave to a length beyond the trained one.

    base · (ρ · length / max_positions - (ρ - 1))^(dim / (dim - 2)) beyond max_positions, base up to
    it. The fastest pair keeps its angle; the bracket is the factor by which the slowest slows down.

    Fix the length once for all tokens of a text: a cache of keys, or the state of SSD, does not fit
    tokens that are rotated with another base.

    Args:
        length: number of positions to be covered, ≥ 1.
        dim: width of the vectors to be rotated, even and at least 4.
        base: the base of the training.
        max_positions: number of positions in training, ≥ 1.
        scaling_factor: ρ ≥ 1; 1 stretches just enough.

    Source: WM Listing 1, where the length is the largest position of the current batch.
    """
    check_turnable(dim=dim)
    if dim == 2:
        raise ValueError("dim must be at least 4: with dim = 2 there is one pair, which turns by 1")
    check.numbers("(0, inf)", base=base)
    check.numbers(
        "[1, inf)", length=length, max_positions=max_positions, scaling_factor=scaling_factor
    )
    if length <= max_positions:
        return base
    stretch = scaling_factor * length / max_positions - (scaling_factor - 1)
    return base * stretch ** (dim / (dim - 2))


def log_length_scale(
    position_ids: Positions, base_length: float | int, *, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "b l"]:
    """Return the factor max(1, log_base_length n) for queries that choose among n tokens.

    Multiplied onto Q it sharpens the softmax of attention over texts longer than base_length. On C
    of SSD, which is linear, it only scales what is read from the state.

    Args:
        position_ids: int64 or int32, ≥ 0; a query at position t sees n = t + 1 tokens.
        base_length: > 1, the length of the texts in training, in tokens.
        dtype: the model's dtype; the result is float64 for float64, else float32.

    Returns:
        Factors ≥ 1; 1 as long as n ≤ base_length.

    Source: OTCE App. A, last formula, with n counted for each query so that a cache may be used.
    """
    check.numbers("(1, inf)", base_length=base_length)
    _check_positions(position_ids, dtype)
    n = position_ids.to(_wide(dtype)) + 1
    scale = n.log() / math.log(base_length)
    return scale.where(n > base_length, 1.0).clamp(min=1.0)  # rounding could miss 1 on either side


def check_turnable(**width: int) -> None:
    """Reject a width that cannot be cut into pairs."""
    for name, dim in width.items():
        if dim < 2 or dim % 2:
            raise ValueError(f"{name} must be even and at least 2, to be cut into pairs; got {dim}")


def _wide(dtype):
    """Return the dtype of the angles for a model of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_positions(position_ids, dtype):
    check.floating(dtype=dtype)
    check.dtypes(check.INDICES, position_ids=position_ids)
    check.shapes(position_ids=(position_ids, "b l"))
    check.entries("[0, inf)", position_ids=position_ids)
