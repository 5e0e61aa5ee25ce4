# %% [markdown]
# # 10 · Where the bytes go
#
# **For every pair of tokens in a chunk, our `ssd_chunked` makes thirteen four-byte trips to memory
# per head (with four heads to a group). By the end you will have found all thirteen, and read three
# kernels that make none of them.** You will be able to
#
# - predict how long a pass takes from its operations and its bytes;
# - name the thirteen trips, and choose the length of a chunk;
# - read a Triton kernel for SSD alongside its PyTorch twin.
#
# You need the four steps of SSD from chapter 03, the patterns of chapter 07, and the interval
# (9.1).
#
# Sources: *Wonderful Matrices* (WM) §4.2, Figure 6, Listing 3; *Cheems* (Ch) §4.2, App. B.2, Figure
# 5; Williams, Waterman and Patterson (2009), *Roofline*. Code: `cheems_ref/roofline.py`,
# `triton_ssd.py`; records: `tests/bench/bench_efficiency.py`. How to read ✓ and ✗: chapter 00.

# %% tags=["setup"]
import json
import math
import textwrap
import time
from collections import Counter
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median

import torch
from torch.utils._pytree import tree_leaves

from cheems_ref import plotting, roofline
from cheems_ref.attention import attention
from cheems_ref.budget import cache_bytes, count_parameters, fit_d_ff
from cheems_ref.compare import interval
from cheems_ref.config import ModelConfig, preset
from cheems_ref.experts import MLP, MoE
from cheems_ref.kernels import kernel_status
from cheems_ref.model import CausalLM
from cheems_ref.retrieval import PEER
from cheems_ref.roofline import Machine, Operator, Recorder, pass_operators
from cheems_ref.ssd import ssd_chunked, ssd_quadratic, ssd_recurrent
from cheems_ref.verify import check, must_differ

# %% tags=["setup"]
torch.set_num_threads(1)  # as the record's
MEASURED = json.loads(Path("../figures/records/10_efficiency.json").read_text())["parts"]
RATES = MEASURED["rates"]
PRODUCTS, SUMS = dict(RATES["products"]), dict(RATES["sums"])
TYPICAL = 48 * 2**20  # bytes: two tensors of 16 MiB, summed into a third
MACHINE = Machine(2 * 1024**3 / PRODUCTS[1024], TYPICAL / SUMS[TYPICAL], RATES["launch"])
TRITON = Path(roofline.__file__).with_name("triton_ssd.py").read_text(encoding="utf-8")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def triton(kernel, first, last):
    """Lines of a Triton kernel of the package, from one that begins so to one that does."""
    body = TRITON.partition(f"def {kernel}(")[2].splitlines()
    start = next(i for i, line in enumerate(body) if line.strip().startswith(first))
    end = next(i for i, line in enumerate(body) if i >= start and line.strip().startswith(last))
    return "\n".join(map(folded, textwrap.dedent("\n".join(body[start : end + 1])).splitlines()))


def folded(line, width=71):
    """A line of code, broken after a comma where it is longer than a slide is wide."""
    place = line.rfind(", ", 0, width - 2) + 1 if len(line) > width else len(line)
    mark = " \\" if line[:place].count("(") == line[:place].count(")") else ""
    return line[:place] + (f"{mark}\n       {line[place:]}" if line[place:] else "")


# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])

# %% tags=["setup"]
SIZES = dict(d_model=128, n_heads=4, d_state=64, n_values=16, k_values=2, k_experts=1)
TWO_MILLION = 2_000_000
FAMILIES = {"LlaMa": "llama-1.3b", "Mamba-2": "mamba2-1.3b", "Jamba": "jamba-1.3b"}
FAMILIES |= {"OTCE": "otce-1b", "Cheems": "cheems-1.3b"}
SYSTEMS = {
    "LlaMa": dict(pattern="AH × 8"),
    "Mamba-2": dict(pattern="SH × 8", position="conv"),
    "Jamba": dict(pattern="SH × 4 + AH + SH × 3", position="conv"),
    "OTCE": dict(pattern="SD SX SX SX AX SX SD AD"),
    "Cheems": dict(pattern="SE × 7 + IE"),
}


def sized(name):
    """A system with the d_ff that brings it nearest to two million parameters."""
    return fit_d_ff(ModelConfig(**SYSTEMS[name], **SIZES), TWO_MILLION)


INNER = {
    "attention": dict(pattern="(SK × 3 + AK) × 2"),
    "retrieved": dict(pattern="(SK × 3 + IK) × 2", inner="retrieved"),
    "SSD": dict(pattern="(SK × 3 + IK) × 2", inner="ssd"),
}


def sized_inner(name):
    """The pattern of Ch's Figure 6 with an inner function, at two million parameters."""
    return fit_d_ff(ModelConfig(**INNER[name], **SIZES), TWO_MILLION)


# %% tags=["setup"]
def make_ssd(length, device="cpu"):
    """The tensors of one state layer: four heads of 32 channels, a state of 64."""
    how = dict(generator=seeded(0))
    x, B, C = (torch.randn(1, length, *sizes, **how) for sizes in ((4, 32), (1, 64), (1, 64)))
    dt, A = torch.rand(1, length, 4, **how) / 10, -torch.arange(1.0, 5)
    return [t.to(device) for t in (x, dt, A, B, C)]


def make_forms(length, device="cpu"):
    """Operators to compare, as calls without arguments: 128 channels in and out."""
    ssd = make_ssd(length, device)
    x = ssd[0]
    _ = torch.manual_seed(0)
    layers = {"MLP": MLP(128, 512), "routed": MoE(128, 128, n_experts=4, k=1)}
    layers["retrieved"] = PEER(128, n_experts=1024, n_heads=1, k=8, d_query=128)
    forms = {"SSD, one by one": partial(ssd_recurrent, *ssd)}
    forms |= {
        f"SSD, chunks of {q}": partial(ssd_chunked, *ssd, chunk_size=q) for q in (16, 64, 256)
    }
    forms["SSD, all at once"] = partial(ssd_quadratic, *ssd)
    forms["attention"] = partial(attention, x, x, x)
    tokens = x.flatten(2)
    return forms | {name: partial(layer.to(device), tokens) for name, layer in layers.items()}


# %% tags=["setup"]
def products(operators):
    """The operators that are products of matrices."""
    return [one for one in operators if one.flops]


def make_chunks(length, device="cpu"):
    """SSD by size of its chunks: a call forward, and one with all five gradients."""
    tensors = [t.requires_grad_() for t in make_ssd(length, device)]

    def both(q):
        return torch.autograd.grad(ssd_chunked(*tensors, chunk_size=q).sum(), tensors)

    return {
        q: (partial(ssd_chunked, *tensors, chunk_size=q), partial(both, q))
        for q in (8, 16, 32, 64, 128, 256, 512)
    }


# %% tags=["figure"]
def draw_memory(ax, left, width, fast, slow):
    """Two boxes: the small fast memory above, the big slow one below."""
    for low, high, words, color in ((4.0, 5.0, fast, 2), (0.3, 1.6, slow, 5)):
        frame = ax.fill([left, left + width, left + width, left], [low, low, high, high])[0]
        frame.set(facecolor="white", edgecolor=plotting.COLORS[color], linewidth=2.5)
        ax.text(left + width / 2, (low + high) / 2, words, ha="center", va="center", fontsize=15)


