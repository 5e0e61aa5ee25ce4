"""Refusals by machine: every argument of every public function is spoilt in every way.

CALLS has one good call of each function and layer whose signature has shapes. From the signature we
know what is wrong: an axis too few or too many, another size, another dtype, an entry or a number
out of range, a word. Each has to raise ValueError or TypeError that names the argument, or, for a
size, another argument with that letter. What a function rightly accepts is listed in ACCEPTED.
RELATIONS has by hand what no signature says: numbers that have to fit one another, empty axes.
"""

import importlib
import inspect
import math
import pkgutil
import re
import typing

import jaxtyping
import pytest
import torch
from torch import zeros

import cheems_ref
import cheems_ref.linear_attention as la
import cheems_ref.ssd as ssd
from cheems_ref import (
    attention,
    budget,
    convolution,
    experts,
    feed_forward,
    mamba,
    model,
    retrieval,
    roofline,
    rope,
    state_space,
    tasks,
    text,
    train,
)

pytestmark = pytest.mark.usefixtures("unchecked")


def floats(*shape, dtype=torch.float64):
    return torch.full(shape, 0.5, dtype=dtype)


# --- good calls: b = 2, l = 5, h = 4, g = 2, p = 3, n = 2 -----------------------------------------

IDS, REAL = torch.arange(10).view(2, 5), torch.ones(2, 5).bool()
SSD = dict(
    x=floats(2, 5, 4, 3), dt=floats(2, 5, 4), A=-floats(4), B=floats(2, 5, 2, 2),
    C=floats(2, 5, 2, 2), D=floats(4), initial_state=floats(2, 4, 3, 2), chunk_size=2,
)  # fmt: skip
ONE = {name: SSD[name][:, 0] for name in ("x", "dt", "B", "C")} | dict(
    A=SSD["A"], D=SSD["D"], state=SSD["initial_state"]
)
SCAN = dict(
    x=floats(2, 5, 3), dt=floats(2, 5, 3), A=-floats(3, 2), B=floats(2, 5, 2), C=floats(2, 5, 2),
    D=floats(3), initial_state=floats(2, 3, 2),
)  # fmt: skip
LA = dict(
    q=floats(2, 5, 3, 2), k=floats(2, 5, 3, 2), v=floats(2, 5, 3, 4), scale=1.0, chunk_size=2,
    initial_state=floats(2, 3, 4, 2),
)  # fmt: skip
GATES = dict(g=-floats(2, 5, 3), beta=floats(2, 5, 3))
ATTENTION = dict(
    q=floats(2, 3, 4, 6), k=floats(2, 5, 2, 6), v=floats(2, 5, 2, 6), bias=floats(2, 4, 5),
    allowed=torch.ones(2, 4, 3, 5).bool(),
)  # fmt: skip
FOUND = dict(gates=floats(2, 5, 2, 3), indices=torch.ones(2, 5, 2, 3).long())
NEURONS = dict(x=floats(2, 5, 4), down=floats(7, 4), up=floats(7, 3), gate=floats(7, 4)) | FOUND
CHOICES = dict(gates=floats(2, 5, 2), indices=torch.ones(2, 5, 2).long(), n_experts=7)
SYSTEM = dict(A_bar=floats(3, 3), B_bar=floats(3), C=floats(3))
TINY = model.ModelConfig("SE", d_model=8, d_state=4, n_heads=2, n_neurons=4, vocab_size=50)
NET = model.CausalLM(TINY)
X, WIDE = zeros(2, 5, 8), dict(d_model=8, d_ff=4)
ROUTED = WIDE | dict(n_experts=4, k=2)
PEER = dict(d_model=8, n_experts=9, n_heads=2, k=4, d_query=4)
HEADS = dict(d_model=8, n_heads=2)
MIXED = dict(x=X, position_ids=IDS, padding_mask=REAL)
TEXT = torch.arange(200) % 50
RUN = train.TrainConfig(steps=1, batch_size=2, seq_len=8)

