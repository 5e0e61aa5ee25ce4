# %% [markdown]
# # 05 · Inner-function attention and masks that learn
#
# **Attention decides what to read. This chapter asks what there is to be read, and who decides what
# may be.** When you are through you can
#
# - write attention as a weighted read, with its causal mask, its offset under a cache and its
#   padding, and check it against torch's fused operator;
# - say why computation belongs into the values rather than into queries and keys, and show a task
#   that attention over the states of SSD solves and neither solves alone;
# - retrieve values from a table by similarity, and count what that costs;
# - build two dynamic masks that learn, and see what each head hides after a short training;
# - settle by running them which of the published masks and tables can learn at all.
#
# Time: about 90 minutes. Assumes: chapters 03 and 04.
#
# Sources: *Wonderful Matrices* (WM) §3.2 and Listings 5–7; *Cheems* (Ch) §3.2 and Listing 3; for
# the content mask, the authors' later Doge models. The code that this notebook builds up to is
# `cheems_ref/attention.py`.

# %%
import json
import math
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F

from cheems_ref import attention, plotting, ssd
from cheems_ref.attention import (
    ContentMask,
    GateMask,
    InnerFuncAttn,
    QCAttn,
    RetrievedValues,
    attention_written_out,
    causal_mask,
)
from cheems_ref.verify import check, check_gradients, must_differ

torch.set_default_dtype(torch.float64)  # derivations first; float32 is for speed
torch.set_num_threads(1)  # tensors as small as these gain nothing from threads


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# %% tags=["versions", "nbval-ignore-output"]
print("PyTorch version", torch.__version__.partition("+")[0])

# %% [markdown]
# ## Why this matters
#
# Chapter 03 ended with a state of fixed size: cheap, and forgetful. Attention keeps everything and
# looks anything up, but what it looks up is poor: the value of a token is one linear map of that
# one token. *Inner-function attention* puts a computation where that linear map was. And a
# recurrence has something that attention lacks: it can decide to forget. The *dynamic mask* is the
# attempt to give attention that too.
#
# No public code has a working version of either. So we build both, and run the printed ones.
#
# ## 1 · Attention is a weighted read
#
# A token asks with a query $q_t$. Every token $s$ has a key $k_s$, by which it is found, and a
# value $v_s$, which it answers with. The read is an average of values, weighted by how well key and
# query agree:
#
# $$y_t = \sum_s w_{ts}\, v_s, \qquad
#   w_{ts} = \frac{e^{q_t \cdot k_s/\sqrt p}}{\sum_{r} e^{q_t \cdot k_r/\sqrt p}}. \tag{5.1}$$
#
# The weights of a row are positive and sum to one. In loops, for one head:

# %%
l, p = 6, 4
q, k, v = random(3, l, p, seed=0)

y = torch.zeros(l, p)
for t in range(l):
    e = torch.stack([torch.exp(q[t] @ k[s] / math.sqrt(p)) for s in range(l)])
    for s in range(l):
        y[t] += e[s] / e.sum() * v[s]

one_head = [u[None, :, None] for u in (q, k, v)]  # (b, l, h, p)
everyone = torch.ones(l, l, dtype=torch.bool)
by_formula = attention_written_out(*one_head, allowed=everyone)[0, :, 0]
check("written out = loops", by_formula, y)
check(
    "torch's fused operator = loops", attention.attention(*one_head, allowed=everyone)[0, :, 0], y
)
_ = must_differ(
    "without 1/√p",
    attention_written_out(2 * one_head[0], *one_head[1:], allowed=everyone)[0, :, 0],
    y,
)

# %% [markdown]
# Where does $1/\sqrt p$ come from? The inner product of two random vectors with entries of variance
# 1 has variance $p$. Undivided, wide heads would start with a softmax that sees one key only. (The
# equations of the papers leave the scale out, and the causal mask; their listings have the scale.)

# %%
for width in (4, 64, 1024):
    dot = (random(20_000, width, seed=1) * random(20_000, width, seed=2)).sum(-1)
    print(f"p = {width:5}: variance of q·k / p is {dot.var() / width:.1f}")

# %% [markdown]
# ## 2 · Who may be read: the static mask
#
# A language model must not read ahead. So key $s$ is *allowed* for query $t$ if $s \le t$. A key
# that is not allowed gets the score $-\infty$, **before** the softmax: then its weight is exactly
# zero and the others still sum to one.
#
# Under a cache the queries are only the newest tokens. Query 0 of the call is then not token 0, it
# is the first token after the cache, and may see all of it: an *offset* of $n_{keys} -
# n_{queries}$. And padding is never allowed.

# %%
real = torch.tensor([[False, False, True, True, True, True]])
masks = {
    "prompt: 6 queries, 6 keys": causal_mask(6, 6),
    "cache: 2 queries, 6 keys": causal_mask(2, 6),
    "two padding tokens in front": causal_mask(6, 6, real=real)[0, 0],
}
fig, axes = plotting.figure(1, 3, size=(12, 4.8))
for ax, (title, mask) in zip(axes, masks.items(), strict=True):
    plotting.heatmap(ax, mask.double(), title=title, signed=False, limit=1.4, colorbar=False)
    ax.set_xlabel("key s")
    ax.set_yticks(range(len(mask)))
axes[0].set_ylabel("query t of this call")
plotting.save(
    fig,
    "05_static_masks",
    "Three masks, dark where a query may look. A lower triangle for a prompt; two nearly full rows "
    "for two queries after a cache of four; a lower triangle without its first two columns for "
    "padding in front, where the two padding queries see only themselves.",
)

# %%
whole = attention.attention(*one_head)
check("no key after t", whole, attention_written_out(*one_head, allowed=causal_mask(l, l)))
last_two = attention.attention(one_head[0][:, 4:], one_head[1], one_head[2])
check("two queries after a cache = the last two rows", last_two, whole[:, 4:])

no_offset = torch.ones(2, l, dtype=torch.bool).tril()
wrong = attention_written_out(one_head[0][:, 4:], *one_head[1:], allowed=no_offset)
_ = must_differ("mask without the offset", wrong, whole[:, 4:])
print(
    "keys that one query after a cache of five sees, without the offset:", no_offset[0].sum().item()
)