def draw_left(ax):
    """PyTorch's thirteen trips as arrows, and the names of the operators that make them."""
    draw_memory(ax, 0.25, 8.2, "fast and small: the processor's cache", "slow and big: memory")
    ax.text(4.35, 5.85, "PyTorch: 13 trips for every pair", ha="center", fontsize=17)
    made = {"subtract": "ww", "to float32": "rrw", "mask": "rw", "exp": "rw"}  # r up, w down
    made |= {"$CB^\\top$": "¼", "multiply": "rw", "times $x$": "r"}
    place = 0.7
    for name, trips in made.items():
        for i, trip in enumerate(trips):
            ends = [(place + 0.48 * i, y) for y in ((1.65, 3.95) if trip == "r" else (3.95, 1.65))]
            plotting.arrow(ax, *ends, color=plotting.COLORS[3 if trip == "¼" else trip == "w"])
            if trip == "¼":
                ax.text(ends[0][0] + 0.06, 2.8, "4 × ¼", fontsize=12)
        ax.text(place + 0.24 * (len(trips) - 1), 5.12, name, ha="center", fontsize=13.5)
        place += 0.48 * len(trips) + 0.22


# %% tags=["figure"]
def draw_right(ax):
    """The kernels: what goes in and comes out, and the states, which go both ways."""
    draw_memory(ax, 9.2, 3.5, "$L$, $CB^\\top$, and their\nproduct live and die here", "memory")
    ax.text(10.95, 5.85, "kernels: no pair moves", ha="center", fontsize=17)
    up, down = (1.65, 3.95), (3.95, 1.65)
    arrows = {9.6: (up, "$x, \\Delta, B, C$"), 11.0: (down, "$y$")}
    arrows |= {11.5: (down, ""), 11.75: (up, "states")}
    for x, (ends, words) in arrows.items():
        plotting.arrow(ax, *((x, y) for y in ends), color=plotting.QUIET)
        ax.text(x + 0.1, 2.8, words, fontsize=14)


# %% [markdown]
# The names are the steps of chapter 03's $(L \circ CB^\top)\,x$. On the left, each arrow is four
# bytes per head for a pair $(t, s)$ of tokens: it goes down when an operator writes them, and up
# when the next one reads them. The pink arrow is four quarters of a trip, because four heads share
# $CB^\top$.

# %% tags=["figure"]
fig, ax = plotting.canvas(13, 6.2)
draw_left(ax)
draw_right(ax)
plotting.save(
    fig,
    "10_trips",
    "Two drawings of a fast small memory above a slow big one. Left, PyTorch: thirteen arrows go "
    "up and down between them, two for the subtraction, three for the conversion to float32, two "
    "each for mask, exp and multiply, one for C B transposed and one for times x. Right, the "
    "kernels: x, delta, B and C go up, y comes down, states go both ways, and no pair moves.",
)

# %% [markdown]
# ## 1 · Thirty-eight operators
#
# PyTorch sees a layer as a list of *operators*: a matrix product, a sum, an exponential. Each one
# reads tensors from memory, computes, and writes its result back. Let's log every operator of SSD
# in chunks of 64, for 512 tokens, four heads of 32 channels and a state of 64. We count operations
# only in matrix products, and every read or write as a trip to memory, even if a cache catches it.
#
# Which operators do you expect to move the most bytes?

# %%
given = make_ssd(512)
with Recorder() as recorder:
    _ = ssd_chunked(*given)
called = recorder.operators
for one in sorted(called, key=lambda one: one.moved)[:-6:-1]:
    print(f"{one.name:9} {one.flops / 1e6:5.2f} million operations, {one.moved / 1e6:5.2f} MB")
moved, by_products = (sum(one.moved for one in some) for some in (called, products(called)))
print(
    f"all {len(called)} operators: {moved / 1e6:.1f} MB; products {by_products / moved:.0%} of them"
)

# %% tags=["guard"]
assert [one.name for one in products(called)] == ["bmm"] * 4 and len(called) == 38
assert round(by_products / moved, 2) == 0.2

# %% [markdown]
# Four of the 38 operators are the matrix products of chapter 03's steps 1, 2 and 4. They do all the
# operations we count, but move only a fifth of the bytes. The rest is mostly copies and elementwise
# work: a subtraction, a change of number format, a mask, an exponential.
#
# ## 2 · The price of a byte
#
# So what does a byte cost? Let's describe a machine by two rates: $R_\text{op}$, operations per
# second in a large matrix product, and $R_\text{byte}$, bytes read and written per second.
# Computing and moving overlap, so an operator of $\phi_i$ operations and $\mu_i$ bytes takes as
# long as the slower of the two, plus $t_0$ for the call:
#
# $$T \;\approx\;
#   \sum_i \Big( t_0 + \max\big(\phi_i / R_\text{op},\; \mu_i / R_\text{byte}\big) \Big).
# \tag{10.1}$$
#
# We measured all three numbers on one core of a server, in float32:

# %%
print(f"{MACHINE.flops / 1e9:.0f} billion operations per second, in products of 1,024 × 1,024")
print(f"{MACHINE.bandwidth / 1e9:.1f} GB per second, in sums of tensors of 16 MiB")
print(f"{1e6 * MACHINE.launch:.1f} microseconds for the smallest sum")
print(f"break-even: {MACHINE.flops / MACHINE.bandwidth:.1f} operations per byte")

# %% [markdown]
# An operator's *intensity* is its number of operations per byte. Multiplying two $m \times m$
# matrices has an intensity of $2m^3 / (4 \cdot 3m^2) = m / 6$. So from $m \approx 40$ on, computing
# takes longer than moving. At 40, the call alone takes as long as either. A large sum or mask has
# no products at all: by (10.1), it just waits for memory.
#
# Don't trust (10.1) too far. In our record, sums of tensors of 0.25 MiB run four times as fast as
# at 16 MiB, and sums of 32 MiB tensors take four times as long per byte.
#
# ## 3 · Thirteen trips
#
# Which operators move the pairs? Go back to the matrix $L$ of decays in step 1 of chapter 03. It
# has a number for each pair of tokens in a chunk, masked or not.
#
# One line of `cheems_ref/ssd.py`, split in two here, makes nine of the thirteen trips:
#
# ```python
# L = log_decay[..., :, None] - log_decay[..., None, :]  # 2 trips
# L = L.to(X.dtype).tril_().exp_()  # 3 + 2 + 2
# ```
#
# The subtraction runs in float64, so writing its result counts twice. `.to(X.dtype)` reads these
# eight bytes and writes four. `tril_` and `exp_` work in place, but that doesn't save a trip: each
# number still goes up and comes back down.
#
# Let's ask the operators themselves. With $q$ tokens in a chunk ($l_c$ in chapter 03), how many
# tensors of shape $q \times q$ does each one read and write?


# %% tags=["setup"]
class Trips(Recorder):
    """Also record how many bytes of pairs (..., q, q) an operator reads and writes."""

    def __init__(self, q):
        super().__init__()
        self.q, self.pairs = q, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = len(self.operators)
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if len(self.operators) > known:
            self.pairs.append((self.of_pairs(args), self.of_pairs(result)))
        return result

    def of_pairs(self, tree):
        tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
        return sum(t.nbytes for t in tensors if t.shape[-2:] == (self.q, self.q))