# A function, its arguments, and the letters that the object itself has fixed.
CALLS = [
    *((getattr(ssd, f"ssd_{form}"), SSD) for form in ("recurrent", "quadratic", "chunked")),
    (ssd.ssd, SSD | dict(backend="chunked")),
    (ssd.ssd_step, ONE | dict(backend="auto")),
    (ssd.semiseparable_matrix, {name: SSD[name] for name in ("dt", "A", "B", "C")}),
    (ssd.SSD, HEADS | dict(d_head=4, n_groups=1, d_state=4, position="conv", d_conv=3,
                           chunk_size=4, backend="auto")),
    (ssd.SSD, HEADS | dict(d_state=4, position="rope", rope_base=100.0)),
    (ssd.SSD(8, n_heads=2, d_state=4).forward, MIXED, "d"),
    *((getattr(mamba, name), SCAN) for name in ("selective_scan", "selective_scan_parallel")),
    (mamba.Mamba, dict(d_model=8, d_state=2, d_conv=2, expand=2, dt_rank=1, scan="parallel")),
    (mamba.Mamba(8).forward, dict(x=X), "d"),
    (la.linear_attention, LA),
    (la.gated_linear_attention, LA | dict(g=GATES["g"])),
    *((f, LA | dict(beta=GATES["beta"])) for f in (la.longhorn, la.delta_rule)),
    (la.gated_delta_rule, LA | GATES),
    (convolution.short_convolution,
     dict(u=floats(2, 5, 3), weight=floats(3, 4), padding_mask=REAL, history=floats(2, 3, 3))),
    (rope.rope_frequencies, dict(dim=6, base=100.0)),
    (rope.rope_cos_sin, dict(position_ids=IDS, dim=6, base=100.0, dtype=torch.float32)),
    (rope.apply_rope, dict(x=floats(2, 5, 3, 6), cos=floats(2, 5, 6), sin=floats(2, 5, 6))),
    (rope.rotation_matrix, dict(position=1.5, dim=6, base=100.0, pairing="half")),
    (rope.pairing_permutation, dict(dim=6)),
    (rope.ntk_base, dict(length=9, dim=6, base=100.0, max_positions=4, scaling_factor=2.0)),
    (rope.log_length_scale, dict(position_ids=IDS, base_length=10.0, dtype=torch.float32)),
    (attention.causal_mask, dict(n_queries=3, n_keys=5, real=REAL)),
    *((f, ATTENTION) for f in (attention.attention, attention.naive_attention)),
    (attention.online_softmax, dict(scores=floats(2, 4, 3, 5), values=floats(2, 5, 4, 6))),
    (attention.GateMask, dict(n_heads=2, max_positions=20)),
    (attention.GateMask(2, 20).forward, dict(v=zeros(2, 5, 2, 4), position_ids=IDS)),
    (attention.ContentMask, dict(d_values=8, n_heads=2, k_keys=2)),
    (attention.RetrievedValues, HEADS | dict(n_values=4, k_values=2)),
    *((getattr(attention.RetrievedValues(8, n_heads=2, n_values=4, k_values=2), name), dict(x=X),
       "d") for name in ("weights", "forward")),
    (attention.QCAttn, HEADS | dict(n_kv_heads=1, rope_base=9.0, mask="gate", max_positions=9)),
    (attention.QCAttn, HEADS | dict(mask="content", k_keys=2)),
    (attention.QCAttn(8, n_heads=2).forward, MIXED, "d"),
    (attention.InnerFuncAttn, HEADS | dict(inner="retrieved", n_values=4, k_values=2)),
    (attention.InnerFuncAttn, HEADS | dict(inner="ssd", d_state=4)),
    (attention.InnerFuncAttn(8, n_heads=2, d_state=4).forward, MIXED, "d"),
    (feed_forward.MLP, WIDE),
    (feed_forward.MLP(8, 4).forward, dict(x=X), "d"),
    (feed_forward.DGLU, WIDE | dict(gate="tanh")),
    (feed_forward.DGLU(8, 4).forward, dict(x=X), "d"),
    *((getattr(experts, name), ROUTED)
      for name in ("MoE", "SharedExpertMoE", "CohesiveMoE", "ExpansiveMoE")),
    *((getattr(f(**ROUTED), name), dict(x=X), "d") for name in ("forward", "route")
      for f in (experts.MoE, experts.SharedExpertMoE, experts.CohesiveMoE, experts.ExpansiveMoE)),
    (experts.load_balancing_loss, CHOICES),
    (retrieval.product_key_topk, dict(queries=floats(2, 5, 2, 2, 4), keys=floats(2, 2, 5, 4), k=3)),
    (retrieval.neurons,
     dict(x=floats(3, 4), table=floats(7, 4), indices=torch.ones(3, 6).long())),
    *((f, NEURONS) for f in (retrieval.retrieved_experts, retrieval.naive_retrieved_experts)),
    (retrieval.ProductKeys, PEER),
    (retrieval.PEER, PEER),
    (retrieval.CDMMoE, PEER | dict(d_ff=4, d_private=4)),
    (retrieval.CDMoE, PEER | dict(d_ff=4, form="serial")),
    *((getattr(layer, name), dict(x=X), "d") for layer, name in (
        (retrieval.PEER(**PEER), "route"), (retrieval.PEER(**PEER), "forward"),
        (retrieval.CDMMoE(**PEER, d_ff=4), "private"), (retrieval.CDMMoE(**PEER, d_ff=4), "route"),
        (retrieval.CDMMoE(**PEER, d_ff=4), "forward"), (retrieval.CDMoE(**PEER, d_ff=4), "route"),
        (retrieval.CDMoE(**PEER, d_ff=4), "forward"))),
    *((f, dict(A=-torch.eye(3), B=zeros(3), dt=0.1))
      for f in (state_space.discretize_zoh, state_space.discretize_bilinear)),
    (state_space.ssm_recurrent, SYSTEM | dict(x=floats(2, 5), initial_state=floats(2, 3))),
    (state_space.ssm_kernel, SYSTEM | dict(length=5)),
    (state_space.ssm_convolution, dict(kernel=floats(5), x=floats(2, 5))),
    (state_space.hippo_legs, dict(n=3)),
    (state_space.S4D, dict(d_model=8, d_state=4, init="lin")),
    (state_space.S4D(8, d_state=4).forward, dict(x=X, rate=2.0), "d"),
    (state_space.S4D(8, d_state=4).step,
     dict(x=X[:, 0], state=zeros(2, 8, 2).to(torch.complex64), rate=2.0), ("d", "modes")),
    (model.CausalLM(TINY).forward, dict(input_ids=IDS, padding_mask=REAL)),
    (model.CausalLM(TINY).hidden_states, dict(input_ids=IDS, padding_mask=REAL)),
    (model.generate, dict(model=NET, prompt=IDS, max_new_tokens=1, padding_mask=REAL)),
    (model.stream, dict(model=NET, prompt=IDS, max_new_tokens=1, padding_mask=REAL)),
    (model.sample, dict(logits=floats(2, 9))),
    (model.Sampling, dict(temperature=1.0, top_k=2, top_p=0.5)),
    (tasks.multi_query_recall, dict(n_rows=2, length=32, n_pairs=4, vocab_size=64, power=0.1)),
    (tasks.needle, dict(n_rows=2, length=100, depth=0.5, haystack=torch.arange(500) % 90)),
    (tasks.blank_infilling,
     dict(ids=TEXT, mask_id=50, start_id=51, end_id=52, share=0.1, mean_span=2.0)),
    *((f, dict(config=TINY, context=2, batch=2, dtype=torch.float32))
      for f in (budget.cache_bytes, budget.step_bytes)),
    (budget.count_flops, dict(config=TINY, length=5, context=2, batch=2)),
    (budget.activation_bytes, dict(config=TINY, length=5, batch=2, dtype=torch.float32)),
    (budget.training_bytes, dict(config=TINY, tokens=5, dtype=torch.float32, processes=2)),
    (roofline.pass_operators,
     dict(config=TINY, length=5, context=2, batch=2, dtype=torch.float32)),
    (roofline.Machine, dict(flops=1.0, bandwidth=1.0, launch=0.0)),
    (text.ids_to_text, dict(ids=TEXT)),
    (text.fingerprint, dict(ids=TEXT)),
    (train.split_text, dict(ids=TEXT, eval_fraction=0.5)),
    (train.evaluate, dict(model=NET, ids=TEXT, seq_len=8, batch_size=2)),
    (train.train, dict(model=NET, ids=TEXT, config=RUN)),
    (train.TrainConfig, dict(steps=9, batch_size=2, seq_len=8, learning_rate=0.1, warmup=0.1,
                             min_lr_ratio=0.1, weight_decay=0.1, max_grad_norm=1.0,
                             eval_fraction=0.1, evaluate_every=1, micro_batch_size=1,
                             decay_steps=9)),
    (model.ModelConfig, dict(pattern="SIE", vocab_size=9, d_model=8, n_heads=2, n_kv_heads=1,
                             d_head=4, n_groups=1, d_state=4, position="conv", d_conv=2,
                             rope_base=9.0, chunk_size=4, backend="auto", inner="retrieved",
                             n_values=4, k_values=2, mask="gate", max_positions=9, d_ff=4,
                             n_neurons=4, k_neurons=2, n_retrieval_heads=1, d_query=4,
                             norm_eps=0.1)),
]  # fmt: skip