# %% [markdown]
# (WM Listings 5 and 6 build the mask with `triu(1)`, without the offset. For a whole prompt it is
# right. In decoding, every new token sees key 0 and nothing else.)
#
# **A row with nothing left.** What may a padding token in front read? Everything before it is
# padding. A row of $-\infty$ is 0/0 in the softmax, and that NaN does not stay where it is: we will
# see it reach every gradient (§8). In the package such a row sees its own token. Its output means
# nothing, and harms nobody.
#
# ## 3 · Values that compute: V = SSD(x)
#
# Look at equation 5.1 again. Queries and keys only decide the *weights*; everything that arrives in
# $y_t$ comes through the values. With $v_s = W x_s$ a value knows one token. Whatever a token
# *means in its place*, the balance of an account after this booking, the scope a bracket opens, is
# not in it.
#
# > "Considering that $Q$ and $K$ need to perform inner product operations, more complex operations
# > may cause large fluctuations during training, so the heuristic should be applied to $V$." — Ch
# > §3.2
#
# Cheems takes $V = \mathrm{SSD}(x)$ (Ch eq. 8): the value of token $s$ is the output of a
# recurrence that has read everything up to $s$. Attention can then look up *a state of the past*.
# The layer, by hand from its parts and against the package:

# %%
_ = torch.manual_seed(0)
layer = InnerFuncAttn(16, n_heads=2, inner="ssd", d_state=8)
x, positions = random(1, 12, 16, seed=3), torch.arange(12)[None]

from cheems_ref.rope import apply_rope, rope_cos_sin

with torch.no_grad():
    cosine, sine = rope_cos_sin(positions, 8, dtype=torch.float64)
    q, k = (f(x).unflatten(-1, (2, 8)) for f in (layer.q_proj, layer.k_proj))
    q, k = apply_rope(q, cosine, sine), apply_rope(k, cosine, sine)
    values, _ = layer.inner(x, positions)  # an SSD layer
    y = attention_written_out(q, k, values.unflatten(-1, (2, 8)), allowed=causal_mask(12, 12))
    y = layer.out_proj(y.flatten(2))
    got, _ = layer(x, positions)
    check("InnerFuncAttn = attention over the outputs of SSD", got, y)
    plain = attention_written_out(q, k, x.unflatten(-1, (2, 8)), allowed=causal_mask(12, 12))
    _ = must_differ("values without the inner function", layer.out_proj(plain.flatten(2)), y)

# %% [markdown]
# **A task that needs both.** An account book. Each of 16 entries has a key (its booking number, in
# random order) and an amount, +1 or −1. Then come four questions: *what was the balance right after
# the booking number so-and-so?*
#
# - Attention alone finds the booking, but its value knows one amount, not the balance.
# - SSD alone can keep a running balance, but the questions come later, about any moment of the
#   past: one state would have to remember all 16 balances.
# - Attention over SSD looks the moment up, and finds the balance there.


# %%
def train_on_balances(kind, steps, seed=0, entries=16):
    """Train one layer to name past balances; the share of variance explained, every 50 steps."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    mixer = (
        ssd.SSD(32, n_heads=4, d_state=16)
        if kind == "ssd alone"
        else InnerFuncAttn(32, n_heads=4, inner=kind, d_state=16)
    )
    model = torch.nn.ModuleDict(
        {
            "number": torch.nn.Embedding(entries, 32),
            "amount": torch.nn.Embedding(3, 32),  # -1, +1, and "a question"
            "mixer": mixer,
            "head": torch.nn.Linear(32, 1),
        }
    ).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def predictions_and_balances(texts, questions=4):
        numbers = torch.rand(texts, entries, generator=generator).argsort(1)
        amounts = torch.randint(2, (texts, entries), generator=generator)
        balance = (2 * amounts - 1).cumsum(1).float()
        asked = torch.randint(entries, (texts, questions), generator=generator)
        x = torch.cat(
            [
                model["number"](numbers) + model["amount"](amounts),
                model["number"](asked) + model["amount"](torch.full_like(asked, 2)),
            ],
            dim=1,
        )
        y, _ = model["mixer"](x, torch.arange(x.shape[1]).expand(texts, -1))
        where = numbers.argsort(1).gather(1, asked)  # the place of each number in the book
        return model["head"](y[:, entries:])[..., 0], balance.gather(1, where)

    explained = []
    for step in range(1, steps + 1):
        predicted, balance = predictions_and_balances(32)
        optimizer.zero_grad()
        F.mse_loss(predicted, balance / 4).backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            with torch.no_grad():
                predicted, balance = predictions_and_balances(512)
            explained.append(1 - (F.mse_loss(4 * predicted, balance) / balance.var()).item())
    return explained


final = {kind: train_on_balances(kind, 500)[-1] for kind in ("ssd", "linear", "ssd alone")}
assert final["ssd"] > 0.85 and max(final["linear"], final["ssd alone"]) < 0.75
print("variance of past balances explained after 500 steps:")
print("attention over SSD: more than 85 %;  attention, or SSD, alone: less than 75 %")

# %%
record = json.loads(Path("../figures/records/05_balances.json").read_text())
fig, ax = plotting.figure(size=(9, 4.4))
names = {
    "ssd": "attention over SSD",
    "retrieved": "attention over retrieved values",
    "linear": "attention alone",
    "ssd alone": "SSD alone",
}
for (kind, curve), style in zip(record["explained"].items(), ("-", "--", ":", "-."), strict=True):
    ax.plot(record["steps"], curve, style, label=names[kind])
ax.axhline(1, color=plotting.QUIET, linewidth=0.8)
ax.set(xlabel="training step", ylabel="variance explained", ylim=(0, 1.05))
ax.legend(loc="lower right")
plotting.save(
    fig,
    "05_balances",
    "Share of the variance of past balances explained, against training steps, for four models. "
    "Attention over SSD climbs to nearly 1; attention alone, attention over retrieved values and "
    "SSD alone stay at two thirds together.",
)

# %% [markdown]
# (Drawn from a record, median of three seeds: `python book/records.py 05_balances`.) Two thirds can
# be had without knowing the past balance at all: neighbouring balances resemble one another, so a
# guess from the amounts around, or from the final balance, goes a long way. The last third needs
# the state *at* that moment.
#
# ## 4 · Values from a table
#
# WM replaces SSD by a cheaper inner function: a table of $n_v$ rows $e_j$ as wide as the token,
# from which every token retrieves a few by similarity, superimposes them and multiplies them, entry
# by entry, with itself:
#
# $$g_s = \frac{(W_q x_s)\,\theta_K^\top}{\sqrt m}, \qquad
#   v_s = x_s \circ \sum_{j \in \text{top-}k(g_s)} w_{sj}\, e_j, \qquad
#   w_s = \mathrm{softmax}\big(g_{sj}\big)_{j \in \text{top-}k}. \tag{5.2}$$
#
# The paper's text takes the rows unweighted. The weights $w_{sj}$ are our repair: without them
# there is no path for a gradient from the loss to the query or the keys, because an index has no
# derivative. In steps, for one head, and against the package:

# %%
_ = torch.manual_seed(0)
table = RetrievedValues(8, n_heads=1, n_values=6, k_values=2)
x = random(1, 5, 8, seed=4)
with torch.no_grad():
    values = []
    for token in x[0]:
        g = table.keys[0] @ (table.query_proj.weight @ token) / math.sqrt(4)  # 1. similarity
        best = g.argsort(descending=True)[:2]  # 2. the two most similar rows
        weight = torch.exp(g[best]) / torch.exp(g[best]).sum()  # 3. their weights
        row = weight[0] * table.values[0, best[0]] + weight[1] * table.values[0, best[1]]  # 4. sum
        values.append(token * row)  # 5. times the token
    check("five steps = RetrievedValues", table(x)[0], torch.stack(values))
    weights = table.weights(x)[0, :, 0]
check("weights sum to one", weights.sum(-1), torch.ones(5))
print("rows that each token uses:", [w.nonzero().flatten().tolist() for w in weights])

# %% [markdown]
# What is it worth? Per token a diagonal matrix, chosen from the span of the table, instead of one
# full matrix for all. In parameters, for width $d = 512$, 8 heads and 64 rows per head:

# %%
counts = {}
for name, module in {
    "linear: V = W x": torch.nn.Linear(512, 512, bias=False),
    "retrieved: query, keys, table": RetrievedValues(512, n_heads=8, n_values=64, k_values=2),
    "ssd: V = SSD(x), 64 states": ssd.SSD(512, n_heads=8, d_state=64),
}.items():
    counts[name] = sum(parameter.numel() for parameter in module.parameters())
    print(f"{name:32} {counts[name]:9,} parameters")

# %% [markdown]
# (The query is half as wide as the token, as in WM Table 6.) What a table can do that a matrix
# cannot: treat different kinds of tokens differently. Let there be two kinds, told apart by the
# sign of the first entry, and let the right value be $x \circ r_0$ for one kind and $x \circ r_1$
# for the other.


# %%
def train_on_two_kinds(function, steps, seed):
    """Fit V(x) = x ∘ r_kind(x); the share of variance left unexplained."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    right = torch.randn(2, 8, generator=generator)
    optimizer = torch.optim.Adam(function.parameters(), lr=2e-2)
    for _ in range(steps):
        x = torch.randn(1, 64, 8, generator=generator)
        target = x * right[(x[..., 0] > 0).long()]
        optimizer.zero_grad()
        loss = F.mse_loss(function(x), target)
        loss.backward()
        optimizer.step()
    return (loss / target.var()).item()