# %%
with Trips(q=16) as trips:
    _ = ssd_chunked(*make_ssd(256), chunk_size=16)
one_trip = 4 * 256 * 16 * 4  # bytes: a float32 number for each of q pairs a token, and head
print("             reads  writes   (of float32 numbers, per pair and head)")
for one, (read, written) in zip(trips.operators, trips.pairs, strict=True):
    if read + written:
        print(f"{one.name:11} {read / one_trip:6.2f} {written / one_trip:7.2f}")
total = sum(read + written for read, written in trips.pairs) / one_trip
print(f"together {total:.2f}")
assert total == 13

# %% tags=["guard"]
x, dt, A, B, C = make_ssd(256)
for groups in (2, 4):
    with Trips(q=16) as trips:
        _ = ssd_chunked(x, dt, A, *(t.repeat(1, 1, groups, 1) for t in (B, C)), chunk_size=16)
    assert sum(read + written for read, written in trips.pairs) / one_trip == 12 + groups

# %% [markdown]
# The other four trips are for $CB^\top$ and its mask, for the product with $L$, and for the product
# with $x$. $CB^\top$ and its mask count only a quarter per head, because four heads share them.
# With $h/g$ heads to a group, the sum would be $12 + 4g/h$. Nobody was careless here. The formula
# $(L \circ CB^\top)\,x$ just doesn't tell you that its parts go through memory.
#
# ## 4 · The length of a chunk
#
# Chapter 03 promised the same output for chunks of any length. It didn't promise the same traffic.
# For $h$ heads of $p$ channels, a state of size $n$ and four heads to a group, one token moves
#
# $$\mu(q) \;\approx\; 4 h \,\Big(7\,\frac{p n}{q} + 13\,q\Big) + \mu_0 \text{ bytes}.
# \tag{10.2}$$
#
# For each of its $q$ pairs, a token pays for thirteen four-byte trips. It also pays for the state
# of its chunk, but splits the bill with $q - 1$ other tokens. The state makes seven trips: one when
# it's written, three in the recurrence (two reads, one write), two when the states are stacked, and
# one when it's read. The rest, $\mu_0$, doesn't depend on $q$. Traffic is smallest where the two
# terms are equal, at $q = \sqrt{7 p n / 13}$, which is 33 for our layer.
#
# Before you look: which chunk length is fastest for 4,096 tokens?


# %% tags=["setup"]
@cache
def by_chunk():
    """The operators of SSD on 4,096 tokens, by the length of the chunks."""
    listed = {}
    for q, (forward, _) in make_chunks(4096).items():
        with torch.no_grad(), Recorder() as recorder:
            forward()
        listed[q] = recorder.operators
    return listed


def chunk_times():
    """Milliseconds of SSD on 4,096 tokens by chunk: as (10.1) predicts, and median of five runs."""
    took = MEASURED["chunks"]["seconds"]["evaluation"]
    predicted = [1e3 * MACHINE.seconds(called) for called in by_chunk().values()]
    return {"predicted": predicted, "measured": [1e3 * median(took[str(q)]) for q in by_chunk()]}


# %% tags=["figure"]
def draw_traffic(ax):
    """The terms of (10.2) and the rest, as they were counted, by the length of a chunk."""
    counted = [sum(one.moved for one in called) / 1e6 for called in by_chunk().values()]
    terms = {"states": [4096 * 16 * 7 * 32 * 64 / q / 1e6 for q in by_chunk()]}
    terms["pairs"] = [4096 * 16 * 13 * q / 1e6 for q in by_chunk()]
    terms["rest"] = [all_ - sum(two) for all_, *two in zip(counted, *terms.values(), strict=True)]
    below = torch.zeros(len(counted))
    for i, (name, high) in enumerate(terms.items()):
        ax.bar(range(len(counted)), high, bottom=below, label=name, color=plotting.COLORS[i])
        below = below + torch.tensor(high)
    ax.set(xticks=range(len(counted)), xticklabels=[*by_chunk()], xlabel="tokens in a chunk")
    ax.set(ylabel="megabytes")
    ax.legend()


# %% tags=["figure"]
def draw_times(ax):
    """Milliseconds by (10.1) and by the clock."""
    plotting.lines(ax, [*by_chunk()], chunk_times(), marker="o", xscale="log", yscale="log")
    ax.set(xlabel="tokens in a chunk", ylabel="milliseconds")
    ax.set(yticks=(5, 20, 80), yticklabels=(5, 20, 80))
    ax.set(xticks=[*by_chunk()], xticklabels=[*by_chunk()])
    ax.tick_params(axis="both", which="minor", labelleft=False, labelbottom=False)


# %% tags=["figure"]
fig, (left, right) = plotting.figure(1, 2, size=(13, 4.6))
draw_traffic(left)
draw_times(right)
plotting.save(
    fig,
    "10_chunks",
    "SSD on 4,096 tokens by the length of its chunks. Left, stacked bars of megabytes for states, "
    "pairs and the rest: lowest at 32, where states and pairs are about equal; at 512 nearly all "
    "is pairs. Right, milliseconds predicted and measured: both fall to 32 or 64 tokens and rise "
    "again; the measured curve lies above and rises more steeply from 128 to 512.",
)

# %% tags=["guard"]
by_terms = {q: 16 * (7 * 32 * 64 / q + 13 * q) for q in by_chunk()}
rest = [sum(one.moved for one in by_chunk()[q]) / 4096 - of_q for q, of_q in by_terms.items()]
assert all(abs(rest[2] - other) < 0.02 * (other + by_terms[8]) for other in rest)
times, took = chunk_times(), MEASURED["chunks"]["seconds"]["evaluation"]
off = torch.tensor(times["measured"]) / torch.tensor(times["predicted"])
assert torch.tensor(times["predicted"]).argmin() == 2
assert {*torch.tensor(times["measured"]).argsort()[:2].tolist()} == {2, 3}  # 32 and 64
assert 1.35 < off[:5].min() < off[:5].max() < 1.95
assert [round(one.item()) for one in off[5:]] == [3, 4]
assert round(math.sqrt(7 * 32 * 64 / 13)) == 33
mean, half = interval([a / b for a, b in zip(took["32"], took["64"], strict=True)])
assert mean - half < 1 < mean + half
speeds = {size / 3: size / seconds / 1e9 for size, seconds in SUMS.items()}
assert round(speeds[2**24], 1) == 28.5
assert round(speeds[2**18] / speeds[2**24]) == round(speeds[2**24] / speeds[2**25]) == 4
assert all(round(speeds[size]) == 7 for size in speeds if size >= 2**25)

