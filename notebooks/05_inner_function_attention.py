# %% [markdown]
# # 05 · Inner-function attention and masks that learn
#
# **Attention decides what to read. This chapter asks what there is to be read, and who decides what
# may be.** When you are through you can
#
# - write attention as a weighted read, with its causal mask, its offset under a cache and its
#   padding, and check it against torch's fused operator;
# - say why computation belongs in the values rather than in queries and keys, and show a task that
#   one layer of attention over SSD solves and one layer of either alone does not;
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
from cheems_ref.rope import apply_rope, rope_cos_sin
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
# We know of no public code in which the two, as these papers describe them, work. So we build both,
# and run the printed ones.
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
unscaled = attention_written_out(math.sqrt(p) * one_head[0], *one_head[1:], allowed=everyone)
_ = must_differ("without 1/√p", unscaled[0, :, 0], y)

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
check(
    "fused, causal = written out with the mask",
    whole,
    attention_written_out(*one_head, allowed=causal_mask(l, l)),
)
last_two = attention.attention(one_head[0][:, 4:], one_head[1], one_head[2])
check("two queries after a cache = the last two rows", last_two, whole[:, 4:])

_ = must_differ("without a mask", attention.attention(*one_head, allowed=everyone), whole)

no_offset = torch.ones(2, l, dtype=torch.bool).tril()
wrong = attention_written_out(one_head[0][:, 4:], *one_head[1:], allowed=no_offset)
_ = must_differ("mask without the offset", wrong, whole[:, 4:])
one_query = torch.ones(1, l, dtype=torch.bool).tril()
print("keys that one query after a cache of five sees, without the offset:", int(one_query.sum()))

# %% [markdown]
# (WM Listings 5 and 6 build the mask with `triu(1)`, without the offset. For a whole prompt it is
# right. Listing 7 has no cache; whoever adds one will find that a new token sees key 0 and nothing
# else.)
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
# recurrence that has read everything up to $s$. Attention can then look up *what the recurrence
# knew at a moment of the past*. (It chooses the moment. What is read from the state there was asked
# by token $s$ itself, with its own $C_s$.) The layer, by hand from its parts and against the
# package:

# %%
_ = torch.manual_seed(0)
layer = InnerFuncAttn(16, n_heads=2, inner="ssd", d_state=8)
x, positions = random(1, 12, 16, seed=3), torch.arange(12)[None]

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
# **A task for it.** An account book. Each of 8 entries has a booking number, in random order, and
# an amount, +1 or −1. Then come four questions: *what was the balance right after this number?*


# %%
def account_books(texts, generator, entries=8, questions=4):
    """Booking numbers and amounts (texts, entries), numbers asked for, and the balances after."""
    numbers = torch.rand(texts, entries, generator=generator).argsort(1)
    amounts = 2 * torch.randint(2, (texts, entries), generator=generator) - 1
    asked = torch.randint(entries, (texts, questions), generator=generator)
    place = numbers.argsort(1).gather(1, asked)  # where in the book each number stands
    return numbers, amounts, asked, amounts.cumsum(1).gather(1, place)


numbers, amounts, asked, answers = account_books(1, torch.Generator().manual_seed(0))
print("number ", numbers[0].tolist())
print("amount ", amounts[0].tolist())
print("balance", amounts.cumsum(1)[0].tolist(), " (not shown to the model)")
print("asked  ", asked[0].tolist(), "  answers", answers[0].tolist())

# %% [markdown]
# In *one layer*,
#
# - attention finds the entry, but its value is a linear map of that one token: the amount;
# - SSD can keep a running balance, but what it stores under a booking number is again a linear map
#   of one token, its amount. The balance stands in its state, and one layer never writes it back;
# - attention over SSD finds the entry, and there the balance.
#
# Whoever looks nothing up can still answer with the mean of all balances of the book. Balances are
# running sums, so neighbours resemble one another, and the mean explains a fixed share of the
# variance: with $\mathrm{Cov}(s, s') = \min(s, s')$, for $n$ entries $\frac{1}{n^2}\sum_{s,s'}
# \min(s, s')\, /\, \frac1n \sum_s s$.