def fresh_table(seed):
    torch.manual_seed(seed)
    return RetrievedValues(8, n_heads=1, n_values=2, k_values=2)


left = [train_on_two_kinds(fresh_table(seed), 600, seed) for seed in range(5)]
matrix = [train_on_two_kinds(torch.nn.Linear(8, 8), 600, seed) for seed in range(5)]
assert all(by_table < by_matrix for by_table, by_matrix in zip(left, matrix, strict=True))
assert statistics.median(left) < 0.05 < 0.2 < statistics.median(matrix)
print("two kinds of tokens, median of 5 seeds, variance left unexplained:")
print("by a table of two rows under 5 %, by a matrix over 20 %")

# %% [markdown]
# ### As printed: the table that is not used (WM Listing 7)
#
# The listing starts its keys at zero, takes `topk(1)` of the scores, and uses the index alone. So
# all scores are 0, every token gets the same row (which one is up to torch's sorting), and neither
# keys nor queries ever get a gradient to change it. The table is also created with `n_heads` rows
# where `n_v` are meant: with fewer heads than values, an index can point past its end.


# %%
class TableAsPrinted(torch.nn.Module):
    """The inner function of WM Listing 7: hard top-1 of keys that start at zero."""

    def __init__(self, d_model, n_values, rows):
        super().__init__()
        self.queries = torch.nn.Linear(d_model, 4)
        self.keys = torch.nn.Parameter(torch.zeros(n_values, 4))
        self.table = torch.nn.Embedding(rows, d_model)

    def forward(self, x):
        self.chosen = (self.queries(x) @ self.keys.T).topk(1, dim=-1).indices
        return x * self.table(self.chosen).sum(dim=-2)


_ = torch.manual_seed(0)
printed = TableAsPrinted(8, n_values=16, rows=16)
printed(random(1, 200, 8, seed=5)).square().sum().backward()
assert printed.chosen.unique().numel() == 1
assert printed.queries.weight.grad is None and printed.keys.grad is None
trained_rows = int((printed.table.weight.grad.abs().sum(-1) > 0).sum())
print(
    "200 tokens use 1 row; gradients of queries and keys: none; rows that learn:",
    trained_rows,
    "of 16",
)

used, unexplained = 0, []
for seed in range(5):
    torch.manual_seed(seed)
    printed = TableAsPrinted(8, n_values=2, rows=2)
    unexplained.append(train_on_two_kinds(printed, 600, seed))
    used += printed.chosen.unique().numel() == 2
assert used == 0 and statistics.median(unexplained) > 0.2
print("two kinds of tokens, 5 seeds: both rows in use in none, over 20 % left")

# 32 values, table of 8 rows, keys no longer zero: the index runs off the table
printed = TableAsPrinted(8, n_values=32, rows=8)
printed.keys.data.normal_(generator=torch.Generator().manual_seed(6))
try:
    printed(random(1, 200, 8, seed=5))
except IndexError:
    print("n_heads rows for n_v values: index out of range")

# %% [markdown]
# > "[…] all the weights of the values are shared rows, avoiding the problem of insufficient
# > training caused by the sparse structure." — WM §3.2
#
# As printed it is the other way round: one row is trained, and the rest never.
#
# ## 5 · Masks that learn
#
# The static mask knows who *may* be read. SSD also knows who *should*: with a large step
# $\Delta_t$ a token wipes the state, and everything before it is gone, for all later readers. What
# would be the like for attention? A *bias* on the scores: $\log$ of the share of each key that is
# left,
#
# $$w_{ts} \propto e^{q_t \cdot k_s/\sqrt p + \beta_s}, \qquad \beta_s \le 0. \tag{5.3}$$
#
# At $\beta_s = 0$ the key is as it was; at $-\infty$ it is masked. It is added **before** the
# softmax, so the weights still sum to one, causality stays, and $\beta$ has a gradient. Two ways to
# make it:
#
# | | $\beta_s$ | knows | as in |
# |---|---|---|---|
# | `GateMask` | $\log \sigma(\ell_{h, \text{pos}(s)})$, a table | the place, per head | WM eq. 4 |
# | `ContentMask` | $A\,\mathrm{softplus}(w \cdot v_s + c)$, $A < 0$ | what the key holds | Doge |
# | SSD, for comparison | $\sum_{r = s+1}^{t} A\Delta_r$ | all that came between | chapter 03 |
#
# The content mask has the form of SSD's $A\Delta$. But there a token forgets *all others before
# it*; here it says something about *itself*: "do not read me".