# %% [markdown]
# The model predicts 32. Over five runs, 32 and 64 are indistinguishable. With chunks of up to 128
# tokens, a pass takes 1.4 to 1.9 times as long as predicted. At 256 and 512 it takes 3 and 4 times
# as long. We suspect the very large tensors, and exercise 3 lets you test that on your own machine.
#
# So it's the pairs that keep our chunks short. The papers' kernels use chunks of 256 (WM Table 7).
# What if the pairs never had to go to memory?
#
# ## 5 · Three kernels
#
# A *kernel* is a function that the processor runs many times in parallel, and each run is a
# *program*. Triton lets you write kernels in Python. Between `tl.load` and `tl.store`, a program
# keeps its numbers in registers and fast memory.
#
# `cheems_ref/triton_ssd.py` does the four steps of chapter 03 in three kernels. Each program works
# on one head of one row of the batch:
#
# - `_write`, step 2: one program per chunk stores what its tokens write into a state.
# - `_carry`, step 3: one program goes through all the chunks and stores the state before each.
# - `_read`, steps 1 and 4: one program per chunk stores its $y$.
#
# Why three? The state before a chunk depends on all earlier writes, and we let one program walk
# through them. Everything else runs for all chunks at once.
#
# Picture the matrix $M$ in $y = Mx$. Which program makes which block?


# %% tags=["setup"]
l, h, g, n, p, q = 42, 2, 1, 8, 4, 16  # two chunks of 16 tokens and one of 10; two heads, one group
N, P = 16, 16  # sides of a tile: powers of two, and at least 16 for tl.dot
CHUNKS = math.ceil(l / q)
SHAPES = dict(x=(1, l, h, p), dt=(1, l, h), A=(h,), B=(1, l, g, n), C=(1, l, g, n))
GIVEN = {name: torch.randn(*size, generator=seeded(0)).double() for name, size in SHAPES.items()}
GIVEN |= dict(dt=GIVEN["dt"].abs(), A=-GIVEN["A"].abs())
MADE = dict(states=(h, CHUNKS, n, p), decays=(h, CHUNKS), final=(h, n, p), y=(l, h, p))
EMPTY = {name: torch.zeros(size).double() for name, size in MADE.items()}
EMPTY["initial"] = torch.zeros(h, n, p).double()
MEMORY = {  # each tensor in one row, with something else (sevens) behind
    name: torch.cat([tensor.flatten(), torch.full((256,), 7.0).double()])
    for name, tensor in (GIVEN | EMPTY).items()
}
MOVED = Counter()


# %% tags=["setup"]
def alone(chunk):
    """The states that the recurrence leaves after one chunk, begun with nothing: (h, n, p)."""
    part = slice(chunk * q, (chunk + 1) * q)
    cut = [t if t.ndim == 1 else t[:, part] for t in GIVEN.values()]
    return ssd_recurrent(*cut, return_final_state=True)[1][0].mT


def stored(name):
    """What the kernels have stored, in its shape."""
    return MEMORY[name][: math.prod(MADE[name])].view(MADE[name])


def run(kernel, *grid):
    """Run a twin once for every point of a grid; the numbers that it has moved."""
    MOVED.clear()
    for program in product(*map(range, grid)):
        kernel(*program)
    return MOVED.total()


# %% tags=["setup"]
def load(name, place, inside=True):
    """tl.load: numbers of a flat tensor, zeros where `inside` is false."""
    place, inside = torch.as_tensor(place), torch.as_tensor(inside)
    MOVED["loads"] += int(inside.sum())
    return torch.where(inside, MEMORY[name][place], 0.0)


def store(name, place, values, inside=True):
    """tl.store: write where `inside` is true."""
    place, inside = torch.as_tensor(place), torch.as_tensor(inside)
    MOVED["stores"] += int(inside.sum())
    MEMORY[name][place[inside]] = values[inside]


# %% tags=["figure"]
def draw_programs(ax):
    """The blocks of M, with the programs that stand for each."""
    chunk = torch.arange(l) // q
    made = torch.where(chunk[:, None] == chunk, 1.0, 0.35)
    made[~torch.ones(l, l).tril().bool()] = torch.nan
    plotting.heatmap(ax, made, signed=False, colorbar=False, xlabel="source", ylabel="target")
    for i in range(3):
        middle = (q * i + min(q * (i + 1), l)) / 2
        ax.text(q * i + 0.5, middle + 3, f"read {i}", color="white", fontsize=14)
        for j in range(i):
            words = f"write {j}, carry,\nread {i}"
            ax.text(q * (j + 0.5), middle, words, ha="center", va="center", fontsize=14)


# %% tags=["figure"]
fig, ax = plotting.figure(size=(6.4, 5.6))
draw_programs(ax)
plotting.save(
    fig,
    "10_programs",
    "The lower half of the matrix M of 42 tokens in blocks: three on the diagonal, named read 0, 1 "
    "and 2, and three below it, named by the chunk that writes, carry, and the chunk that reads.",
)

# %% [markdown]
# A program of `_read` makes one dark block on the diagonal (but for $\Delta$), uses it and forgets
# it. No program makes the light blocks: a write, the carried state and a read do their work.
#
# **A tile and its mask.** A program sees memory as one long row of numbers, and loads a *tile*:
# some rows of a matrix. Its sides must be powers of two. Ours are at least 16, the fewest that
# `tl.dot` can sum over.
#
# Our example has $n = 8$, and $l = 42$ tokens in chunks of $q = 16$. The last chunk has 10 tokens,
# but its tile of $B$ has 16 rows of 16 numbers:
#
# ```
# memory  … │ 8 numbers of token 40 │ 8 of token 41 │ something else …
# tile    10 rows of 8 numbers; zeros beside them and below them
# ```
#
# A load takes a mask, and we pass `0.0` for where the mask is false. Those zeros do no harm: a
# token with $\Delta = 0$ leaves the state alone, and zeros beside the data add nothing to a
# product. (Our example has sevens behind each tensor, so a read past the end shows.)
#
# Here is a tile in PyTorch and in Triton:


# %%
def tile(name, rows, n_columns, inside, width):
    column = torch.arange(width)[None, :]
    place = rows[:, None] * n_columns + column
    return load(name, place, inside[:, None] & (column < n_columns))


print(triton("_tile", "column =", "return"))

# %% [markdown]
# Programs of `_write` and `_read` also load $\Delta$ and sum the log decays:


# %%
def steps_of(rows, inside, head):
    steps = load("dt", rows, inside)
    return steps, (steps * load("A", head)).clamp(min=-750).cumsum(0)  # exp(-750) is 0


print(triton("_steps", "steps =", "return"))

# %% tags=["guard"]
token = 2 * q + torch.arange(q)  # the last chunk: 10 tokens are there, 6 are not
last = tile("B", token, n, token < l, N)
check("rows that exist", last[:10, :n], GIVEN["B"][0, 32:, 0])
assert not last[10:].any() and not last[:, n:].any()
assert math.exp(-750) == 0

# %% [markdown]
# ## 6 · The kernel, line by line
#
# Now we read the kernels. Each has a PyTorch twin with the same names. We show the twin of
# `_write`, and fold the others.
#
# Every program of `_write` and of `_read` starts the same way. It asks which chunk, head and row of
# the batch are its own, finds its tokens, and loads their $\Delta$, $x$ and $B$. In the twin these
# lines are called `begin`:


# %% tags=["setup"]
def begin(chunk, head, row, l):
    """The first lines of _write and of _read."""
    t = chunk * q + torch.arange(q)
    mine = (row * l + t) * h + head
    shared = (row * l + t) * g + head // (h // g)
    steps, since = steps_of(mine, t < l, head)
    X, K = tile("x", mine, p, t < l, P), tile("B", shared, n, t < l, N)
    return (t, mine, shared), steps, since, X, K


# %%
print(triton("_write", "chunk, head", "X, K"))

