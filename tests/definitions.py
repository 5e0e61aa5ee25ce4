"""The definition of every function and layer, by loops and plain formulas, in float64.

Nothing here calls the package. The operators take tensors, one row, head and token at a time. The
definition of a layer takes its parameters `p` by name, the tokens x, their positions, and the
options that the layer was made with. It knows no padding, no cache and no chunks: a test compares
those with the definition of each row by itself.
"""

import itertools
import math

import torch
import torch.nn.functional as F

# --- operators: one row, one head, one token at a time ------------------------------------------


def ssd(x, dt, A, B, C, D, state):
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_tᵀ and y_t = h_t C_t + D x_t: y and the last h."""
    (b, length, h, p), heads_per_group = x.shape, x.shape[2] // B.shape[2]
    y, final = [], []
    for i, j in itertools.product(range(b), range(h)):
        H, k = state[i, j], j // heads_per_group
        for t in range(length):
            H = (dt[i, t, j] * A[j]).exp() * H + dt[i, t, j] * torch.outer(x[i, t, j], B[i, t, k])
            y.append(H @ C[i, t, k] + D[j] * x[i, t, j])
        final.append(H)
    y = torch.stack(y) if y else x
    return y.reshape(b, h, length, p).transpose(1, 2), torch.stack(final).reshape(state.shape)


def selective_scan(x, dt, A, B, C, D, state):
    """h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t and y_t = h_t·C_t + D x_t, one channel at a time."""
    b, length, d = x.shape
    y, final = [], []
    for i, j in itertools.product(range(b), range(d)):
        h = state[i, j]
        for t in range(length):
            h = (dt[i, t, j] * A[j]).exp() * h + dt[i, t, j] * B[i, t] * x[i, t, j]
            y.append(h @ C[i, t] + D[j] * x[i, t, j])
        final.append(h)
    y = torch.stack(y).view(b, d, length).mT if y else x
    return y, torch.stack(final).view_as(state)


def linear_attention(rule, q, k, v, state, *, scale, g=None, beta=None):
    """S_t = S_{t-1} M_t + w_t v_t k_tᵀ and o_t = scale S_t q_t, with the n × n matrices M_t."""
    b, length, h, n = q.shape
    o, final = [], []
    for i, j in itertools.product(range(b), range(h)):
        S = state[i, j]
        for t in range(length):
            k_t, M, weight = k[i, t, j], torch.eye(n, dtype=q.dtype), 1.0
            if beta is not None:
                weight = beta[i, t, j]
                weight = weight / (1 + weight * (k_t @ k_t)) if rule == "longhorn" else weight
                M = M - weight * torch.outer(k_t, k_t)
            if g is not None:
                M = g[i, t, j].exp() * M
            S = S @ M + weight * torch.outer(v[i, t, j], k_t)
            o.append(scale * (S @ q[i, t, j]))
        final.append(S)
    o = torch.stack(o).view(b, h, length, -1).transpose(1, 2) if o else v
    return o, torch.stack(final).view_as(state)


def convolution(u, weight, history):
    """silu(Σ_i w_i u_{t-i}), token by token, and the history for the next call."""
    (_, length, _), taps = u.shape, weight.shape[1]
    past = torch.cat([history, u], dim=1)
    y = []
    for t in range(length):
        y.append(sum(weight[:, i] * past[:, t + i] for i in range(taps)))
    y = torch.stack(y, dim=1) if y else u
    return y * torch.sigmoid(y), past[:, length:]


def rotated(x, position_ids, base):
    """Numbers k and k + dim/2 as one complex number, times exp(i t base^(-2k/dim))."""
    half = x.shape[-1] // 2
    theta = torch.tensor([base ** (-k / half) for k in range(half)], dtype=torch.float64)
    z = torch.complex(*x.chunk(2, dim=-1)) * torch.exp(1j * position_ids[..., None, None] * theta)
    return torch.cat([z.real, z.imag], dim=-1)


def causal(t, s):
    """Which of s keys each of the last t tokens sees, by a loop: (t, s)."""
    rows = [[key <= s - t + query for key in range(s)] for query in range(t)]
    return torch.tensor(rows, dtype=torch.bool).view(t, s)


def attention(q, k, v, allowed, bias=None):
    """Σ_s softmax_s(q·k_s / √p + bias_s) v_s; head i reads the group i // (h / g)."""
    (b, t, h, p), s = q.shape, k.shape[1]
    allowed, y = allowed.expand(b, h, t, s), []
    for i, n, j in itertools.product(range(b), range(t), range(h)):
        keys, values = (x[i, :, j // (h // x.shape[2])] for x in (k, v))
        seen = allowed[i, j, n].nonzero()[:, 0]
        scores = keys[seen] @ q[i, n, j] / p**0.5
        weights = (scores if bias is None else scores + bias[i, j, seen]).exp()
        y.append(weights / weights.sum() @ values[seen])
    return torch.stack(y).view(b, t, h, p) if y else q


def best(scores, k):
    """Which entries of the last axis are among the k largest, of different ones."""
    return scores >= scores.sort(dim=-1).values[..., [-k]]


def retrieved_experts(x, down, up, gates, indices, gate=None):
    """Σ g_i silu(x·down_i) up_i, or Σ g_i (x·down_i) silu(x·gate_i) up_i, choice by choice."""
    b, length, h, k = indices.shape
    y = []
    for i, t in itertools.product(range(b), range(length)):
        total = torch.zeros(up.shape[1], dtype=x.dtype)
        for j, n in itertools.product(range(h), range(k)):
            e, token = indices[i, t, j, n], x[i, t]
            active = token @ down[e]
            active = F.silu(active) if gate is None else active * F.silu(token @ gate[e])
            total = total + gates[i, t, j, n] * active * up[e]
        y.append(total)
    return torch.stack(y).view(b, length, -1) if y else x.new_zeros(b, length, up.shape[1])


# --- sequence mixers ----------------------------------------------------------------------------


def part(p, prefix):
    """The parameters of a submodule, by their names in it."""
    return {name.removeprefix(prefix): t for name, t in p.items() if name.startswith(prefix)}


def softplus(x):
    return torch.log1p(torch.exp(x))


def ssd_layer(p, x, ids, *, n_heads, n_groups=1, position="rope", rope_base=10000.0, **_):
    dt = softplus(x @ p["dt_proj.weight"].T + p["dt_bias"])
    channels = [x @ p[f"{name}_proj.weight"].T for name in "xBC"]
    if position == "conv":
        u, weight = torch.cat(channels, dim=-1), p["conv"]
        u, _ = convolution(u, weight, u.new_zeros(len(u), weight.shape[1] - 1, u.shape[2]))
        channels = u.split([t.shape[-1] for t in channels], dim=-1)
    heads = (n_heads, n_groups, n_groups)
    values, B, C = (t.unflatten(-1, (n, -1)) for t, n in zip(channels, heads, strict=True))
    if position == "rope":
        B, C = rotated(B, ids, rope_base), rotated(C, ids, rope_base)
    start = x.new_zeros(len(x), *values.shape[2:], B.shape[-1])
    y, _ = ssd(values, dt, -p["A_log"].exp(), B, C, p["D"], start)
    return y.flatten(2) @ p["out_proj.weight"].T


def mamba_layer(p, x, ids, *, selective=True, **_):
    u, z = (x @ p["in_proj.weight"].T).chunk(2, dim=-1)
    history = u.new_zeros(len(u), p["conv"].shape[1] - 1, u.shape[2])
    u, _ = convolution(u, p["conv"], history)
    inner = u @ p["x_proj.weight"].T if selective else p["constant"].expand(*u.shape[:2], -1)
    rank, n = p["dt_proj.weight"].shape[1], p["A_log"].shape[1]
    dt, B, C = inner.split([rank, n, n], dim=-1)
    dt = softplus(dt @ p["dt_proj.weight"].T + p["dt_bias"])
    state = u.new_zeros(len(u), u.shape[2], n)
    y, _ = selective_scan(u, dt, -p["A_log"].exp(), B, C, p["D"], state)
    return (y * z * torch.sigmoid(z)) @ p["out_proj.weight"].T


def s4d_layer(p, x, ids, **_):
    """h_t = exp(dt A) h_{t-1} + (exp(dt A) - 1) / A x_t and y_t = 2 Re C h_t + D x_t."""
    A, C = torch.complex(-p["A_log"].exp(), p["A_imag"]), torch.view_as_complex(p["C"])
    step = (p["log_dt"].exp()[:, None] * A).exp()
    h, y = torch.zeros(len(x), *A.shape, dtype=torch.complex128), []
    for x_t in x.unbind(1):
        h = step * h + (step - 1) / A * x_t[..., None]
        y.append(2 * (C * h).sum(-1).real + p["D"] * x_t)
    return torch.stack(y, dim=1)


def retrieved_values(p, x, n_heads, k_values):
    """v = x ∘ Σ_j w_j U_j, one head of one token at a time."""
    width, v = x.shape[-1] // n_heads, []
    for token, j in itertools.product(x.flatten(0, 1), range(n_heads)):
        keys = p["keys"][j]
        m = keys.shape[-1]
        scores = keys @ (p["query_proj.weight"][j * m : (j + 1) * m] @ token) / m**0.5
        rows = sorted(range(len(keys)), key=lambda r, scores=scores: -scores[r].item())[:k_values]
        weights = scores[rows].exp()
        mixed = weights / weights.sum() @ p["values"][j, rows]
        v.append(token[j * width : (j + 1) * width] * mixed)
    return torch.stack(v).view(x.shape)


def best_keys(bias, allowed, n):
    """Of the allowed keys the n of the largest bias, and of equals the later."""
    kept = torch.zeros_like(allowed)
    for i, j, t in itertools.product(*map(range, allowed.shape[:3])):
        keys = allowed[i, j, t].nonzero()[:, 0].tolist()
        order = sorted(keys, key=lambda key, row=bias[i, j]: (row[key].item(), key))
        kept[i, j, t, order[-n:]] = True
    return kept


def attention_layer(
    p,
    x,
    ids,
    *,
    n_heads,
    rope_base=10000.0,
    inner="linear",
    mask=None,
    hard=False,
    k_keys=None,
    **o,
):
    """Projections, rotations, an inner function and a mask around `attention`."""
    b, length, d = x.shape
    q, k = ((x @ p[f"{name}_proj.weight"].T).unflatten(-1, (-1, d // n_heads)) for name in "qk")
    q, k = rotated(q, ids, rope_base), rotated(k, ids, rope_base)
    of_inner = part(p, "inner.")
    if inner == "ssd":
        v = ssd_layer(of_inner, x, ids, n_heads=n_heads, rope_base=rope_base)
    elif inner == "retrieved":
        v = retrieved_values(of_inner, x, n_heads, o.get("k_values", 2))
    else:
        v = x @ of_inner["weight"].T
    allowed, bias = causal(length, length).repeat(b, n_heads, 1, 1), None
    if mask == "gate":
        bias = torch.log(1 / (1 + torch.exp(-p["mask.logit"][:, ids].transpose(0, 1))))
    elif mask == "content":
        dt = softplus(v @ p["mask.dt_proj.weight"].T + p["mask.dt_bias"])
        bias = (-p["mask.A_log"].exp() * dt).transpose(1, 2)
    heads = v.unflatten(-1, (-1, d // n_heads))
    if hard:  # the gates are rounded, and a query that sees no key sees its own
        kept = allowed & (bias >= math.log(0.5))[:, :, None]
        kept |= torch.eye(length).bool() & ~kept.any(-1, keepdim=True)
        soft = attention(q, k, heads, allowed, bias)  # of which the gradient is taken
        read = soft + (attention(q, k, heads, kept) - soft).detach()
    else:
        allowed = allowed if k_keys is None else best_keys(bias, allowed, k_keys)
        read = attention(q, k, heads, allowed, bias)
    return read.flatten(2) @ p["out_proj.weight"].T


# --- state mixers: all experts on all tokens ----------------------------------------------------


def mlp(p, x, ids=None, *, gated=False, **_):
    active = x @ p["in_proj.weight"].T
    active = F.silu(x @ p["gate_proj.weight"].T) * active if gated else F.silu(active)
    return active @ p["out_proj.weight"].T


def dglu(p, x, ids=None, *, gate="tanh", **_):
    second = torch.tanh if gate == "tanh" else torch.sigmoid
    return (F.silu(x @ p["W.weight"].T) * second(x @ p["V.weight"].T)) @ p["W_2.weight"].T


def routed_gates(p, x, *, k, renormalize=False, **_):
    """The gate of every expert, 0 where it is not chosen: (b, l, e)."""
    g = (x @ p["router.weight"].T).softmax(-1)
    g = g * best(g, k)
    return g / g.sum(-1, keepdim=True) if renormalize else g


def mixture(p, x, seen, **options):
    """Σ g_i FFN_i over what each expert sees."""
    of_experts = [part(p, f"experts.{i}.") for i in range(len(seen))]
    shared_V = {key: t for key, t in of_experts[0].items() if key == "V.weight"}
    y = torch.stack([dglu(shared_V | q, z) for q, z in zip(of_experts, seen, strict=True)])
    return torch.einsum("ble,eblo->blo", routed_gates(p, x, **options), y)


def moe(p, x, ids=None, *, n_experts, **options):
    """Also the cohesive one, whose experts have the V of the first."""
    return mixture(p, x, [x] * n_experts, **options)


def shared_expert_moe(p, x, ids=None, **options):
    return dglu(part(p, "shared."), x) + moe(p, x, **options)


def expansive_moe(p, x, ids=None, *, n_experts, **options):
    s = dglu(part(p, "shared."), x)
    seen = [s * torch.sigmoid(s @ p[f"gates.{i}.weight"].T) for i in range(n_experts)]
    return mixture(p, x, seen, **options)


def retrieved_gates(p, z, *, n_heads, k, **_):
    """The gate of all r² experts for every head, 0 where it is not found: (b, l, h, e)."""
    q = (z @ p["query_proj.weight"].T).view(*z.shape[:2], n_heads, 2, -1)
    s = torch.einsum("blhzm,hzrm->blhzr", q, p["keys"])
    s = (s[..., 0, :, None] + s[..., 1, None, :]).flatten(-2)
    return s.masked_fill(~best(s, k), -math.inf).softmax(-1)


def peer(p, x, ids=None, **options):
    g = retrieved_gates(p, x, **options)
    return torch.einsum("blhe,ble,eo->blo", g, F.silu(x @ p["down"].T), p["up"])


def cdmmoe(p, x, ids=None, **options):
    z = mlp(part(p, "shared."), x, gated=True) @ p["private_proj.weight"].T
    g = retrieved_gates(part(p, "retrieval."), z, **options)
    active = (z @ p["down"].T) * F.silu(z @ p["gate"].T)
    return torch.einsum("blhe,ble,eo->blo", g, active, p["up"])


def cdmoe(p, x, ids=None, *, form="serial", residual=True, **options):
    phi = mlp(part(p, "shared."), x)
    y = peer(part(p, "experts."), phi if form == "serial" else x, **options)
    return y + phi if residual else y


# --- the language model -------------------------------------------------------------------------

OF_LETTER = dict(S=ssd_layer, A=attention_layer, I=attention_layer, M=mlp, G=mlp, D=dglu, R=moe)
OF_LETTER |= dict(H=shared_expert_moe, C=moe, X=expansive_moe, P=peer, K=cdmmoe, E=cdmoe)


def options_of(letter, c):
    """A layer's options by their own names, from those of a ModelConfig."""
    if letter == "S":
        return c
    if letter == "A":
        return dict(n_heads=c["n_heads"], rope_base=c["rope_base"])
    if letter == "I":
        return dict(inner="retrieved") | c
    if letter in "RHCX":
        return dict(n_experts=c["n_experts"], k=c["k_experts"])
    return dict(gated=letter == "G", n_heads=c["n_retrieval_heads"], k=c["k_neurons"])


def language_model(p, tokens, ids, *, pattern, norm_eps, tie_embeddings=True, **c):
    """Logits: x + layer(norm(x)) for every letter, between the embedding and the output map."""

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + norm_eps).sqrt() * weight

    x = p["embedding.weight"][tokens]
    for i, letter in enumerate(pattern):
        z = norm(x, p[f"blocks.{i}.norm.weight"])
        layer = part(p, f"blocks.{i}.layer.")
        x = x + OF_LETTER[letter](layer, z, ids, **options_of(letter, c))
    head = p["embedding.weight" if tie_embeddings else "lm_head.weight"]
    return norm(x, p["norm.weight"]) @ head.T