# %%
_ = torch.manual_seed(1)
l = 16
v = random(1, l, 1, 8, seed=7)
gate, content = GateMask(1, max_positions=l), ContentMask(8, 1)
gate.logit.data = 3 * random(1, l, seed=8)
content.dt_proj.weight.data *= 8
content.A_log.data += 1
with torch.no_grad():
    shares = {
        "gate: by place": gate(v, torch.arange(l)[None])[0, 0].exp().expand(l, l),
        "content: by key": content(v, torch.arange(l)[None])[0, 0].exp().expand(l, l),
    }
    steps = F.softplus(random(l, seed=9) - 1.5)
shares["SSD: by what came between"] = torch.exp(
    -(steps.cumsum(0)[:, None] - steps.cumsum(0)).clamp(min=0)
)
fig, axes = plotting.figure(1, 3, size=(12, 4.4))
for ax, (title, share) in zip(axes, shares.items(), strict=True):
    seen = share.masked_fill(~causal_mask(l, l), math.nan)
    plotting.heatmap(ax, seen, title=title, signed=False, limit=1.0, colorbar=False)
    ax.set_xlabel("key s")
axes[0].set_ylabel("query t")
plotting.save(
    fig,
    "05_shares",
    "Share of each key that is left, for every query and key below the diagonal. Gate and content "
    "mask give columns of one colour: a key is hidden or not, for all readers alike. SSD gives "
    "rows that fade to the left: the share shrinks with every step in between.",
)

# %% [markdown]
# The bias against its definition, and its gradient against the formula written out:

# %%
h, s = 3, 10
q, k, v = (random(2, s, h, 4, seed=10 + i) for i in range(3))
mask = ContentMask(h * 4, h)
bias = mask(v, torch.arange(s).expand(2, -1))
dt = torch.log1p(torch.exp(mask.dt_proj(v.flatten(2)) + mask.dt_bias))
check("content bias = A softplus(w·v + c)", bias, (-mask.A_log.exp() * dt).mT.detach() + 0 * bias)

gates = torch.sigmoid(random(2, h, s, seed=14))
allowed = causal_mask(s, s)
fused = attention.attention(q, k, v, bias=gates.log())
scores = torch.einsum("bthp,bshp->bhts", q, k) / 2
share = torch.exp(scores) * gates[:, :, None] * allowed
by_shares = torch.einsum("bhts,bshp->bthp", share / share.sum(-1, keepdim=True), v)
check("adding log(gate) = multiplying e^score by the gate", fused, by_shares)
check_gradients(
    "fused operator = formula, with a bias",
    lambda q, k, v, g: attention.attention(q, k, v, bias=g.log()),
    lambda q, k, v, g: attention_written_out(q, k, v, allowed=allowed, bias=g.log()),
    (q, k, v, gates),
)
after = torch.einsum(
    "bhts,bshp->bthp", scores.masked_fill(~allowed, -math.inf).softmax(-1) * gates[:, :, None], v
)
_ = must_differ("gates after the softmax: weights no longer sum to one", after, fused)

# %% [markdown]
# ### Does it learn? Decoys at fixed places
#
# An associative memory with a trap. Each of 8 keys is stored twice among 16 slots: once with the
# right value, once as a decoy with a random one. Which slots are decoys is the same in all texts,
# and nothing in the tokens tells. Then every key is asked for. Reading both and guessing gives a
# little over one half. A model that learns to close the eight decoy slots gets all.


# %%
class GateAsPrinted(torch.nn.Module):
    """WM eq. 4 and Listing 6: ones, rounded; a key is masked where its entry is exactly 0."""

    def __init__(self, n_heads, max_positions):
        super().__init__()
        self.gate = torch.nn.Parameter(torch.ones(n_heads, max_positions))

    def forward(self, v, position_ids):
        gate = self.gate.round()[:, position_ids].transpose(0, 1)
        return torch.zeros_like(gate).masked_fill(gate == 0, -math.inf)

    def keeps(self, bias, allowed):
        return None