# %% [markdown]
# What do the names mean?
#
# - `t` holds the tokens of the chunk; `t < l` is the mask.
# - `mine` holds their rows of $x$ and $\Delta$: a token has $h$, one per head.
# - `shared` holds their rows of $B$ and $C$, which $h / g$ neighbouring heads share.
# - `since` is the log decay since the chunk began.
# - `X` and `K` are tiles of $x$ and $B$. `_read` also loads `Q`, a tile of $C$.
#
# **`_write`** computes what a chunk leaves in an empty state: the sum of $\Delta_s B_s x_s^\top$,
# each decayed to the end of the chunk. Here is the twin:


# %%
def write(chunk, head, row=0, l=l):
    """The twin of _write."""
    _, steps, since, X, K = begin(chunk, head, row, l)
    whole = since.min()
    to_end = (whole - since).exp()
    write = K.T @ ((to_end * steps)[:, None] * X)

    place = (row * h + head) * CHUNKS + chunk  # number of this chunk among all
    i, j = torch.arange(N)[:, None], torch.arange(P)[None, :]
    store("states", (place * n + i) * p + j, write, (i < n) & (j < p))
    store("decays", place, whole.exp())


# %% [markdown]
# Now the same in Triton (`tl.dot` is a matrix product):

# %%
print(triton("_write", "whole", "tl.store(decays"))

# %% [markdown]
# ("tf32x3": three products on a tensor core together keep nearly all digits of float32.)
#
# Does the twin write what the recurrence of chapter 03 leaves behind? And what happens if we forget
# the mask on the tokens?

# %%
_ = run(write, CHUNKS, h)
right = stored("states").clone()
for chunk in range(CHUNKS):
    check(f"chunk {chunk}: its writes", right[:, chunk], alone(chunk))
_ = run(partial(write, l=48), CHUNKS, 1)  # told that all 48 tokens exist
_ = must_differ("no mask at the ragged end", stored("states"), right)

# %% [markdown]
# It's an easy mistake to miss: as long as every test uses a multiple of 16 tokens, no program reads
# past the end.
#
# **`_carry`** goes through the chunks in order, so one program does them all. It loads a chunk's
# own `write` and stores the state *before* the chunk in its place (`entry` indexes the numbers in a
# state):

# %%
print(triton("_carry", "tl.store(states", "state ="))


# %% tags=["setup"]
def carry(head, row=0):
    """The twin of _carry."""
    mine = row * h + head
    i, j = torch.arange(N)[:, None], torch.arange(P)[None, :]
    inside, entry = (i < n) & (j < p), i * p + j
    state = load("initial", mine * n * p + entry, inside)
    for chunk in range(CHUNKS):
        place = mine * CHUNKS + chunk
        write = load("states", place * n * p + entry, inside)
        store("states", place * n * p + entry, state, inside)
        state = load("decays", place) * state + write
    store("final", mine * n * p + entry, state, inside)


# %% tags=["guard"]
_ = run(write, CHUNKS, h), run(carry, h)
_, final = ssd_recurrent(*GIVEN.values(), return_final_state=True)
check("the state after the last chunk", stored("final"), final[0].mT)

# %% [markdown]
# **In `_read`, the pairs of our opening picture live and die.** Can you find the thirteen trips in
# these lines?

# %%
print(triton("_read", "between", "inside_chunk"))

# %% [markdown]
# They're gone. `between`, `L` and `scores` still have $q \times q$ numbers each, but nobody stores
# them. At the end, `_read` adds the reads from the state before the chunk, and stores
# $q \times p$ numbers.
#
# Are the twins right? And what about the Triton version? Without a GPU, Triton's interpreter runs
# it, slowly.


# %% tags=["setup"]
def read(chunk, head, row=0):
    """The twin of _read."""
    (t, mine, shared), steps, since, X, K = begin(chunk, head, row, l)
    Q = tile("C", shared, n, t < l, N)

    L = torch.where(t[:, None] >= t[None, :], (since[:, None] - since[None, :]).exp(), 0.0)
    scores = (Q @ K.T) * L
    inside_chunk = scores @ (steps[:, None] * X)

    i, j = torch.arange(N), torch.arange(P)[None, :]
    state = tile("states", ((row * h + head) * CHUNKS + chunk) * n + i, p, i < n, P)
    before_chunk = since.exp()[:, None] * (Q @ state)
    store("y", mine[:, None] * p + j, inside_chunk + before_chunk, (t < l)[:, None] & (j < p))


def check_triton():
    """Compare the Triton with the twins, on a GPU or in Triton's interpreter."""
    status = kernel_status()
    if not status.available:
        print("Triton: not run here.", status.reason)
        return
    from cheems_ref.triton_ssd import ssd_triton

    there = "cuda" if status.mode == "cuda" else "cpu"
    single = [t.float().to(there) for t in GIVEN.values()]
    by_triton = ssd_triton(*single, chunk_size=q).cpu()
    check("Triton = twins", by_triton, stored("y")[None].float(), tol=1e-5)


# %% tags=["aside"]
for kernel, *grid in ((write, CHUNKS, h), (carry, h), (read, CHUNKS, h)):
    _ = run(kernel, *grid)
check("write, carry, read = recurrence", stored("y")[None], ssd_recurrent(*GIVEN.values()))
check_triton()

# %% [markdown]
# ## 7 · What the kernels move
#
# So how much do the kernels move? Every trip is a `tl.load` or a `tl.store`, so we add them up. For
# one head of $l$ tokens in $c$ chunks, we find this many numbers:
#
# $$\begin{aligned}
# \text{write} &: \; l\,(p + n + 1) + c\,(np + 2) \\
# \text{carry} &: \; c\,(2np + 1) + 2np \\
# \text{read} &: \; l\,(2p + 2n + 1) + c\,(np + 1)
# \end{aligned} \tag{10.3}$$
#
# There's no $q^2$ left, and no $l\,q$.


# %% tags=["setup"]
def numbers(l, n, p, q):
    """Equation 10.3: numbers moved by each of the three kernels, for one head."""
    c = math.ceil(l / q)
    write, carry = l * (p + n + 1) + c * (n * p + 2), c * (2 * n * p + 1) + 2 * n * p
    return write, carry, l * (2 * p + 2 * n + 1) + c * (n * p + 1)


def three_kernels(h, l, n, p, q):
    """The kernels as operators: operations of their products, and four bytes per number."""
    flops = 2 * h * l * n * p, 0, 2 * h * l * (q * n + q * p + n * p)
    moved = [4 * h * each for each in numbers(l, n, p, q)]
    return [*map(Operator, ("write", "carry", "read"), flops, moved)]


# %% tags=["guard"]
grids = {write: (CHUNKS, h), carry: (h,), read: (CHUNKS, h)}
for (kernel, grid), one_head in zip(grids.items(), numbers(l, n, p, q), strict=True):
    moved = run(kernel, *grid)
    print(f"{kernel.__name__:5}: {moved:5,} numbers counted, {h * one_head:5,} by (10.3)")
    assert moved == h * one_head

# %% [markdown]
# Take the layer of section 4 again, with 4,096 tokens in chunks of 64. What do the kernels move,
# and how long would that take by (10.1)?