# --- what is wrong, from the signature ------------------------------------------------------------

# What is not refused, or not by its name, and why; by patterns of function, argument and change.
ACCEPTED = {
    r"\.(MLP|DGLU)-x-an axis too many": "each token by itself: the width is checked",
    r"\.CDMMoE\.private-x-an axis too": "the same",
    r"GateMask-(v-|position_ids-an(other .$| axis))": "called by a layer, which made both tensors",
    r"attention-bias-(another kind|float32)": "is cast to the dtype of the scores",
    r"short_convolution-weight-float32": "is cast to the dtype of the sums",
    r"retrieved_experts-(gates|x)-float32": "autocast may leave them in another dtype",
    r"causal_mask-n_": "the message speaks of queries and keys",
    r"discretize_\w+-A-an entry 0.25": "a system may grow",
    r"ntk_base-(length|max_positions)-the number 1.5": "a length may be a ratio",
    r"ssm_convolution-x-an axis too many": "then the kernel has one too few",
    r"sample-logits-another kind": "whole numbers are logits too",
    # Not looked at: these end in an error of torch's or Python's.
    r"rope\.\w+-dim-the number 'x'": "compared with 2",
    r"ssm_kernel-length-the number 1.5": "a number of entries",
    r"blank_infilling-\w+_id-the number 1.5": "an entry of ids",
    r"text\.\w+-ids-|(evaluate|split_text)-ids-": "a text comes from text.py",
    r"split_text-eval_fraction-": "comes from a TrainConfig",
}
# What has shapes in its signature and is not called here: these are called by what is, or take
# other processes, or a kernel; their own tests ask what they refuse.
ELSEWHERE = {
    "Block.forward",
    "CohesiveMoE.expert",
    "Float32Linear.forward",
    "ProductKeys.forward",
    "positions",
    "CausalLM.check_inputs",
    "CausalLM.logits",
    "ContentMask.forward",
    "ContentMask.keeps",
    "ExpansiveMoE.expert",
    "GateMask.keeps",
    "MoE.expert",
    "RotaryTable.__init__",
    "Run.backward",
    "SequenceParallel.forward",
    "chunk_scan",
    "evaluation_windows",
    "next_token_loss",
    "random_windows",
    "ssd_kernel",
    "ssd_sequence_parallel",
    "ssd_triton",
    "start",
    "state_update",
    "train",
}