# %%
moment = torch.arange(1.0, 9.0)
by_mean = (torch.minimum(moment[:, None], moment).mean() / moment.mean()).item()
_, amounts, _, _ = account_books(20_000, torch.Generator().manual_seed(1))
balance = amounts.cumsum(1).double()
unexplained = (balance - balance.mean(1, keepdim=True)).square().mean() / balance.square().mean()
assert abs(1 - unexplained - by_mean) < 0.01
print(f"the mean of the book explains {by_mean:.3f} of the variance")

# %% [markdown]
# The model: embeddings, one layer (or, as a control, two of ordinary attention), one linear map.


# %%
class BookReader(torch.nn.Module):
    """kind: an inner function; "ssd alone"; or "linear twice" for two layers of attention."""

    def __init__(self, kind, entries=8):
        super().__init__()
        self.number = torch.nn.Embedding(entries, 32)
        self.amount = torch.nn.Embedding(3, 32)  # -1, "a question", +1
        if kind == "ssd alone":
            layers = [ssd.SSD(32, n_heads=4, d_state=16)]
        else:
            inner, *twice = kind.split()
            layers = [
                InnerFuncAttn(32, n_heads=4, inner=inner, d_state=16) for _ in ("once", *twice)
            ]
        self.layers = torch.nn.ModuleList(layers)
        self.head = torch.nn.Linear(32, 1)

    def forward(self, numbers, amounts, asked):
        entries = self.number(numbers) + self.amount(amounts + 1)
        x = torch.cat([entries, self.number(asked) + self.amount(torch.ones_like(asked))], dim=1)
        positions = torch.arange(x.shape[1]).expand(len(x), -1)
        for layer in self.layers:
            x = x + layer(x, positions)[0]
        return self.head(x[:, numbers.shape[1] :])[..., 0]


