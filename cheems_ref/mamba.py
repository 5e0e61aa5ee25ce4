"""Mamba-1: a state space model that selects (S6), and the layer around it.

Every channel has its own state of n numbers, diagonal A and step size; all channels write by the
same B and read by the same C. dt, B and C depend on the token, so there is no convolution kernel,
and we compute the recurrence by a scan:

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t        y_t = C_t h_t + D x_t

    code       shape        in the papers
    x          (b, l, d)    x, d channels
    dt         (b, l, d)    Δ, the step size, ≥ 0; dt = 0 leaves the state alone
    A          (d, n)       A, the diagonals, ≤ 0, rates in the unit of time that dt counts
    B          (b, l, n)    B, what a token writes
    C          (b, l, n)    C, what a token reads
    D          (d,)         D, the skip connection
    state      (b, d, n)    h

    selective_scan            the definition, one token after the other
    selective_scan_parallel   the same in about 2 log₂ l steps
    Mamba                     the layer: a short convolution, a scan and a gate

x, B, C and y share a dtype. Sixteen-bit inputs are computed in float32, and the state is float32;
dt, A and D may then be float32 as well. Wrong shapes, dtypes, sizes or values raise ValueError with
the name of the argument, its axes and its sizes (check.py). Each scan is a public function, which
checks its arguments, and below it the algorithm alone (`_sequential`, `_parallel`), which gets at
least one token and a state, and all tensors in the dtype of the state. Notebook 01 derives them.

Source: L22; OTCE §2.1, Algorithm 2; Gu and Dao (2023), Mamba.
"""

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, einsum, nn

from cheems_ref import check
from cheems_ref.convolution import short_convolution

Scan = Literal["parallel", "sequential"]
Channels = Float[Tensor, "b l d"]
Shared = Float[Tensor, "b l n"]
State = Float[Tensor, "b d n"]
if TYPE_CHECKING:  # an editor can't tell which of the two a call returns
    Output = Channels | Any
else:
    Output = Channels | tuple[Channels, State]