# Entries out of range, by the name of an argument, and numbers.
ENTRIES = dict(dt=(-0.5, math.nan, math.inf), A=(0.25, math.nan, -math.inf))
ENTRIES |= dict(g=(0.25, math.inf, math.nan), beta=(-0.5, math.inf, math.nan))
ENTRIES |= dict(indices=(-1, 7), input_ids=(-1, 50), prompt=(-1, 50))
INTEGERS, NUMBERS = (-1, 1.5, "x"), (math.nan, "x")


def arrays(annotation):
    """The shapes in an annotation, without its None."""
    kinds = typing.get_args(annotation) or (annotation,)
    return [k for k in kinds if isinstance(k, type) and issubclass(k, jaxtyping.AbstractArray)]


def another_size(t, axis):
    return t.narrow(axis, 0, t.shape[axis] - 1) if t.shape[axis] > 1 else torch.cat([t, t], axis)


def last_entry(t, value):
    t = t.clone()
    t.view(-1)[-1] = value
    return t


def spoilt_tensor(name, t, shape, letters, fixed, narrow):
    """A name for what is wrong, the wrong tensor, and the arguments that a message may name."""
    dims = shape.dim_str.split()
    if not dims[0].startswith(("...", "*")):
        yield "an axis too few", t.select(0, 0), {name}
        yield "an axis too many", t[None], {name}
    for axis, dim in enumerate(reversed(dims), start=1):
        sharing = {other for other, known in letters.items() if dim in known}
        bound = len(sharing) > 1 or dim in fixed or not dim.isidentifier()
        if bound and dim not in ("...", "_") and not dim.startswith("*"):
            yield f"another {dim}", another_size(t, t.ndim - axis), sharing
    yield "another kind of dtype", t.long() if t.is_floating_point() else t.real.float(), {name}
    if narrow and t.is_floating_point():
        yield "float32", t.float(), {*letters}  # the first one sets the dtype of the others
    for value in ENTRIES.get(name, ()):
        yield f"an entry {value}", last_entry(t, value), {name}