def train_on_decoys(kind, steps, seed=0, pairs=8):
    """Train one attention layer on the memory with decoys: accuracy, and the layer."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    length = 3 * pairs  # 2 × pairs slots, then the questions
    options = dict(mask="gate", max_positions=length, round=kind == "rounded")
    layer = QCAttn(32, n_heads=4, **(options if kind in ("gate", "rounded") else {}))
    if kind == "printed":
        layer.mask = GateAsPrinted(4, length)
    model = torch.nn.ModuleDict(
        {
            "key": torch.nn.Embedding(pairs, 32),
            "value": torch.nn.Embedding(pairs + 1, 32),  # the last one: "a question"
            "layer": layer,
            "head": torch.nn.Linear(32, pairs, bias=False),
        }
    ).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def logits_and_answers(texts):
        keys = torch.rand(3, texts, pairs, generator=generator).argsort(-1)
        values = torch.randint(pairs, (2, texts, pairs), generator=generator)
        # even slots hold the right pairs, odd slots the decoys
        slots = torch.stack([keys[0], keys[1]], dim=-1).flatten(1)
        stored = torch.stack([values[0], values[1]], dim=-1).flatten(1)
        asked = torch.cat([slots, keys[2]], dim=1)
        held = torch.cat([stored, torch.full_like(keys[2], pairs)], dim=1)
        x = model["key"](asked) + model["value"](held)
        y, _ = model["layer"](x, torch.arange(length).expand(texts, -1))
        answers = values[0].gather(1, keys[0].argsort(1).gather(1, keys[2]))
        return model["head"](y[:, 2 * pairs :]), answers

    for _ in range(steps):
        logits, answers = logits_and_answers(32)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        optimizer.step()
    with torch.no_grad():
        logits, answers = logits_and_answers(256)
    return (logits.argmax(-1) == answers).float().mean().item(), layer


results = {kind: train_on_decoys(kind, 200) for kind in ("none", "printed", "gate", "rounded")}
accuracy = {kind: result[0] for kind, result in results.items()}
assert max(accuracy["none"], accuracy["printed"]) < 0.9
assert min(accuracy["gate"], accuracy["rounded"]) > 0.97
print("8 keys with decoys after 200 steps: no mask and printed mask under 90 %, ours over 97 %")

gates = results["gate"][1].mask.logit.sigmoid()
right, decoy = gates[:, 0:16:2], gates[:, 1:16:2]
assert right.min() > decoy.max()
print("trained gates: every right slot is more open than every decoy, in every head")

# %% [markdown]
# And the printed one? It has no gradient, so it does not move: not slowly, not at all. Here are its
# 2,000 steps of AdamW with weight decay, as a mask on a fixed attention layer that is asked to
# ignore position 3:

# %%
printed = GateAsPrinted(2, 8)
q, k, v = (random(4, 8, 2, 4, seed=20 + i) for i in range(3))
ids = torch.arange(8).expand(4, -1)
allowed = causal_mask(8, 8)
wanted = attention_written_out(
    q, k, v, allowed=allowed & (torch.arange(8) != 3) | torch.eye(8, dtype=bool)
)
output = attention_written_out(q, k, v, allowed=allowed, bias=printed(v, ids))
assert not output.requires_grad  # the loss has nothing to differentiate

ours = GateMask(2, 8)
v_scale = torch.nn.Parameter(torch.ones(()))  # so that there is a loss to call backward on
optimizers = [
    torch.optim.AdamW([*mask.parameters(), v_scale], lr=3e-2, weight_decay=1e-2)
    for mask in (printed, ours)
]
for mask, optimizer, steps in zip((printed, ours), optimizers, (2000, 300), strict=True):
    for _ in range(steps):
        y = attention_written_out(q, k, v * v_scale, allowed=allowed, bias=mask(v, ids))
        optimizer.zero_grad()
        F.mse_loss(y, wanted).backward()
        optimizer.step()
moved = (printed.gate - 1).abs().max().item()
assert moved == 0 and printed.gate.grad is None
assert ours.logit.sigmoid()[:, 3].max() < 0.2
print(f"printed mask after 2,000 steps: moved by {moved:g};  ours after 300: position 3 is closed")

# %%
record = json.loads(Path("../figures/records/05_masks.json").read_text())
fig, axes = plotting.figure(2, 1, size=(12, 6.2))
for ax, name, title in zip(
    axes, ("printed", "gate"), ("as printed: 200 steps", "trainable gates: 200 steps"), strict=True
):
    plotting.heatmap(ax, torch.tensor(record["gates"][name]), title=title, signed=False, limit=1.0)
    ax.set_aspect("auto")
    ax.set_ylabel("head")
    ax.set_yticks(range(4))
    ax.set_xticks(range(24), [*(["right", "decoy"] * 8), *(["?"] * 8)], rotation=90, fontsize=9)
plotting.save(
    fig,
    "05_gates",
    "Gates of four heads over 24 positions after training on decoys. As printed: one flat colour, "
    "all gates 1. Trainable: the eight decoy slots are clearly paler than the right slots between "
    "them, in every head.",
)

# %% [markdown]
# (From a record, `python book/records.py 05_masks`; the live cell above asserts the same.) As
# printed, then, attention with the dynamic mask *is* attention without it, at the start and for
# ever; WM Table 1 reports 8.12 and 7.96 for the two.
#
# **Rounding.** The paper rounds its gates to 0 and 1. That can be had: use the rounded gate in the
# forward pass and the gradient of the soft one in the backward pass (*straight through*). A closed
# gate can then open again:

# %%
layer = QCAttn(8, n_heads=2, mask="gate", max_positions=6, round=True)
layer.mask.logit.data = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0, 2.0]]).repeat(2, 1)
x, positions = random(1, 6, 8, seed=30), torch.arange(6)[None]
y, cache = layer(x, positions)
kept = causal_mask(6, 6) & torch.tensor([True, False, True, False, True, True])
cosine, sine = rope_cos_sin(positions, 4, dtype=torch.float64)
q = apply_rope(layer.q_proj(x).unflatten(-1, (2, 4)), cosine, sine)
hard = attention_written_out(q, cache.k, cache.v, allowed=kept)
check("rounded gates: keys 1 and 3 are gone", y, layer.out_proj(hard.flatten(2)))
y.square().sum().backward()
assert (layer.mask.logit.grad[:, 1] != 0).all()
print("and the closed gates have a gradient")

# %% [markdown]
# ### By content: a token that says "do not read me"
#
# Now the decoys stand anywhere, and the token itself tells: a mark *stale* or *fresh*. A gate per
# position is useless here. The content mask reads the mark from the value. To be fair: ordinary
# attention solves this task as well, since query and key can carry the mark too. What the mask adds
# is that it is known *before any query is there* who need not be read. So keys can be left out:
# each query keeps the $n$ keys of the smallest penalty and drops the rest.


# %%
def train_on_marks(steps, seed=0, pairs=8):
    """Train a content mask on marked decoys: accuracy by kept keys, share left by kind."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    slots, length = 2 * pairs, 3 * pairs
    model = torch.nn.ModuleDict(
        {
            "key": torch.nn.Embedding(pairs, 32),
            "value": torch.nn.Embedding(pairs + 1, 32),
            "mark": torch.nn.Embedding(3, 32),  # fresh, stale, a question
            "layer": QCAttn(32, n_heads=4, mask="content"),
            "head": torch.nn.Linear(32, pairs, bias=False),
        }
    ).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    mask = model["layer"].mask

    def run(texts):
        order = torch.rand(texts, slots, generator=generator).argsort(1)
        keys = torch.rand(2, texts, pairs, generator=generator).argsort(-1)
        keys = torch.cat([*keys], dim=1).gather(1, order)
        stale = order >= pairs
        values = torch.randint(pairs, (texts, slots), generator=generator)
        asked = torch.rand(texts, pairs, generator=generator).argsort(1)
        fresh_keys, fresh_values = (u[~stale].view(texts, pairs) for u in (keys, values))
        answers = fresh_values.gather(1, fresh_keys.argsort(1).gather(1, asked))
        marks = torch.cat([stale.long(), torch.full_like(asked, 2)], dim=1)
        x = model["key"](torch.cat([keys, asked], dim=1)) + model["mark"](marks)
        x = x + model["value"](torch.cat([values, torch.full_like(asked, pairs)], dim=1))
        y, cache = model["layer"](x, torch.arange(length).expand(texts, -1))
        return model["head"](y[:, slots:]), answers, cache, marks

    for _ in range(steps):
        logits, answers, _, _ = run(32)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        optimizer.step()

    accuracy = {}
    with torch.no_grad():
        _, _, cache, marks = run(64)
        share = mask(cache.v, cache.position_ids).exp().mT  # (b, s, h)
        by_kind = [share[marks == kind].mean(0).tolist() for kind in range(3)]
        for keep in (1, 2, 4, 6, 8, 10, 12, 16, 24):
            mask.keep = keep
            logits, answers, _, _ = run(256)
            accuracy[keep] = (logits.argmax(-1) == answers).float().mean().item()
        mask.keep = None
        sample = mask(cache.v, cache.position_ids)[0].exp().tolist(), marks[0].tolist()
    return accuracy, by_kind, sample