def selective_scan(
    x: Channels,
    dt: Channels,
    A: Float[Tensor, "d n"],
    B: Shared,
    C: Shared,
    *,
    D: Float[Tensor, " d"] | None = None,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Output:
    """Compute h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t + D x_t: the definition.

    As in Mamba's code, the input term is dt B x (Euler) and not the (exp(dt A) - 1)/A B x of ZOH.
    Euler's term is larger: by 5 % at dt A = -0.1, elevenfold at -11.

    Args:
        x, dt, A, B, C: as in the table above.
        D: None for no skip connection.
        initial_state: the state before the first token; None for zeros.
        return_final_state: return (y, state after the last token) instead of y.

    Source: L22 and OTCE §2.1, Algorithm 2; mamba-ssm's `selective_scan_ref`.
    """
    _check(x, dt, A, B, C, D, initial_state)
    y, state = _run(_sequential, x, dt, A, B, C, D, initial_state)
    return (y, state) if return_final_state else y


def _sequential(x, dt, A, B, C, state):
    outputs = []
    for x_t, dt_t, B_t, C_t in zip(*(t.unbind(1) for t in (x, dt, B, C)), strict=True):
        write = (dt_t * x_t)[..., None] * B_t[:, None]
        state = torch.exp(dt_t[..., None] * A) * state + write
        outputs.append(einsum("bdn,bn->bd", state, C_t))
    return torch.stack(outputs, dim=1), state


def selective_scan_parallel(
    x: Channels,
    dt: Channels,
    A: Float[Tensor, "d n"],
    B: Shared,
    C: Shared,
    *,
    D: Float[Tensor, " d"] | None = None,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Output:
    """Compute `selective_scan` as an associative scan: in about 2 log₂ l steps instead of l.

    All states are in memory at once, (b, l, d, n), which Mamba's fused kernel avoids. torch has an
    `associative_scan` too, but calls it a prototype without derivatives and with a risk of wrong
    results, and it rejects l = 0.

    Source: L22 "Mamba's Scan Implementation"; Blelloch (1990), Prefix sums and their applications.
    """
    _check(x, dt, A, B, C, D, initial_state)
    y, state = _run(_parallel, x, dt, A, B, C, D, initial_state)
    return (y, state) if return_final_state else y


def _parallel(x, dt, A, B, C, state):
    decays = torch.exp(dt[..., None] * A)
    writes = rearrange(dt * x, "b l d -> b l d 1") * rearrange(B, "b l n -> b l 1 n")
    # The initial state counts as the write of a token before the first one, which decays nothing.
    states = _scan(F.pad(decays, (0, 0, 0, 0, 1, 0)), torch.cat([state[:, None], writes], dim=1))
    y = einsum("bldn,bln->bld", states[:, 1:], C)
    return y, states[:, -1].clone()  # a view would keep all states in memory


def _scan(a, b):
    """Solve h_t = a_t h_{t-1} + b_t with h_{-1} = 0 along axis 1, for all t at once.

    Two steps in a row are one step of the same kind, (a_2 a_1, a_2 b_1 + b_2). So we join
    neighbours in pairs, the scan of half the length gives h at every second place, and the places
    between are one step further: 2 log₂ l operations in sequence, 3 l multiplications.
    """
    length = b.shape[1]
    if length == 1:
        return b
    a_1, b_1 = (t[:, 0 : length - 1 : 2] for t in (a, b))
    a_2, b_2 = (t[:, 1::2] for t in (a, b))
    odd = _scan(a_2 * a_1, a_2 * b_1 + b_2)
    even = a[:, 2::2] * odd[:, : (length - 1) // 2] + b[:, 2::2]
    h = torch.empty_like(b)
    h[:, 0], h[:, 1::2], h[:, 2::2] = b[:, 0], odd, even
    return h


def _run(core, x, dt, A, B, C, D, state):
    """Scan in float32 or wider, add D x, and round to the dtype of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    state = x.new_zeros(x.shape[0], *A.shape, dtype=wide) if state is None else state
    if x.shape[1] == 0:
        return x.clone(), state.clone()  # results share no memory with arguments
    y, state = core(*(t.to(wide) for t in (x, dt, A, B, C)), state)
    y = y if D is None else y + D.to(wide) * x.to(wide)
    return y.to(x.dtype), state


class MambaCache(NamedTuple):
    """The memory of a Mamba layer: the state, and the last inputs of its convolution."""

    state: Float[Tensor, "b d_inner n"]
    conv: Float[Tensor, "b d_conv-1 d_inner"]


class Mamba(nn.Module):
    """The Mamba layer: a short convolution and a selective scan, with a gate on the output.

    u = silu(conv(x W_x)), y = (scan(u) ⊙ silu(x W_z)) W_o, with [W_x, W_z] in `in_proj` and W_o in
    `out_proj`. B, C and, through a bottleneck of dt_rank, dt are linear in u (`x_proj`). Only dt
    has a bias; in mamba-ssm's layer the convolution has one as well.

    Args:
        d_model: width of the input and the output.
        d_state: n.
        d_conv: tokens that the convolution sees.
        expand: d_inner / d_model, the expansion factor.
        dt_rank: width of the bottleneck; None for d_model / 16, rounded up.
        selective: False replaces `x_proj` of u by one learned vector for all tokens: a
            time-invariant control, whose B, C and dt do not depend on the input.
        scan: "parallel", in few large steps, or "sequential", in l small ones. They agree up to
            rounding; on a CPU "sequential" is faster once b d n is large (some ten thousand).

    Source: L22 "Mamba"; OTCE §2.1, Algorithm 2; Gu and Dao (2023), Mamba, §3.4; mamba-ssm's Mamba.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        selective: bool = True,
        scan: Scan = "parallel",
    ):
        super().__init__()
        check.sizes(d_model=d_model, d_state=d_state, d_conv=d_conv, expand=expand, dt_rank=dt_rank)
        check.choice(Scan, scan=scan)
        dt_rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        d_inner = expand * d_model
        self.d_model, self.widths = d_model, (dt_rank, d_state, d_state)
        self.selective, self.scan = selective, scan

        self.in_proj = nn.Linear(d_model, 2 * d_inner, bias=False)
        self.conv = nn.Parameter(torch.empty(d_inner, d_conv))
        if selective:
            self.x_proj = nn.Linear(d_inner, sum(self.widths), bias=False)
        else:
            self.constant = nn.Parameter(torch.empty(sum(self.widths)))
        self.dt_proj = nn.Linear(dt_rank, d_inner, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(d_inner))
        self.A_log = nn.Parameter(torch.empty(d_inner, d_state))
        self.D = nn.Parameter(torch.empty(d_inner))
        self.out_proj = nn.Linear(d_inner, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start A at -1, ..., -n in every channel, and dt log-uniform in [1e-3, 1e-1]."""
        bound = self.conv.shape[1] ** -0.5  # as torch's Conv1d starts
        nn.init.uniform_(self.conv, -bound, bound)
        if not self.selective:
            nn.init.normal_(self.constant)
        dt = nn.init.uniform_(self.dt_bias, math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
        self.A_log.copy_(torch.arange(1, self.A_log.shape[1] + 1, dtype=self.A_log.dtype).log())
        nn.init.ones_(self.D)

    def forward(
        self, x: Channels, *, cache: MambaCache | None = None
    ) -> tuple[Channels, MambaCache]:
        """Mix the tokens of this call with one another and with the tokens in the cache.

        Args:
            x: in the dtype of the layer.
            cache: the cache that an earlier call returned, which is not modified; None at the
                start.

        Returns:
            y, and the cache for the next call.

        Source: mamba-ssm's `mamba_inner_ref`.
        """
        n = check.shapes({"d": self.d_model}, x=(x, "b l d"))
        check.fits_weights(x, self.in_proj)
        n |= dict(zip(("d_inner", "n"), self.A_log.shape, strict=True))
        wide = torch.promote_types(x.dtype, torch.float32)
        state, history = (None, None) if cache is None else cache
        check.shapes(n, **{"cache.state": (state, "b d_inner n")})
        check.dtypes([wide], **{"cache.state": state})

        u, z = self.in_proj(x).chunk(2, dim=-1)
        u, history = short_convolution(u, self.conv, history=history)
        inner = self.x_proj(u) if self.selective else self.constant.expand(*u.shape[:2], -1)
        dt, B, C = inner.split(self.widths, dim=-1)
        dt = F.softplus(self.dt_proj(dt).to(wide) + self.dt_bias.to(wide))
        A = -self.A_log.to(wide).exp()
        scan = _parallel if self.scan == "parallel" else _sequential
        y, state = _run(scan, u, dt, A, B, C, self.D, state)
        return self.out_proj(y * F.silu(z)), MambaCache(state, history)


def _check(x, dt, A, B, C, D, state):
    named = dict(x=(x, "b l d"), dt=(dt, "b l d"), A=(A, "d n"), B=(B, "b l n"), C=(C, "b l n"))
    n = check.shapes(**named, D=(D, "d"), initial_state=(state, "b d n"))
    check.sizes(d=n["d"], n=n["n"])
    check.floating(x=x)
    wide = torch.promote_types(x.dtype, torch.float32)
    check.dtypes([x.dtype], B=B, C=C)
    check.dtypes([x.dtype, wide], dt=dt, A=A, D=D)
    check.dtypes([wide], initial_state=state)
    check.entries("(-inf, 0]", A=A)
    check.entries("[0, inf)", dt=dt)