def train_on_books(kind, steps, seed=0):
    """The share of the variance of past balances explained, every 50 steps."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = BookReader(kind).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    explained = []
    for step in range(1, steps + 1):
        *book, answers = account_books(32, generator)
        optimizer.zero_grad()
        F.mse_loss(model(*book), answers.float()).backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            *book, answers = account_books(512, generator)
            with torch.no_grad():
                error = F.mse_loss(model(*book), answers.float())
            explained.append(1 - (error / answers.float().var()).item())
    return explained


final = {kind: train_on_books(kind, 500)[-1] for kind in ("ssd", "linear", "ssd alone")}
assert final["ssd"] > 0.95 and max(final["linear"], final["ssd alone"]) < 0.85
print("variance of past balances explained by one layer after 500 steps:")
print("attention over SSD: over 95 %;  attention alone and SSD alone: under 85 %")

# %%
books = json.loads(Path("../figures/records/05_books.json").read_text())
fig, ax = plotting.figure(size=(9, 4.8))
names = {
    "ssd": "attention over SSD",
    "linear twice": "attention, two layers",
    "retrieved": "attention over retrieved values",
    "linear": "attention alone",
    "ssd alone": "SSD alone",
}
for (kind, curve), style in zip(
    books["explained"].items(), ("-", (0, (1, 1)), "--", ":", "-."), strict=True
):
    ax.plot(books["steps"], curve, linestyle=style, label=names[kind])
ax.axhline(by_mean, color=plotting.QUIET, linewidth=1)
ax.text(505, by_mean - 0.06, "the mean of the book", color=plotting.QUIET, fontsize=12, ha="right")
ax.set(xlabel="training step", ylabel="variance explained", ylim=(0, 1.05))
ax.legend(loc="lower right", fontsize=12)
plotting.save(
    fig,
    "05_books",
    "Share of the variance of past balances explained, against training steps, for five models. "
    "Attention over SSD and two layers of attention climb to nearly 1; attention alone, attention "
    "over retrieved values and SSD alone stay close above the line of the book's mean, at 0.7.",
)

# %% [markdown]
# (Drawn from a record, the median of three seeds: `python book/records.py 05_books`.) One layer
# without the inner function gets little further than the mean of the book. Two ordinary
# layers do it as well: the first sums, the second looks up. What the inner function buys is that
# the attention of *one* layer has something summed to look up.
#
# ## 4 · Values from a table
#
# WM replaces SSD by a cheaper inner function: a table of $n_v$ rows $e_j$ as wide as the token,
# from which every token retrieves a few by similarity, superimposes them and multiplies them, entry
# by entry, with itself:
#
# $$g_s = \frac{\theta\,W_q\,x_s}{\sqrt m}, \qquad
#   v_s = x_s \circ \sum_{j \,\in\, \text{best}} w_{sj}\, e_j, \qquad
#   w_{sj} = \mathrm{softmax}_{j \,\in\, \text{best}}\,(g_{sj}). \tag{5.2}$$
#
# $W_q$ (m × d) makes a query of width $m$, the $n_v$ rows of $\theta$ are the keys of the table,
# and *best* are the two (or $k$) rows with the largest $g_{sj}$. Equation 3 of the paper weights
# all rows by their scores; the steps below it and Listing 7 take the best and drop the scores. We
# keep both, since an index has no derivative: only through the weights does a gradient find query
# and keys. (The softmax and $\sqrt m$ are ours.) In steps, for one head, and against the package:

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
def train_on_two_kinds(make, steps, seed):
    """Fit V(x) = x ∘ r_kind(x): the share of variance left unexplained, and the function."""
    torch.manual_seed(seed)
    function = make()
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
    return (loss / target.var()).item(), function


def table_of_four(k):
    return lambda: RetrievedValues(8, n_heads=1, n_values=4, k_values=k)


def left_unexplained(make):
    return statistics.median(train_on_two_kinds(make, 600, seed)[0] for seed in range(5))


left = {
    "table, two rows superimposed": left_unexplained(table_of_four(2)),
    "table, one row": left_unexplained(table_of_four(1)),
    "matrix": left_unexplained(lambda: torch.nn.Linear(8, 8)),
}
assert left["table, two rows superimposed"] < 0.05
assert min(left["table, one row"], left["matrix"]) > 0.2
print("two kinds of tokens, variance left unexplained, median of 5 seeds:")
print("by two superimposed rows under 5 %;  by one row, and by a matrix, over 20 %")

# %% [markdown]
# One row is not enough, whatever the keys: the softmax over a single score is 1, so query and keys
# receive no gradient, and nobody learns which row to take. (The paper: "the output diversity
# increases with the increase of $k$".)
#
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

used, as_bad = 0, []
for seed in range(5):
    unexplained, printed = train_on_two_kinds(lambda: TableAsPrinted(8, 2, rows=2), 600, seed)
    as_bad.append(unexplained > 0.1)
    used += printed.chosen.unique().numel() == 2
assert used == 0 and all(as_bad)
print("two kinds of tokens, 5 seeds: both rows in use in none, over 10 % left in all")

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
# | SSD | $\log \Delta_s + A\,(\Delta_{s+1} + \dots + \Delta_t)$ | itself, all between | ch. 03 |
#
# (Doge adds the exponential of what stands here.) A token of SSD has two things to say with its one
# number $\Delta_s$: "do not read me", by making it small, and "forget what came before me", by
# making it large. The content mask says the first, the gate knows neither, and nothing in attention
# says the second. WM calls its mask dynamic and compares it to SSD's selection; but it is a table
# over places, and sees no content at all.

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
    steps = F.softplus(random(l, seed=9) - 2.5)
    steps[8] = 3.0  # one token that wipes the past
shares["SSD: by what came between"] = torch.exp(
    -(steps.cumsum(0)[:, None] - steps.cumsum(0)).clamp(min=0)
)
fig, axes = plotting.figure(1, 3, size=(12, 4.6))
for ax, (title, share) in zip(axes, shares.items(), strict=True):
    seen = share.masked_fill(~causal_mask(l, l), math.nan)
    last = title.startswith("SSD")
    plotting.heatmap(ax, seen, title=title, signed=False, limit=1.0, colorbar=last)
    ax.set_xlabel("key s")
axes[0].set_ylabel("query t")
plotting.save(
    fig,
    "05_shares",
    "Share of each key that is left, dark for 1, for every query and key below the diagonal. Gate "
    "and content mask give columns of one colour: a key is hidden or not, for all readers alike. "
    "SSD gives rows that fade to the left, and from row 8 on next to nothing is left of the keys "
    "before 8.",
)

# %% [markdown]
# On the right, token 8 wipes the past for all later readers. Gate and content mask can only thin
# out columns. (For SSD the decay is drawn, without $\Delta_s$.)
#
# %% [markdown]
# The bias against its definition, and its gradient against the formula written out:

# %%
h, s = 3, 10
q, k, v = (random(2, s, h, 4, seed=10 + i) for i in range(3))
mask = ContentMask(h * 4, h)
with torch.no_grad():
    bias = mask(v, torch.arange(s).expand(2, -1))
    dt = torch.log1p(torch.exp(mask.dt_proj(v.flatten(2)) + mask.dt_bias))
    check("content bias = A softplus(w·v + c)", bias, (-mask.A_log.exp() * dt).mT)

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
# right value, once as a decoy with a random one. Even slots hold the right pairs, odd slots the
# decoys, in all texts, and nothing in the tokens tells. Then every key is asked for. Reading both
# and guessing is right in 9 of 16 cases: half of the time, and by chance in an eighth of the rest.


# %%
def decoy_memory(texts, generator, pairs=8):
    """Keys and values of the slots (texts, 2 pairs), keys asked for, and the right values."""
    keys = torch.rand(3, texts, pairs, generator=generator).argsort(-1)
    values = torch.randint(pairs, (2, texts, pairs), generator=generator)
    slots, stored = (torch.stack([*u[:2]], dim=-1).flatten(1) for u in (keys, values))
    return slots, stored, keys[2], values[0].gather(1, keys[0].argsort(1).gather(1, keys[2]))


slots, stored, asked, answers = decoy_memory(1, torch.Generator().manual_seed(0))
print("key    ", slots[0].tolist())
print("value  ", stored[0].tolist())
print("asked  ", asked[0].tolist(), "  answers", answers[0].tolist())

# %% [markdown]
# The model: embeddings of keys and values, one attention layer, one linear map to the values.
# Beside our gates stands the printed mask, with its gradient as printed.


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


class Memory(torch.nn.Module):
    """Keys and values in, logits of the values of the keys that are asked for out."""

    def __init__(self, layer, pairs=8):
        super().__init__()
        self.key = torch.nn.Embedding(pairs, 32)
        self.value = torch.nn.Embedding(pairs + 1, 32)  # the last one: "a question"
        self.mark = torch.nn.Embedding(3, 32)  # fresh, stale, a question
        self.layer = layer
        self.head = torch.nn.Linear(32, pairs, bias=False)

    def forward(self, slots, stored, asked, marks=None):
        question = torch.full_like(asked, self.value.num_embeddings - 1)
        x = self.key(torch.cat([slots, asked], dim=1))
        x = x + self.value(torch.cat([stored, question], dim=1))
        if marks is not None:
            x = x + self.mark(torch.cat([marks, torch.full_like(asked, 2)], dim=1))
        y, cache = self.layer(x, torch.arange(x.shape[1]).expand(len(x), -1))
        return self.head(y[:, slots.shape[1] :]), cache


def train_memory(layer, texts, steps, seed=0, weight_decay=0.0):
    """Train a Memory around a layer on what `texts` makes; the model and its generator."""
    generator = torch.Generator().manual_seed(seed)
    model = Memory(layer).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)
    for _ in range(steps):
        slots, stored, asked, answers, *marks = texts(32, generator)
        logits, _ = model(slots, stored, asked, *marks)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        optimizer.step()
    return model, generator


def share_right(model, texts, generator):
    """The share of questions that are answered right, over 256 texts."""
    slots, stored, asked, answers, *marks = texts(256, generator)
    with torch.no_grad():
        logits, _ = model(slots, stored, asked, *marks)
    return (logits.argmax(-1) == answers).double().mean().item()


def train_on_decoys(kind, steps, seed=0):
    """Train on the memory with decoys, with weight decay: accuracy, and the attention layer."""
    torch.manual_seed(seed)
    options = dict(mask="gate", max_positions=24, round=kind == "rounded")
    layer = QCAttn(32, n_heads=4, **(options if kind in ("gate", "rounded") else {}))
    if kind == "printed":
        layer.mask = GateAsPrinted(4, 24)
    model, generator = train_memory(layer, decoy_memory, steps, seed, weight_decay=1e-2)
    return share_right(model, decoy_memory, generator), layer


results = {kind: train_on_decoys(kind, 200) for kind in ("none", "printed", "gate", "rounded")}
accuracy = {kind: result[0] for kind, result in results.items()}
assert max(accuracy["none"], accuracy["printed"]) < 0.75
assert min(accuracy["gate"], accuracy["rounded"]) > 0.97
print("8 keys with decoys after 200 steps: no mask and printed mask under 75 %, ours over 97 %")

gates = results["gate"][1].mask.logit.sigmoid()
right, decoy = gates[:, 0:16:2], gates[:, 1:16:2]
assert right.min() > decoy.max()
assert (results["printed"][1].mask.gate == 1).all()
print("trained gates: every right slot is more open than every decoy; the printed ones are all 1")

# %% [markdown]
# The gates of the decoys need not close altogether. At 0.6 against 0.96 the right value outweighs
# the decoy, and the loss has nothing left to ask for.
#
# %% [markdown]
# And the printed mask? It has no gradient, so it does not move: not slowly, not at all. Here are
# 2,000 steps of AdamW with weight decay for both, as masks on a fixed attention that is asked to
# overlook position 3:

# %%
q, k, v = (random(4, 8, 2, 4, seed=20 + i) for i in range(3))
ids, allowed = torch.arange(8).expand(4, -1), causal_mask(8, 8)
without_3 = (allowed & (torch.arange(8) != 3)) | torch.eye(8, dtype=torch.bool)  # 3 sees itself
wanted = attention_written_out(q, k, v, allowed=without_3)


def fit(mask, steps):
    scale = torch.nn.Parameter(torch.ones(()))  # so that there is always a loss to differentiate
    optimizer = torch.optim.AdamW([*mask.parameters(), scale], lr=3e-2, weight_decay=1e-2)
    for _ in range(steps):
        y = attention_written_out(q, k, scale * v, allowed=allowed, bias=mask(v, ids))
        optimizer.zero_grad()
        F.mse_loss(y, wanted).backward()
        optimizer.step()
    return mask


output = attention_written_out(q, k, v, allowed=allowed, bias=GateAsPrinted(2, 8)(v, ids))
assert not output.requires_grad  # nothing of the mask is in it
printed_gate, ours = fit(GateAsPrinted(2, 8), 2000), fit(GateMask(2, 8), 2000)
moved = (printed_gate.gate - 1).abs().max().item()
assert moved == 0 and printed_gate.gate.grad is None
assert ours.logit.sigmoid()[:, 3].max() < 0.2
print(f"after 2,000 steps: the printed mask moved by {moved:g}; ours has closed position 3")

# %%
masks_record = json.loads(Path("../figures/records/05_masks.json").read_text())
fig, axes = plotting.figure(2, 1, size=(12, 6.2))
for ax, name, title in zip(
    axes, ("printed", "gate"), ("as printed: 200 steps", "trainable gates: 200 steps"), strict=True
):
    gates = torch.tensor(masks_record["gates"][name])
    plotting.heatmap(ax, gates, title=title, signed=False, limit=1.0)
    ax.set_aspect("auto")
    ax.set_ylabel("head")
    ax.set_yticks(range(4))
    ax.set_xticks(range(24), [*(["r", "d"] * 8), *(["?"] * 8)], fontsize=14)
axes[1].set_xlabel("position: r right, d decoy, ? question")
plotting.save(
    fig,
    "05_gates",
    "Gates of four heads over 24 positions after training on decoys. As printed: one flat colour, "
    "all gates 1. Trainable: the eight decoy slots are at about 0.6, clearly paler than the right "
    "slots between them at 0.96, in every head; the questions are near 0.8.",
)

# %% [markdown]
# (From a record, `python book/records.py 05_masks`; the live cell above asserts the same.) As
# printed, then, attention with the dynamic mask *is* attention without it, at the start and for
# ever; WM Table 1 reports perplexities of 8.12 and 7.96 for the two.
#
# **Rounding.** The paper rounds its gates to 0 and 1. That can be had: use the rounded gates in the
# forward pass and the gradient of the soft ones in the backward pass (*straight through*). The
# package does it on the output of attention, since the logarithm of a gate of 0 has no gradient; so
# queries, keys and values, too, learn as if the gates were soft. A closed gate can open again:

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
weight = random(1, 6, 8, seed=31)
(gradient,) = torch.autograd.grad((y * weight).sum(), layer.mask.logit)
layer.mask.round = False
(of_soft,) = torch.autograd.grad((layer(x, positions)[0] * weight).sum(), layer.mask.logit)
check("gradient of the rounded gates = that of the soft ones", gradient, of_soft)
assert (gradient[:, 1] != 0).all()
print("and the closed gates have a gradient")

# %% [markdown]
# ### By content: a token that says "do not read me"
#
# Now the decoys stand anywhere, and the token itself tells: a mark, *stale* or *fresh*. A gate per
# position is useless here. The content mask reads the mark from the value.


# %%
def marked_memory(texts, generator, pairs=8):
    """As `decoy_memory`, with decoys anywhere; and the marks of the slots, 1 for stale."""
    order = torch.rand(texts, 2 * pairs, generator=generator).argsort(1)
    keys = torch.rand(3, texts, pairs, generator=generator).argsort(-1)
    slots = torch.cat([keys[0], keys[1]], dim=1).gather(1, order)
    stored = torch.randint(pairs, (texts, 2 * pairs), generator=generator)
    stale = order >= pairs
    fresh_keys, fresh_values = (u[~stale].view(texts, pairs) for u in (slots, stored))
    answers = fresh_values.gather(1, fresh_keys.argsort(1).gather(1, keys[2]))
    return slots, stored, keys[2], answers, stale.long()


def train_on_marks(mask, steps, seed=0):
    torch.manual_seed(seed)
    return train_memory(QCAttn(32, n_heads=4, mask=mask), marked_memory, steps, seed)


plain, generator = train_on_marks(None, 200)
assert share_right(plain, marked_memory, generator) > 0.97
print("ordinary attention, no dynamic mask: over 97 % right")

# %% [markdown]
# Ordinary attention solves it as well, since query and key can carry the mark too. What the content
# mask adds is that the penalty belongs to the key alone: *before any query is there* it is known
# who need not be read. So let each query keep only the $n$ keys of the smallest penalty among those
# that it may see. A key that has once been dropped will never be among the best $n$ again, since
# later keys can only push it further down. A cache of $n$ keys per head would do. (The package is
# written to be read: it computes all scores and hides what is dropped, so here keeping fewer saves
# nothing.)


# %%
def keep_fewer(model, generator, by_chance=False):
    """Accuracy against the number of keys kept, by penalty or, as a control, by chance."""
    mask = model.layer.mask
    if by_chance:
        keeps = mask.keeps
        mask.keeps = lambda bias, allowed: keeps(
            torch.rand(bias.shape, generator=generator, dtype=bias.dtype), allowed
        )
    accuracy = {}
    for mask.keep in (1, 2, 4, 6, 8, 10, 12, 16, 24):
        accuracy[mask.keep] = share_right(model, marked_memory, generator)
    if by_chance:
        del mask.keeps
    mask.keep = None
    return accuracy


def shares_left(model, generator):
    """exp(penalty) of every key of 64 texts (texts, keys, heads), and the marks of the slots."""
    slots, stored, asked, _, marks = marked_memory(64, generator)
    with torch.no_grad():
        _, cache = model(slots, stored, asked, marks)
        return model.layer.mask(cache.v, cache.position_ids).exp().mT, marks


model, generator = train_on_marks("content", 200)
share, marks = shares_left(model, generator)
fresh, stale = (share[:, :16][marks == kind].mean(0) for kind in (0, 1))  # per head
assert (stale / fresh).min() < 0.5
by_penalty, by_chance = (keep_fewer(model, generator, chance) for chance in (False, True))
assert by_penalty[24] > 0.97 and by_penalty[16] > 0.9
assert by_penalty[8] > by_chance[8] + 0.1
print("a head hides stale keys: it leaves of them less than half of what it leaves of fresh ones")
print("keeping 16 keys per query by penalty: over 90 % right;")
print("keeping 8: more than 10 points better than 8 keys by chance")

# %%
content = masks_record["content"]
kinds = [*(("f", "s")[mark] for mark in content["marks"]), *("?" * 8)]
fig, axes = plotting.figure(1, 2, size=(12, 4.4))
plotting.heatmap(
    axes[0], torch.tensor(content["share"]), title="share of each key left", signed=False, limit=1.0
)
axes[0].set_aspect("auto")
axes[0].set_ylabel("head")
axes[0].set_yticks(range(4))
axes[0].set_xticks(range(24), kinds, fontsize=12)
axes[0].set_xlabel("key: f fresh, s stale, ? question")
for name, marker in (("by penalty", "o"), ("by chance", "s")):
    curves = torch.tensor(list(content[name].values()))  # (kept, seeds)
    middle = curves.median(1).values
    axes[1].plot(content["kept"], middle, marker=marker, label=name)
    axes[1].fill_between(content["kept"], curves.amin(1), curves.amax(1), alpha=0.2, linewidth=0)
axes[1].axvline(8, color=plotting.QUIET, linestyle=":", linewidth=1)
axes[1].set(xlabel="keys kept per query, of 17 to 24", ylabel="answers right", ylim=(0, 1.05))
axes[1].legend(loc="lower right")
plotting.save(
    fig,
    "05_content",
    "Left: share of each key left in one text for four heads; stale keys are paler than fresh ones "
    "in some heads and hardly in others. Right: answers right against the number of keys kept per "
    "query, median and range of five seeds. Kept by penalty it is near 0.9 with 8 keys and 1 from "
    "16 on; kept by chance it falls well below.",
)

# %% [markdown]
# (From the record of `05_masks`, five seeds on the right.) Some heads hide the stale tokens nearly
# completely, some hardly; which ones changes with the seed. Nobody told them to share the work.
# Eight keys hold all that can be asked for, and the mask finds most of them.
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
    for name, options in MASKS.items():
        if "gate" not in name:
            layer = InnerFuncAttn(16, n_heads=4, inner=inner, d_state=6, **options)
            with torch.no_grad():
                y, moved = (layer(x, positions + shift)[0] for shift in (0, 1000))
            check(f"{inner}, {name}: moved by 1,000", moved, y)
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
# Fewer groups of keys and values than heads (`n_kv_heads`, *grouped* attention) make the first
# number smaller. As for time, Cheems reports its attention to be about 4 % slower (Ch Appendix B.2,
# without saying what was timed). Measured here: one token decoded, and a step of training, against
# ordinary attention of the same size in the same run.

# %%
layer = InnerFuncAttn(512, n_heads=8, n_kv_heads=2, inner="linear").float()
with torch.no_grad():
    _, cache = layer(torch.zeros(1, 8, 512, dtype=torch.float32), torch.arange(8)[None])
print(
    "linear, 2 groups for 8 heads:", (cache.k.numel() + cache.v.numel()) // 8, "numbers per token"
)

cost = json.loads(Path("../figures/records/05_cost.json").read_text())
for title, table in cost["times"].items():
    print(f"\n{title}")
    print(" " * 28 + "".join(f"{size:>9} tokens" for size in table["sizes"]))
    for name, ratios in table["ratios"].items():
        print(f"  {name:26}" + "".join(f"{ratio:15.2f}x" for ratio in ratios))
ssd_ratios = cost["times"]["Decoding one token after"]["ratios"]["ssd"]
assert ssd_ratios == sorted(ssd_ratios, reverse=True) and ssd_ratios[-1] > 1.04

# %% [markdown]
# (From a record, `python tests/bench/bench_attention.py --json figures/records/05_cost.json`, on
# two CPU cores; `make bench` measures on the machine at hand.) The inner SSD costs a fixed time per
# token, so its share shrinks as the context grows; at 8,192 tokens it is still above the 4 % of the
# paper. The table of values comes close to it from 1,024 tokens on. The dynamic masks cost most in
# training over longer texts: they are matrices of scores, where the causal mask is none.
#
# ## 8 · As printed
#
# Run above: the mask without its offset (§2), the table that is not used and the table of the wrong
# size (§4), the mask that does not move (§5). And chapter 04 ran Listing 7's rotation by the number
# of the head. Five more.
#
# ### The mask on the wrong side of the softmax (WM §3.2, formulas after eq. 4)
#
# > $L = \mathrm{dynamic\_mask}(l)$, $M = L \circ A$, $y = M \cdot V_{innerfunc}$ — WM §3.2
#
# with $A$ the softmax of *all* scores. With $L$ of Listing 6, whose entries are 0 and $-\infty$,
# allowed weights become 0 and forbidden ones $-\infty$, and what is read is infinite or NaN. With
# $L$ of zeros and ones it looks right and is not causal: the softmax has already divided by the
# keys of the future.

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
assert (zero_one(future) - zero_one(k))[:5].abs().amax(dim=1).min() > 1e-3  # every one of them
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


front_padding = torch.tensor([[False, False, True, True, True, True]])
x, W = random(6, 4, seed=51).requires_grad_(), random(4, 4, seed=52).requires_grad_()
weights = (x @ x.T / 2 + masked_as_printed(front_padding)[0, 0]).softmax(-1)
loss = (weights @ x @ W)[2:].square().sum()
loss.backward()
assert loss.isfinite()
print("loss over the real tokens: finite")
for name, parameter in (("x", x), ("W", W)):
    print(f"gradient of {name}: {int(parameter.grad.isnan().sum())} of {parameter.numel()} are NaN")

x.grad = W.grad = None
ours = attention_written_out(
    *(u[None, :, None] for u in (x, x, x @ W)), allowed=causal_mask(6, 6, real=front_padding)
)
loss_ours = ours[0, 2:, 0].square().sum()
loss_ours.backward()
assert x.grad.isfinite().all() and W.grad.isfinite().all()
check("a row that sees itself: the same loss, finite gradients", loss_ours, loss)

# %% [markdown]
# The same happens without any padding as soon as the gate of position 0 is shut: query 0 has only
# itself. In the package a rounded gate leaves it its own token.

# %%
shut = torch.ones(1, 6)
shut[0, 0] = 0.0
rows = masked_as_printed(torch.ones(1, 6, dtype=torch.bool), shut)[0, 0].softmax(-1)
print("gate of position 0 shut, as printed: rows that are NaN:", int(rows.isnan().any(-1).sum()))

layer = QCAttn(8, n_heads=2, mask="gate", max_positions=6, round=True)
layer.mask.logit.data[:, 0] = -2.0
with torch.no_grad():
    y, cache = layer(random(1, 6, 8, seed=56), torch.arange(6)[None])
    check("ours: token 0 reads itself", y[:, 0], layer.out_proj(cache.v[:, 0].flatten(1)))

# %% [markdown]
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
padded = masked_as_printed(front_padding, gate)[0, 0, 2:, 2:]
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
# *values* are states that have read the padding. How much it changes them depends on the step size
# and on the skip connection $D$; here without $D$ (Ch Listing 2 has none), with correct positions:

# %%
_ = torch.manual_seed(0)
layer = ssd.SSD(16, n_heads=2, d_state=8)
_ = layer.D.data.zero_()
x = random(1, 12, 16, seed=54)
with torch.no_grad():
    clean, _ = layer(x, torch.arange(12)[None])
    for pads in (1, 4):
        junk = torch.cat([random(1, pads, 16, seed=55), x], dim=1)
        is_real = torch.arange(12 + pads)[None] >= pads
        ids = (is_real.cumsum(1) - 1).clamp(min=0)
        ignored, _ = layer(junk, ids, padding_mask=is_real)
        read, _ = layer(junk, ids)  # as the listings: padding is a token like any other
        check(f"{pads} padding in front, masked: same values", ignored[:, pads:], clean)
        change = (read[:, pads:] - clean).norm() / clean.norm()
        assert change > 0.1
        print(f"{pads} padding in front, read: values change by more than 10 % (relative norm)")

# %% [markdown]
# ## Summary
#
# - Attention is a weighted read. Queries and keys make the weights; what can be read is in the
#   values.
# - With $V = \mathrm{SSD}(x)$ a value is what a recurrence knew at that moment. One layer can then
#   look up what otherwise takes two.
# - A table of values, retrieved by similarity, treats kinds of tokens differently. It learns if the
#   rows are weighted by their scores.
# - A mask that learns is a bias before the softmax. By place it is a gate; by content it is a key's
#   "do not read me", known before any query, so that keys can be left out.
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
# | `unsqueeze_dim=2` (Listing 7) | no run, or no position: chapter 04 | (b, l, h, d) |
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
    # the third: what came between, with every step alike
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