accuracy, by_kind, _ = train_on_marks(200)
fresh, stale, _ = torch.tensor(by_kind)  # share left of a key, per head
assert (stale / fresh).min() < 0.5
assert accuracy[24] > 0.97 and accuracy[16] > 0.9 and accuracy[2] < 0.6
print("a head hides stale keys: it leaves of them less than half of what it leaves of fresh ones")
print("answers right: over 90 % keeping 16 of 24 keys per query, under 60 % keeping 2")

# %%
content = record["content"]
kinds = [("fresh", "stale", "?")[mark] for mark in content["marks"]]
fig, axes = plotting.figure(1, 2, size=(12, 4.2))
plotting.heatmap(
    axes[0], torch.tensor(content["share"]), title="share of each key left", signed=False, limit=1.0
)
axes[0].set_aspect("auto")
axes[0].set_ylabel("head")
axes[0].set_yticks(range(4))
axes[0].set_xticks(range(24), kinds, rotation=90, fontsize=9)
kept = [int(n) for n in content["accuracy"]]
axes[1].plot(kept, list(content["accuracy"].values()), marker="o")
axes[1].axvline(8, color=plotting.QUIET, linestyle=":", linewidth=1)
axes[1].text(8.3, 0.12, "8 keys hold what is asked for", color=plotting.QUIET, fontsize=12)
axes[1].set(xlabel="keys kept per query, of 24", ylabel="answers right", ylim=(0, 1.05))
plotting.save(
    fig,
    "05_content",
    "Left: share of each key left in one text of 24 tokens for four heads. The columns of stale "
    "keys are nearly white in two heads and pale in the other two; those of fresh keys are dark; "
    "those of questions in between. Right: answers right against the number of keys kept per "
    "query: above 0.9 from 8 keys on, 0.2 with one.",
)

# %% [markdown]
# (From the record of `05_masks`.) Every head masks in its own way: here two hide the stale tokens
# nearly completely, two in part, and all of them the questions a little, which nobody asks for.
# With 8 keys left of 24, chosen by the penalty, nine answers of ten are right; 8 keys drawn at
# random would hold a third of them. Which head does how much changes from seed to seed.
#
# ## 6 · All combinations, one contract
#
# Three inner functions, and with the two options of the masks five kinds of masks. For each of the
# 15 the same must hold: nothing reaches back in time, padding changes nothing, a prompt in pieces
# equals one pass, and every parameter receives a gradient.

# %%
MASKS = {
    "causal": {},
    "gate": dict(mask="gate", max_positions=32),
    "gate, rounded": dict(mask="gate", max_positions=32, round=True),
    "content": dict(mask="content"),
    "content, 3 kept": dict(mask="content", keep=3),
}
x, positions = random(2, 11, 16, seed=40), torch.arange(11).expand(2, -1)
padding = torch.tensor([[c == "#" for c in row] for row in ("...########", "#####...###")])
counted = (padding.cumsum(1) - 1).clamp(min=0)

for inner in ("ssd", "retrieved", "linear"):
    for name, options in MASKS.items():
        _ = torch.manual_seed(0)
        layer = InnerFuncAttn(16, n_heads=4, inner=inner, d_state=6, **options)
        if "gate" in name:
            layer.mask.logit.data = random(4, 32, seed=41)
        y, _ = layer(x, positions)

        future = x.clone()
        future[:, 7] += 1
        moved, _ = layer(future, positions)
        assert (moved[:, :7] - y[:, :7]).abs().max() < 1e-12, "nothing reaches back"
        assert (moved[:, 7] - y[:, 7]).abs().max() > 1e-3

        start, cache = layer(x[:, :6], positions[:, :6])
        step, cache = layer(x[:, 6:7], positions[:, 6:7], cache=cache)
        rest, _ = layer(x[:, 7:], positions[:, 7:], cache=cache)
        assert (torch.cat([start, step, rest], 1) - y).abs().max() < 1e-10, "pieces = one pass"

        junk = x.masked_fill(~padding[..., None], math.nan)
        padded, _ = layer(junk, counted, padding_mask=padding)
        for row in range(2):
            alone, _ = layer(
                x[row : row + 1, padding[row]], positions[:1, : int(padding[row].sum())]
            )
            assert (padded[row, padding[row]] - alone[0]).abs().max() < 1e-10, "padding is not read"

        y.square().sum().backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        assert all(g.isfinite().all() and g.any() for g in gradients), "every parameter learns"
print("15 combinations: causal, padding unread, pieces = one pass, every parameter learns")

# %% [markdown]
# One thing distinguishes the gate: it knows absolute places. All other combinations are left
# unchanged when a text is moved, as chapter 04 has it.

# %%
for inner in ("ssd", "retrieved", "linear"):
    layer = InnerFuncAttn(16, n_heads=4, inner=inner, d_state=6, mask="content")
    with torch.no_grad():
        check(
            f"{inner}, content mask: moved by 1,000",
            layer(x, positions + 1000)[0],
            layer(x, positions)[0],
        )
layer = InnerFuncAttn(16, n_heads=4, inner="linear", mask="gate", max_positions=32)
layer.mask.logit.data = random(4, 32, seed=41)
with torch.no_grad():
    _ = must_differ("gate: moved by 10", layer(x, positions + 10)[0], layer(x, positions)[0])

# %% [markdown]
# ## 7 · What it costs
#
# Per token and head, attention keeps a key and a value and reads them all, whatever the inner
# function is. `"ssd"` adds a state of fixed size, and its own projections; `"retrieved"` adds the
# scores against $n_v$ keys. In numbers kept per token at $d = 512$, 8 heads, after 1,024 tokens:

# %%
for inner in ("linear", "retrieved", "ssd"):
    layer = InnerFuncAttn(512, n_heads=8, inner=inner).float()
    with torch.no_grad():
        _, cache = layer(torch.zeros(1, 1024, 512, dtype=torch.float32), torch.arange(1024)[None])
    per_token = (cache.k.numel() + cache.v.numel()) // 1024
    state = 0 if cache.inner is None else cache.inner.state.numel()
    print(f"{inner:9}  {per_token} numbers per token, and {state:6,} once")