def spoilt(function, arguments, fixed=""):
    """All ways in which one argument can be wrong."""
    parameters = inspect.signature(function).parameters
    shapes = {name: arrays(p.annotation) for name, p in parameters.items() if name in arguments}
    letters = {name: kinds[0].dim_str.split() for name, kinds in shapes.items() if kinds}
    tensors = [t for name, t in arguments.items() if name in letters and t.is_floating_point()]
    narrow = len(tensors) > 1 and tensors[0].dtype == torch.float64
    for name, value in arguments.items():
        annotation = parameters[name].annotation
        kinds = typing.get_args(annotation) or (annotation,)
        if shapes[name]:
            yield from (
                (name, *change)
                for change in spoilt_tensor(name, value, shapes[name][0], letters, fixed, narrow)
            )
        elif typing.get_origin(kinds[0]) is typing.Literal or isinstance(kinds[0], str):
            yield name, "no such word", "no such word", {name}
        elif torch.dtype in kinds:
            yield name, "no dtype of numbers", torch.int64, {name}
        elif float in kinds or int in kinds:
            for wrong in NUMBERS if float in kinds else INTEGERS:
                yield name, f"the number {wrong!r}", wrong, {name}


def label(function):
    return re.sub(r"^cheems_ref\.|\.forward$", "", f"{function.__module__}.{function.__qualname__}")