# %%
kernels = three_kernels(h=4, l=4096, n=64, p=32, q=64)
print("4,096 tokens, chunks of 64    MB   milliseconds by (10.1)")
for name, called in {"PyTorch": by_chunk()[64], "three kernels": kernels}.items():
    megabytes = sum(one.moved for one in called) / 1e6
    print(f"{name:26} {megabytes:5.0f} {1e3 * MACHINE.seconds(called):6.1f}")

# %% tags=["guard"]
assert round(sum(one.moved for one in by_chunk()[64]) / 1e6) == 108
assert round(sum(one.moved for one in kernels) / 1e6) == 27
assert round(1e3 * MACHINE.seconds(by_chunk()[64]), 1) == 4.4
assert round(1e3 * MACHINE.seconds(kernels), 1) == 2.0
waits = [one.moved / MACHINE.bandwidth > one.flops / MACHINE.flops for one in kernels]
assert waits == [False, True, False]

# %% [markdown]
# At chunks of 64 the kernels move a quarter of the bytes. By (10.1), only `_carry`, which has no
# product, would still wait for memory. The 2.0 ms is a prediction, not a measurement: we have no
# such kernel for a CPU. `make gpu` times the kernels, if you have a GPU.
#
# ## 8 · The race of five systems
#
# That was one layer. Which model as a whole is fastest on short texts, and which on long ones? We
# time the five systems of the papers, cut down to two million parameters each, on texts of 256 to
# 16,384 tokens. *Evaluation* is a forward pass, and *training* adds the backward pass. All five use
# PyTorch's operators on one CPU core.
#
# Which of the five do you expect to come last on a long text?


# %% tags=["setup"]
LENGTHS = [2**i for i in range(8, 15)]


def turns(kind, name):
    """The measured seconds: (five runs, lengths)."""
    seconds = MEASURED["systems"][kind]
    return torch.tensor([seconds[str(l)][name] for l in LENGTHS]).double().T


def crossings(kind, name, other):
    """From how many tokens on one system is faster than another, in each run."""
    found = []
    for one in (turns(kind, name) / turns(kind, other)).log().tolist():
        i = next(i for i in range(len(LENGTHS)) if one[i] > 0 >= one[i + 1])
        found.append(LENGTHS[i] * 2 ** (one[i] / (one[i] - one[i + 1])))
    return found


# %% tags=["figure"]
def draw_race(ax, kind):
    """Tokens per second against length."""
    for i, name in enumerate(SYSTEMS):
        times = turns(kind, name).median(0).values
        how = dict(color=plotting.COLORS[i], linestyle=plotting.DASHES[i], marker="o", label=name)
        ax.plot(LENGTHS, torch.tensor(LENGTHS) / times / 1000, **how)
    ax.set(xscale="log", title=kind, xlabel="tokens", ylim=(0, None))
    ax.set(xticks=LENGTHS[::2], xticklabels=[f"{l:,}" for l in LENGTHS[::2]])
    ax.minorticks_off()


# %% tags=["figure"]
fig, (left, right) = plotting.figure(1, 2, size=(13, 4.8))
draw_race(left, "evaluation")
draw_race(right, "training")
left.set_ylabel("thousand tokens per second")
right.legend()
plotting.save(
    fig,
    "10_throughput",
    "Thousand tokens per second against the length of the text, 256 to 16,384, for evaluation and "
    "training of five systems. LlaMa's curves are highest at 256 tokens and lowest from 2,048 on; "
    "OTCE's are highest at 1,024 and 2,048, Mamba-2's at 8,192 and 16,384.",
)

# %% tags=["guard"]
for kind in ("evaluation", "training"):
    speed = torch.stack([1 / turns(kind, name).median(0).values for name in SYSTEMS])
    names = [*SYSTEMS]
    first, last = ([names[i] for i in places] for places in (speed.argmax(0), speed.argmin(0)))
    assert [first[i] for i in (0, 2, 3, 5, 6)] == ["LlaMa", "OTCE", "OTCE", "Mamba-2", "Mamba-2"]
    assert {*last[3:]} == {"LlaMa"}
    assert all(400 < interval(crossings(kind, name, "LlaMa"))[0] < 1300 for name in names[1:])
print("the figure: LlaMa is the fastest at 256 tokens, and the slowest from 2,048 on")
again = MEASURED["batches"]["seconds"]["1"]  # 256 tokens, timed once more
drift = [median(again[name]) / turns("training", name).median(0).values[0].item()
         for name in SYSTEMS]  # fmt: skip
assert 1.165 < min(drift) < max(drift) < 1.22 and max(drift) / min(drift) < 1.04

# %% [markdown]
# LlaMa, with attention in eight layers, is the fastest at 256 tokens and the slowest from 2,048 on.
# On average over five runs, the other four overtake it at 400 to 1,300 tokens, in evaluation and in
# training.
#
# WM says of its Figure 6: "Cheems is more efficient than LlaMa and Jamba, but slightly lower than
# Mamba2." What do we see in training? (± is the interval (9.1) over five runs.)
#
# - *LlaMa.* Cheems overtakes it at 1,156 ± 69 tokens. At 2,048 it's 1.21 ± 0.02 times as fast.
# - *Jamba.* Cheems has 0.94 to 0.99 of its speed: too close to call, since our ratios drift by up
#   to 4 percent.
# - *Mamba-2.* The gap grows: 0.93 ± 0.01 of its speed at 4,096 tokens, 0.66 ± 0.01 at 16,384.
#
# On the papers' GPUs, with kernels, the order may be different.
#
# What about *generating* text? At every step, LlaMa reads all its keys and values, writes a longer
# copy, and reads the copy. A step takes 4 ms after 256 tokens, and 49 ms after 16,384. By (10.1),
# the three trips account for 14 ms of that. About 30 ms remain unexplained. Mamba-2's step takes
# 4 ms both times.


# %% tags=["setup"]
def milliseconds(name):
    """Measured milliseconds of a step by context, medians."""
    found = MEASURED["decoding"]
    return {int(context): 1e3 * median(found[context][name]) for context in found}


def a_step(name, context):
    """The operators of one more token after so many."""
    _ = torch.manual_seed(0)
    net = CausalLM(sized(name))
    ids = torch.randint(256, (1, context), generator=seeded(0))
    with torch.inference_mode():
        _, cache = net(ids)
        with Recorder() as recorder:
            _ = net(ids[:, :1], cache=cache)
    return recorder.operators


# %% tags=["guard"]
growth = {}
for name in SYSTEMS:
    few, many = (a_step(name, context) for context in (64, 128))
    growth[name] = (sum(one.moved for one in many) - sum(one.moved for one in few)) / 64
    keys_values = cache_bytes(sized(name), 1, dtype=torch.float32).keys_values
    assert len(few) == len(many) and 0 <= growth[name] - 3 * keys_values < 0.02 * growth[name] + 1
    print(f"{name:8} a token of context adds {growth[name]:6.0f} bytes to a step")
print("ms per 1,000 tokens of context: measured, and its bytes by (10.1)")
for name in ("LlaMa", "Mamba-2"):
    steps, by_bytes = milliseconds(name), 1e6 * growth[name] / MACHINE.bandwidth
    slope = 1000 * (steps[16_384] - steps[1024]) / (16_384 - 1024)
    print(f"{name:8} {slope:5.2f} {by_bytes:5.2f}")
