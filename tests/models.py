"""What the tests of config, model, generate and budget share.

A property is a function of `m`, a module with the names of cheems_ref.model, and of a model's name
or options where it speaks of one. The negative controls hand it a copy of cheems_ref.model in which
one of the rooms has a planted mistake, and expect it to fail.
"""

import inspect
import re

import torch
import whole
import whole as model
from hypothesis import settings
from planting import asked
from properties import normal, rows

import cheems_ref.model
from cheems_ref import (
    attention,
    budget,
    check,
    config,
    experts,
    feed_forward,
    presets,
    retrieval,
    roofline,
    rope,
    ssd,
)

few = settings(deadline=None, max_examples=25, derandomize=True, database=None)

# Every size differs from its default, and from those that it could be mistaken for.
SIZES = dict(
    vocab_size=19,
    d_model=16,
    n_heads=4,
    n_groups=2,
    d_state=6,
    d_conv=3,
    rope_base=50.0,
    chunk_size=3,
    n_values=5,
    k_values=3,
    d_ff=12,
    n_experts=4,
    k_experts=2,
    n_neurons=16,
    k_neurons=3,
    n_retrieval_heads=2,
    d_query=6,
    norm_eps=1e-3,
)
GATE = dict(mask="gate", max_positions=20)
CONV, UNTIED = dict(position="conv"), dict(tie_embeddings=False)
MODELS = {
    "SEIE": {},
    "SHSRAH": dict(CONV, d_head=6, n_kv_heads=2, **UNTIED),
    "SDICAX": dict(position="decay", inner="linear", mask="content", n_kv_heads=1),
    "SKIK": dict(inner="ssd", d_private=5),
    "IPAM": dict(mask="content", k_keys=3, n_kv_heads=2, **UNTIED),
    "SGIM": dict(CONV, **GATE, inner="linear", n_kv_heads=2),
    "IXSC": dict(position="decay", inner="ssd", mask="content", d_head=6),
    "IRIG": dict(**GATE, inner="ssd", n_kv_heads=2, **UNTIED),
    "IDSP": dict(**GATE, n_groups=1),
    "IEAE": dict(inner="linear", n_kv_heads=2, k_neurons=4),
}
TINY = [name for name in presets.PRESETS if name.endswith("-tiny")]


def ids(b, length, seed=1, vocab=SIZES["vocab_size"]):
    return torch.randint(vocab, (b, length), generator=torch.Generator().manual_seed(seed))


def options(case):
    """All that ModelConfig is handed; a case is a name in MODELS or such options themselves."""
    return SIZES | (dict(pattern=case) | MODELS[case] if isinstance(case, str) else case)


def built(m, case, dtype=torch.float64, **changes):
    """A model whose embedding, norms and masks are moved away from their start."""
    torch.manual_seed(0)
    net = m.CausalLM(m.ModelConfig(**options(case) | changes))
    with torch.no_grad():
        for i, (name, p) in enumerate(net.named_parameters()):
            if "norm." in name:
                p.add_(normal(*p.shape, seed=i) / 4)
            elif "embedding" in name or ".mask." in name:
                p.copy_(normal(*p.shape, seed=i) / (16 if "embedding" in name else 1))
    return net.to(dtype)


PADDING = {
    "left": rows("...####", "#######"),
    "right": rows("####...", "######."),
    "middle": rows("##.#..#", ".#.##.#"),
    "nothing else": rows(".......", ".##.#.#"),
}


def refused(error, message, function, *args, **kwargs):
    """An AssertionError where the function takes what it should not, or does not say what."""
    try:
        function(*args, **kwargs)
    except error as e:
        assert re.search(message, str(e)), f"refused as {e}; the message lacks {message!r}"
    else:
        raise AssertionError(f"not refused: {kwargs or args}")


# --- which module has which property -----------------------------------------------------------


def titled(*rows):
    """Properties with the case that they are asked of, None if they are asked of none."""
    return {asked(*[part for part in row if part is not None]): row for row in rows}


def properties_in(names, cases=()):
    """The functions of a test file that take m, or m and a case, with what they are asked of."""
    rows = []
    for f in names.values():
        if inspect.isfunction(f) and f.__module__ == names["__name__"]:
            parameters = inspect.signature(f).parameters.values()
            needed = [p.name for p in parameters if p.default is p.empty]
            rows += [(f, None)] if needed == ["m"] else []
            rows += [(f, case) for case in cases] if needed == ["m", "case"] else []
    return titled(*rows)


def ask(has_property, case, m=model):
    has_property(m, *([] if case is None else [case]))


# In the order in which they import one another.
ROOMS = (
    check,
    rope,
    ssd,
    attention,
    feed_forward,
    retrieval,
    experts,
    presets,
    config,
    cheems_ref.model,
    roofline,
    budget,
    whole,
)