# %% [markdown]
# The time per decoded token against ordinary attention is measured by `make bench`. The paper
# speaks of about 4 % more for its version.
#
# ## 8 · As printed
#
# Two of the published forms were run above: the table that is not used (§4) and the mask that does
# not move (§5). Five more.
#
# ### The mask on the wrong side of the softmax (WM §3.2, formulas after eq. 4)
#
# > $L = \mathrm{dynamic\_mask}(l)$, $M = L \circ A$, $y = M \cdot V$ — WM §3.2
#
# with $A$ the softmax of *all* scores. With $L$ of Listing 6, whose entries are 0 and $-\infty$,
# what is allowed becomes 0 and what is forbidden $-\infty$ or NaN. With $L$ of zeros and ones it
# looks right and is not causal: the softmax has already divided by the keys of the future.

# %%
q, k, v = random(3, 6, 4, seed=50)
A = (q @ k.T / 2).softmax(-1)
L = torch.full((6, 6), -math.inf).triu(1)
read = (L * A) @ v
allowed_entries = (L * A)[torch.ones(6, 6).tril().bool()]
assert (allowed_entries == 0).all() and not read[:-1].isfinite().any()
print(
    "L of 0 and -∞: every allowed weight is 0,",
    int((~read.isfinite()).sum()),
    "of 24 outputs are not finite",
)


def zero_one(k):
    return ((q @ k.T / 2).softmax(-1) * torch.ones(6, 6).tril()) @ v


future = k.clone()
future[5] += 1
assert (zero_one(future) - zero_one(k))[:5].abs().min(dim=0).values.max() > 1e-3
_ = must_differ("L of 0 and 1: key 5 moved, outputs 0 to 4", zero_one(future)[:5], zero_one(k)[:5])
one = [u[None, :, None] for u in (q, k, v)]
kept = attention.attention(one[0], future[None, :, None], one[2])[0, :5, 0]
check("mask before the softmax: outputs 0 to 4 stay", kept, attention.attention(*one)[0, :5, 0])

# %% [markdown]
# ### Rows of −∞ (WM Listings 5 and 6)
#
# With padding in front, the first rows have nothing to attend to. The listings leave $-\infty$ all
# along such a row, and the softmax makes it NaN. The loss does not look at padding, so it stays
# finite. The gradients do not: the derivative of the NaN row is multiplied with 0, and 0 · NaN is
# NaN.


# %%
def masked_as_printed(padding, gate=None):
    """WM Listings 5 and 6: -∞ where the causal part is, and where padding times gate is 0."""
    l = padding.shape[1]
    causal = torch.full((l, l), -math.inf).triu(1)[None, None]
    weight = padding[:, None, None, :].double()
    if gate is not None:
        weight = weight * gate[None, :, None, :l]
    total = causal + weight
    return causal.expand_as(total).masked_fill(total == 0, -math.inf)


padding = torch.tensor([[False, False, True, True, True, True]])
x, W = random(6, 4, seed=51).requires_grad_(), random(4, 4, seed=52).requires_grad_()
weights = (x @ x.T / 2 + masked_as_printed(padding)[0, 0]).softmax(-1)
loss = (weights @ x @ W)[2:].square().sum()
loss.backward()
assert loss.isfinite()
print("loss over the real tokens: finite")
for name, parameter in (("x", x), ("W", W)):
    print(f"gradient of {name}: {int(parameter.grad.isnan().sum())} of {parameter.numel()} are NaN")

x.grad = W.grad = None
ours = attention_written_out(
    *(u[None, :, None] for u in (x, x, x @ W)), allowed=causal_mask(6, 6, real=padding)
)
loss_ours = ours[0, 2:, 0].square().sum()
loss_ours.backward()
assert x.grad.isfinite().all() and W.grad.isfinite().all()
check("a row that sees itself: the same loss, finite gradients", loss_ours, loss)

# %% [markdown]
# The same happens without any padding as soon as the gate of position 0 is shut: query 0 has only
# itself. In the package a rounded gate leaves it its own token.
#
# ### A mask of the other convention (WM Listings 5 and 6)
#
# Half of the world writes masks as 1 for *keep* and 0 for *drop*, the other half adds 0 for *keep*
# and $-\infty$ for *drop*. The listings take the first and test for exactly 0. Handed the second
# they do not complain: the real tokens are masked and the padding is read.

# %%
additive = torch.tensor([[-math.inf, -math.inf, 0.0, 0.0, 0.0, 0.0]])
causal = torch.full((6, 6), -math.inf).triu(1)
total = causal + additive
inverted = causal.masked_fill(total == 0, -math.inf)
print("keys that query 5 may read, as printed:", (inverted[5] == 0).nonzero().flatten().tolist())
print("real tokens: [2, 3, 4, 5]")

# %% [markdown]
# Here the mask is boolean, and anything else is refused:

# %% tags=["raises-exception"]
layer = QCAttn(8, n_heads=2)
layer(random(1, 6, 8, seed=53), torch.arange(6)[None], padding_mask=torch.ones(1, 6))

# %% [markdown]
# ### A gate that follows the column, not the token (WM Listing 6)
#
# The listing applies entry $j$ of the gate to *column* $j$. With two padding tokens in front, the
# first real token stands in column 2: it is met by another gate than without padding, and the
# answer depends on how the batch was padded. Texts longer than the table end in an error of shapes.
# Ours goes by position, which counts real tokens, and says where its table ends.

# %%
gate = torch.ones(1, 8)
gate[0, 1] = 0.0
unpadded = masked_as_printed(torch.ones(1, 4, dtype=torch.bool), gate)[0, 0]
padded = masked_as_printed(padding, gate)[0, 0, 2:, 2:]
for name, mask in (("alone", unpadded), ("with padding in front", padded)):
    print(
        "keys that the last of four tokens reads,",
        name,
        (mask[3] == 0).nonzero().flatten().tolist(),
    )

# %% [markdown]
# ### Padding in the state of SSD (Ch Listing 2, WM Listings 3 and 4)
#
# The SSD listings take no padding mask. Attention that masks its keys does not help when the
# *values* are states that have read the padding. Here with correct positions, as share of the
# output that changes:

# %%
_ = torch.manual_seed(0)
layer = InnerFuncAttn(16, n_heads=2, inner="ssd", d_state=8)
_ = layer.inner.D.data.zero_()
x = random(1, 12, 16, seed=54)
for pads in (1, 4):
    junk = torch.cat([random(1, pads, 16, seed=55), x], dim=1)
    mask = torch.arange(12 + pads)[None] >= pads
    ids = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        clean, _ = layer.inner(x, torch.arange(12)[None])
        ignored, _ = layer.inner(junk, ids, padding_mask=mask)
        read, _ = layer.inner(junk, ids)  # as the listings: padding is a token like any other
    check(f"{pads} padding tokens, masked: same values", ignored[:, pads:], clean)
    share = (read[:, pads:] - clean).norm() / clean.norm()
    assert share > 0.02
    print(f"{pads} padding tokens, read: {share:.1g} of the values is wrong")