starts, ends = ([milliseconds(name)[l] for name in SYSTEMS] for l in (256, 16_384))
assert 3.7 < min(starts) < max(starts) < 5 and 48 < ends[0] < 50
assert abs(ends[1] - starts[1]) < 0.2 and round(ends[1]) == 4
assert round(1e3 * growth["LlaMa"] * 16_384 / MACHINE.bandwidth) == 14
assert round(starts[0]) == round(starts[1]) == 4 and 29 < ends[0] - starts[0] - 14 < 32
print("a step, in ms: 3.7 to 5 after 256 tokens; after 16,384 tokens LlaMa 49, Mamba-2 4")

# %% tags=["guard"]
# How many times as fast as LlaMa on 4,096 tokens, by (10.1), on a GPU like an H100
large, gpu, leads = {}, Machine(1e15, 3.3e12), {}
for name, family in FAMILIES.items():
    parts = pass_operators(preset(family), 4096, dtype=torch.bfloat16).values()
    called = [one for part in parts for one in part]
    large[name] = {"all operators": called, "products": [one for one in called if one.flops]}
print(f"{'':13}", *(f"{name:>8}" for name in FAMILIES))
for what in ("all operators", "products"):
    took = {name: gpu.seconds(called[what]) for name, called in large.items()}
    leads[what] = [round(took["LlaMa"] / seconds, 2) for seconds in took.values()]
    print(f"{what:13}", *(f"{lead:8.2f}" for lead in leads[what]))
assert leads["all operators"] == [1.0, 0.53, 0.56, 1.15, 0.44]
assert leads["products"] == [1.0, 1.0, 1.0, 1.48, 0.38]


# %% tags=["setup"]
def as_fast(kind, name, other, length):
    """How many times as fast as another system, with the interval over the runs."""
    at = LENGTHS.index(length)
    return interval((turns(kind, other) / turns(kind, name))[:, at].tolist())[:2]


# %% tags=["guard"]
for other, kind in product(("LlaMa", "OTCE"), ("training", "evaluation")):
    mean, half = interval(crossings(kind, "Cheems", other))
    print(f"Cheems over {other}, {kind}: from {mean:,.0f} ± {half:,.0f}")
compared = [("Jamba", *place) for place in (("training", 16_384), ("evaluation", 16_384))]
compared += [("Jamba", "evaluation", 256), ("Jamba", "evaluation", 512)]
compared += product(["Mamba-2"], ("training", "evaluation"), (4096, 16_384))
compared += [("LlaMa", "training", 2048)]
for other, kind, length in compared:
    mean, half = as_fast(kind, "Cheems", other, length)
    print(f"{kind:10} at {length:6,}: {mean:.2f} ± {half:.2f} times as fast as {other}")
for length, seconds in MEASURED["inner"].items():
    ratios = [a / b for a, b in zip(seconds["SSD"], seconds["attention"], strict=True)]
    mean, half = interval(ratios)
    print(f"SSD       at {int(length):5,} tokens: {mean:.3f} ± {half:.3f} times as long")
    assert mean - half > 1.04

# %% tags=["guard"]
pairs = [*product(("LlaMa", "OTCE"), ("training", "evaluation"))]
found = [interval(crossings(kind, "Cheems", other)) for other, kind in pairs]
rounded = [(round(mean), round(half)) for mean, half in found]
assert rounded == [(1156, 69), (1277, 108), (5656, 1686), (9966, 1064)]
found = [as_fast(kind, "Cheems", other, length) for other, kind, length in compared]
rounded = [(round(mean, 2), round(half, 2)) for mean, half in found]
assert rounded[:4] == [(0.95, 0.03), (0.99, 0.06), (0.85, 0.01), (0.83, 0.01)]
assert rounded[4:8] == [(0.93, 0.01), (0.66, 0.01), (0.92, 0.13), (0.69, 0.06)]
assert rounded[8:] == [(1.21, 0.02)]
ends = [as_fast(kind, "Cheems", other, 16_384) for other, kind in pairs]
lowest = [mean - half for mean, half in ends]
assert min(lowest[:3]) > 1.04 > lowest[3] > 1 and 0.96 < sum(found[0]) < 1

# %% tags=["guard"]
slower = {}
for kind in ("training", "evaluation"):
    ratios = [as_fast(kind, "Cheems", "Jamba", length) for length in LENGTHS]
    assert all(mean < 1 for mean, _ in ratios)  # at every length
    slower[kind] = [LENGTHS[i] for i, ratio in enumerate(ratios) if sum(ratio) < 0.96]
    if kind == "training":
        assert [round(f(mean for mean, _ in ratios), 2) for f in (min, max)] == [0.94, 0.99]
assert slower == {"training": [], "evaluation": [256, 512]}

# %% [markdown]
# ## Summary
#
# - Operations, bytes and three numbers of a machine predict a time, by (10.1). With chunks of up to
#   128 tokens, SSD takes 1.4 to 1.9 times as long.
# - Our `ssd_chunked` makes thirteen four-byte trips per head for each pair of tokens in a chunk,
#   with four heads to a group. At chunks of 64, only a fifth of SSD's bytes belong to products.
# - Three kernels move no pair at all. At chunks of 64 they move a quarter of the bytes.
# - A forgotten mask on the tokens passes every test whose length is a multiple of the chunk.
# - On our core, at two million parameters, systems with states overtake LlaMa at 400 to 1,300
#   tokens, on average.
#
# ## Exercises

# %% [markdown]
# **1 · easy.** How many operations per byte are there in multiplying an $(m, k)$ matrix by a $(k,
# n)$ matrix? Use pencil and paper. A number takes `itemsize` bytes, and each matrix moves once.


# %% tags=["exercise"]
def intensity(m, k, n, itemsize):
    """Operations per byte of a product of matrices."""
    ### BEGIN SOLUTION
    return 2 * m * k * n / (itemsize * (m * k + k * n + m * n))
    ### END SOLUTION


# %% tags=["check"]
for m in (6, 64, 1024):
    got = intensity(m, m, m, 4)
    assert math.isclose(got, m / 6), f"square, m = {m}, float32: {got} instead of {m / 6}"
one = intensity(1, 1024, 1024, 2)
assert abs(one - 1) < 0.01, f"one token and a matrix of sixteen bits: {one:.3f}, almost 1"
with Recorder() as recorder:
    _ = torch.ones(5, 7) @ torch.ones(7, 3)
real = recorder.operators[-1]
assert math.isclose(intensity(5, 7, 3, 4), real.flops / real.moved), "not what torch's product does"
print("one token has one operation per byte: generating waits for memory")

# %% [markdown]
# **2 · easy.** How many tokens per second can a model generate at most? Every step reads the cache,
# and all parameters that a token uses. Count the bandwidth alone.


# %% tags=["exercise"]
def most_tokens(parameters, itemsize, cache, bandwidth):
    """Tokens per second at most, for this many active parameters and this much cache."""
    ### BEGIN SOLUTION
    return bandwidth / (parameters * itemsize + cache)
    ### END SOLUTION