def complaint(function, arguments, name, value, may_name):
    """What is wrong with how the function deals with a wrong value; None if nothing is."""
    try:
        result = function(**arguments | {name: value})
        if inspect.isgenerator(result):
            next(result)
    except (ValueError, TypeError) as error:
        named = re.search(rf"\b({'|'.join(may_name)})\b", str(error))
        return None if named else f"the message does not name it: {error}"
    except (RuntimeError, AttributeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize("row", CALLS, ids=lambda row: label(row[0]))
def test_every_wrong_argument_is_refused_by_its_name(row):
    function, arguments, *fixed = row
    for name, what, *change in spoilt(function, arguments, *fixed):
        title = f"{label(function)}-{name}-{what}"
        said = complaint(function, arguments, name, *change)
        known = [pattern for pattern in ACCEPTED if re.search(pattern, title)]
        assert said is None or known, f"{title}: {said}"
        assert said is not None or not known, f"{title} is refused: {known} is out of date"


def test_the_calls_are_good():
    for function, arguments, *_ in CALLS:
        function(**arguments)


def with_shapes(owner, name):
    """The functions and methods of a module or class whose signature has shapes."""
    for key, f in vars(owner).items():
        hidden = key.startswith("_") and key != "__init__"
        if hidden or getattr(f, "__module__", None) != name:
            continue
        if inspect.isclass(f):
            yield from with_shapes(f, name)
        elif inspect.isfunction(f):
            annotations = (p.annotation for p in inspect.signature(f).parameters.values())
            if any(arrays(annotation) for annotation in annotations):
                yield f


def test_every_function_with_shapes_in_its_signature_is_called():
    names = [f"cheems_ref.{module.name}" for module in pkgutil.iter_modules(cheems_ref.__path__)]
    public = {
        f.__qualname__
        for name in names
        if not name.endswith("__main__")
        for f in with_shapes(importlib.import_module(name), name)
    }
    called = {function.__qualname__ for function, *_ in CALLS}
    inherited = {"InnerFuncAttn.forward", "SharedExpertMoE.route"}
    missing = public - called - ELSEWHERE - inherited
    assert not missing, f"no call of {', '.join(sorted(missing))}"


# --- what a signature does not say: sizes of nothing, numbers that must fit one another --------

HAY = torch.arange(500) % 90
RECALL = dict(n_rows=2, length=16, n_pairs=4, vocab_size=12)
BLANKS = dict(ids=torch.arange(10), mask_id=10, start_id=11, end_id=12)
MAMBA, SYSTEM_AND_X = mamba.Mamba(8, d_state=2), SYSTEM | dict(x=floats(2, 5))
KEPT = MAMBA(X)[1]


def nothing(arguments, *names, axis=-1):
    """Some of the arguments, with no entry along an axis."""
    return {name: arguments[name].narrow(axis, 0, 0) for name in names}


def sixteen_bits(arguments):
    return {k: t.bfloat16() if torch.is_tensor(t) else t for k, t in arguments.items()}


# A function, a call that it takes, what is changed, and what it says then.
RELATIONS = [
    *((la.gated_delta_rule, LA | GATES | dict(chunk_size=size), change, message)
      for size in (None, 2) for change, message in (
          (nothing(LA, "q", "k", "initial_state"), "n must be at least 1"),
          (nothing(LA, "v") | nothing(LA, "initial_state", axis=2), "p must be at least 1"),
          (sixteen_bits(LA | GATES), r"initial_state must be torch\.float32 .*bfloat16"))),
    *((mamba.selective_scan, SCAN, change, message) for change, message in (
        (nothing(SCAN, "A", "B", "C", "initial_state"), "n must be at least 1"),
        (nothing(SCAN, "x", "dt", "D") | nothing(SCAN, "A", axis=0)
         | nothing(SCAN, "initial_state", axis=1), "d must be at least 1"),
        (sixteen_bits(SCAN), r"initial_state must be torch\.float32 .*bfloat16"))),
    *((MAMBA.forward, dict(x=X, cache=KEPT), change, message) for change, message in (
        (dict(cache=KEPT._replace(conv=KEPT.conv[:1])), r"history must be .* \(2, 3, 16\)"),
        (dict(cache=KEPT._replace(state=KEPT.state[..., :1])), r"state must be .* \(2, 16, 2\)"),
        (dict(cache=KEPT._replace(state=KEPT.state.double())), r"state must be torch\.float32"),
        (dict(x=X[:1]), r"cache\.state must be .* \(1, 16, 2\)"))),
    (convolution.short_convolution, dict(u=floats(2, 5, 3), weight=floats(3, 4)),
     dict(weight=floats(3, 0)), "d_conv must be at least 1"),
    (state_space.S4D, dict(d_model=8), dict(d_state=5), "d_state must be even"),
    (state_space.ssm_recurrent, SYSTEM_AND_X, dict(B_bar=floats(3) / 0), "B_bar must be in"),
    (state_space.ssm_recurrent, SYSTEM_AND_X, {name: t.half() for name, t in SYSTEM_AND_X.items()},
     "A_bar must be torch.float32 or torch.float64"),
    (state_space.discretize_bilinear, dict(A=torch.eye(3), B=zeros(3), dt=1.0), dict(dt=2.0),
     "2/dt is an eigenvalue of A"),
    *((tasks.multi_query_recall, RECALL, change, message) for change, message in (
        (dict(length=15), "length must be even, got 15"),
        (dict(length=14), "length = 14 has no room for n_pairs = 4"),
        (dict(vocab_size=9), "vocab_size = 9 is too small for n_pairs = 4"),
        (dict(power=0.0), r"power must be a number in \(0, 1\], got 0.0"))),
    *((tasks.needle, dict(n_rows=2, length=100, depth=0.5, haystack=HAY), change, message)
      for change, message in (
        (dict(length=50), "length = 50 has no room for sentence and question: 1 short"),
        (dict(depth=1.5), r"depth must be a number in \[0, 1\], got 1.5"),
        (dict(haystack=HAY[:10]), "the haystack has 10 bytes, fewer than the 49 of a text"),
        (dict(haystack=HAY + 200), r"haystack must be in \[0, 256\)"))),
    *((tasks.blank_infilling, BLANKS, change, message) for change, message in (
        (dict(ids=torch.arange(0)), "ids is an empty text"),
        (dict(ids=torch.arange(12)), "ids must not hold mask_id = 10"),
        (dict(end_id=10), "must differ, got {'mask_id': 10, 'start_id': 11, 'end_id': 10}"),
        (dict(share=0.0), r"share must be a number in \(0, 1\), got 0.0"),
        (dict(mean_span=0.5), r"mean_span must be a number in \[1, inf\), got 0.5"))),
]  # fmt: skip


def test_what_does_not_fit_together_is_refused():
    for function, arguments, change, message in RELATIONS:
        function(**arguments)
        with pytest.raises(ValueError, match=message):
            function(**arguments | change)