# %% [markdown]
# ## Summary
#
# - Attention is a weighted read. Queries and keys make the weights; what can be read is in the
#   values.
# - With $V = \mathrm{SSD}(x)$ the values are states of the past, and looking one of them up solves
#   what neither part solves alone.
# - A table of values, retrieved by similarity, treats kinds of tokens differently. It learns if the
#   rows are weighted by their scores.
# - A mask that learns is a bias before the softmax. By place it is a gate; by content it is SSD's
#   $A\Delta$ said by the key about itself, and it allows leaving keys out.
# - No index, no comparison with 0 and no rounding has a gradient. Ask of every module: does every
#   parameter receive one?
#
# | as printed | what it does when run | the repair |
# |---|---|---|
# | mask times softmax (after WM eq. 4) | not finite, or not causal | bias before the softmax |
# | `triu(1)` under a cache (Listings 5, 6) | decoding sees key 0 only | an offset |
# | dynamic mask, `== 0` (eq. 4, Listing 6) | no gradient: moves by exactly 0 | log-gate |
# | gate by column (Listing 6) | depends on the padding | gate by position |
# | top-1 of zero keys (Listing 7) | one row for all tokens, for ever | random keys, weights |
# | `Embedding(n_heads, …)` (Listing 7) | index out of range | $n_v$ rows |
# | rows of −∞ (Listings 5, 6) | every gradient NaN | such a row sees itself |
# | 0/1 masks unchecked (Listings 5, 6) | the other convention is inverted | boolean, or refused |
# | SSD without a padding mask | padding enters the values | $\Delta = 0$ at padding |
#
# ## Exercises
#
# **1.** Average reading. For which queries is attention over all keys the plain mean of the values?
# Write `q` such that `attention_written_out` returns the mean for any keys.


# %% tags=["exercise"]
def indifferent(k):
    """Queries (b, t, h, p), as many as keys k (b, s, h, p)."""
    ### BEGIN SOLUTION
    return torch.zeros_like(k)  # all scores equal
    ### END SOLUTION


# %% tags=["check"]
k, v = random(2, 1, 7, 2, 4, seed=60)
everyone = torch.ones(7, 7, dtype=torch.bool)
mean = v.mean(1, keepdim=True).expand_as(v)
check("indifferent = mean", attention_written_out(indifferent(k), k, v, allowed=everyone), mean)

# %% [markdown]
# **2.** A sliding window: each query sees itself and the `w - 1` tokens before it, also under a
# cache.


# %% tags=["exercise"]
def window_mask(n_queries, n_keys, w):
    """(t, s), boolean, on top of the offset of `causal_mask`."""
    ### BEGIN SOLUTION
    offset = n_keys - n_queries
    distance = torch.arange(n_queries)[:, None] + offset - torch.arange(n_keys)
    return (distance >= 0) & (distance < w)
    ### END SOLUTION


# %% tags=["check"]
assert torch.equal(window_mask(5, 5, 99), causal_mask(5, 5))
assert window_mask(5, 5, 2).sum(1).tolist() == [1, 2, 2, 2, 2]
assert torch.equal(window_mask(1, 9, 3), torch.arange(9)[None] >= 6)

# %% [markdown]
# **3.** *ALiBi* adds $-m\,(t - s)$ to the scores, a penalty that grows with distance. Which of the
# three rows of the table in §5 is it a special case of? Write it as $\beta_{ts}$ from a step size.


# %% tags=["exercise"]
def alibi(l, slope):
    """The bias (l, l) from SSD's A Σ Δ: choose A and a constant Δ."""
    ### BEGIN SOLUTION
    A, dt = -slope, torch.ones(l)
    total = (A * dt).cumsum(0)
    return total[:, None] - total  # the sum over the steps in between
    ### END SOLUTION


# %% tags=["check"]
distance = torch.arange(6.0)[:, None] - torch.arange(6.0)
check("ALiBi = SSD's decay with constant steps", alibi(6, 0.25).tril(), (-0.25 * distance).tril())

# %% [markdown]
# **4.** The straight-through trick by itself: write a function that returns `x.round()` and has the
# gradient of `x`.


# %% tags=["exercise"]
def round_through(x):
    ### BEGIN SOLUTION
    return x + (x.round() - x).detach()
    ### END SOLUTION


# %% tags=["check"]
x = random(5, seed=61).requires_grad_()
round_through(x).square().sum().backward()
check("value of round", round_through(x).detach(), x.detach().round())
check("gradient of the identity", x.grad, 2 * x.detach().round())

# %% [markdown]
# **5.** Build the account-book solver by hand, without training: choose values, keys and queries so
# that attention over a running sum returns the balance right after the entry that is asked for.


# %% tags=["exercise"]
def look_up_balance(numbers, amounts, asked):
    """numbers, amounts (l,), asked (t,): balances (t,), by one call of attention."""
    ### BEGIN SOLUTION
    l = len(numbers)
    one_hot = 100 * F.one_hot(numbers, l).double()
    # the recurrence with a = 1: SSD's state is the running sum
    one = torch.ones(1, l, 1, 1)
    running = ssd.ssd(amounts[None, :, None, None], one[..., 0], torch.zeros(1), one, one)
    v = F.pad(running, (0, l - 1))  # as wide as the keys
    q = F.one_hot(asked, l).double()[None, :, None] * 100
    everyone = torch.ones(len(asked), l, dtype=torch.bool)
    return attention_written_out(q, one_hot[None, :, None], v, allowed=everyone)[0, :, 0, 0]
    ### END SOLUTION


# %% tags=["check"]
numbers = torch.randperm(10, generator=torch.Generator().manual_seed(62))
amounts = random(10, seed=63)
asked = numbers[[7, 0, 3]]
check("balances looked up", look_up_balance(numbers, amounts, asked), amounts.cumsum(0)[[7, 0, 3]])

# %% [markdown]
# ## Further reading
#
# - Vaswani et al., *Attention Is All You Need* (2017): queries, keys, values, and the scale.
# - Shi et al., *Wonderful Matrices*, §3.2; *Cheems*, §3.2: inner functions and the dynamic mask.
# - Shi et al., *Trainable Dynamic Mask Sparse Attention* (2025): what the authors made of the mask.
# - Lin et al., *Forgetting Transformer* (2025): a decay between query and key inside softmax
#   attention.
# - Bengio, Léonard and Courville (2013): the straight-through estimator.
# - `cheems_ref/attention.py`: the listing this notebook arrives at.