# %% tags=["check"]
assert math.isclose(most_tokens(1e9, 2, 0, 2e12), 1000), "2 GB at 2 TB/s: 1,000 tokens per second"
assert math.isclose(most_tokens(1e9, 2, 2e9, 2e12), 500), "a cache as large halves it"
config = sized("LlaMa")
active = sum(part.active for part in count_parameters(config).values())
cache = cache_bytes(config, 16_384, dtype=torch.float32).total()
once, thrice = (most_tokens(active, 4, times * cache, MACHINE.bandwidth) for times in (1, 3))
real = 1000 / milliseconds("LlaMa")[16_384]
assert 150 < once < 300, f"LlaMa, after 16,384 tokens: {once:.0f}"
print(f"LlaMa here, after 16,384 tokens: at most {once:.0f} per second,")
print(f"{thrice:.0f} if the cache moves three times, and {real:.0f} measured: the rest is open")

# %% [markdown]
# **3 · medium.** Measure your own machine: does it move large tensors as fast as small ones? Write
# `rate`: call a function once to warm up, then seven times, and divide `moved` bytes by the median
# time of the seven. (`clock()` returns seconds.) Then sum two tensors of 16 MiB and two of 64 MiB,
# once with `torch.add(a, b)` and once with `torch.add(a, b, out=c)` into memory that you allocated
# before. Is one of the four much slower? (For a large tensor, a C library may ask the operating
# system for fresh pages, and the system clears each page first: mallopt(3),
# `DEFAULT_MMAP_THRESHOLD_MAX`.)


# %% tags=["exercise"]
def rate(call, moved, clock=time.perf_counter):
    """Bytes per second of a call that moves so many bytes."""
    ### BEGIN SOLUTION
    call()
    times = []
    for _ in range(7):
        start = clock()
        call()
        times.append(clock() - start)
    return moved / median(times)
    ### END SOLUTION


# %% tags=["check"]
now, took = [0.0], iter([9.0, 2.0, 1.0, 8.0, 3.0, 2.0, 1.0, 2.0])
got = rate(lambda: now.append(now[-1] + next(took)), 12.0, clock=lambda: now[-1])
assert got == 6.0, f"seven calls after the first, median 2 seconds for 12 bytes: {got}"
assert next(took, None) is None, "one call to warm up, and seven that count"
assert rate(partial(torch.add, torch.ones(2**20), 1.0), 8 * 2**20) > 0
print("measured: seven calls, and their median")

# %% [markdown]
# **4 · medium.** How many bytes does a chain of operators move if a single *fused* kernel runs all
# of it? Such a kernel reads each input from outside once, and writes each result that is needed
# afterwards once. Results that only the chain itself reads never move. `chain` lists operators as
# (names read, name written), `sizes` gives bytes by name, and `needed` has the names that are read
# afterwards. Return the bytes that the fused kernel moves, and the bytes that the operators move
# one by one.


# %% tags=["exercise"]
def fused_and_not(chain, sizes, needed):
    """Bytes of one kernel, and of the operators one after another."""
    ### BEGIN SOLUTION
    made = {written for _, written in chain}
    read = {name for names, _ in chain for name in names} - made
    fused = sum(sizes[name] for name in read) + sum(sizes[name] for name in made & set(needed))
    apart = sum(sizes[written] + sum(sizes[name] for name in names) for names, written in chain)
    return fused, apart
    ### END SOLUTION


# %% tags=["check"]
sizes = dict(x=10, norm=1, y=10, gate=10, z=10, w=5)
chain = [(("x",), "norm"), (("x", "norm"), "y"), (("y",), "gate"), (("y", "gate"), "z")]
got = fused_and_not(chain, sizes, ["z"])
assert got == (20, 82), f"x is read, z is written; one by one 11 + 21 + 20 + 30: {got}"
got = fused_and_not(chain, sizes, ["z", "y"])
assert got == (30, 82), f"y is read afterwards as well: {got}"
got = fused_and_not([(("x",), "y"), (("y", "w"), "z")], sizes, ["z"])
assert got == (25, 45), f"w is read by the second alone: {got}"
got = fused_and_not([(("x", "w"), "y"), (("y", "w"), "z")], sizes, ["z"])
assert got == (25, 50), f"w is read once by one kernel, twice by two: {got}"
of_pair = dict(log=0, wide=2, thin=1, L=1, e=1, CB=0.25, low=0.25, both=1, v=0, y=0)
its_chain = [(("log",), "wide"), (("wide",), "thin"), (("thin",), "L"), (("L",), "e"), ((), "CB"),
                 (("CB",), "low"), (("low", "e"), "both"), (("both", "v"), "y")]  # fmt: skip
assert fused_and_not(its_chain, of_pair, ["y"]) == (0, 13), "section 3's pairs: none, thirteen"
print("section 3's chain: thirteen trips as operators, none as one kernel")

# %% [markdown]
# **5 · hard.** Write SSD as *one* kernel: a program for each head goes through the chunks in order
# and keeps the state to itself, so no state moves. Use `load`, `store`, `tile` and `steps_of`. A
# head may load $l\,(p + 2n + 1)$ numbers and $A$ once per chunk, and store $l\,p$. Start from a
# state of zeros. (This moves less than the three kernels. Why doesn't everyone do it? A GPU has
# over a hundred processors, and you have only $h$ programs per text.)


# %% tags=["exercise"]
def one_kernel(head, row=0):
    """Store y of one head."""
    ### BEGIN SOLUTION
    state, j = torch.zeros(N, P).double(), torch.arange(P)[None, :]
    for chunk in range(CHUNKS):
        t = chunk * q + torch.arange(q)
        mine, shared = (row * l + t) * h + head, (row * l + t) * g + head // (h // g)
        steps, since = steps_of(mine, t < l, head)
        X = steps[:, None] * tile("x", mine, p, t < l, P)
        K, Q = tile("B", shared, n, t < l, N), tile("C", shared, n, t < l, N)
        L = torch.where(t[:, None] >= t[None, :], (since[:, None] - since[None, :]).exp(), 0.0)
        y = ((Q @ K.T) * L) @ X + since.exp()[:, None] * (Q @ state)
        store("y", mine[:, None] * p + j, y, (t < l)[:, None] & (j < p))
        state = since[-1].exp() * state + K.T @ ((since[-1] - since).exp()[:, None] * X)
    ### END SOLUTION


# %% tags=["check"]
MEMORY["y"].zero_()
MOVED.clear()
for head in range(h):
    one_kernel(head)
check("one kernel = recurrence", stored("y"), ssd_recurrent(*GIVEN.values())[0])
most = h * (l * (p + 2 * n + 1) + CHUNKS)
assert MOVED["loads"] <= most, f"{MOVED['loads']} numbers loaded, {most} are enough"
assert MOVED["stores"] == h * l * p, f"{MOVED['stores']} numbers stored instead of {h * l * p}"
three = h * sum(numbers(l, n, p, q))
print(f"one kernel moves {MOVED.total():,} numbers, three move {three:,}")

# %% [markdown]
# ## Further reading
#
# - Williams, Waterman and Patterson (2009), *Roofline: An Insightful Visual Performance Model for
#   Multicore Architectures*.
# - Dao, Fu, Ermon, Rudra and Ré (2022), *FlashAttention*.
# - Dao and Gu (2024), *Transformers are SSMs*, section 6.
# - Tillet, Kung and Cox (2019), *Triton*.
# - Ivanov, Dryden, Ben-Nun, Li and Hoefler (2021), *Data Movement Is All You Need*.
