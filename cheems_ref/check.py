"""Argument validation, with one message format: the argument's name, its axes, its numbers.

    n = check.shapes(x=(x, "b l h p"), dt=(dt, "b l h"), A=(A, "h"))     # {"b": 2, "l": 13, ...}

Every axis has a letter; the first tensor with a letter sets its size. Arguments that are None are
skipped. A wrong value raises ValueError; an argument that is not a number, or not a tensor, raises
TypeError.

Shapes and dtypes cost a comparison and can be checked anywhere. `entries` and `token_ids` read
values, which synchronises with the device: public functions call them and layers do not. Where
there are no values to read they check nothing: while torch compiles, inside torch.func's transforms
(vmap, grad), and on the meta device.
"""

from collections.abc import Collection
from numbers import Integral, Real
from typing import Any, get_args

import torch
from torch import Tensor, nn

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
INDICES = (torch.int64, torch.int32)  # torch rejects other dtypes, or treats them as masks


def shapes(
    known: dict[str, int] | None = None, /, **named: tuple[Tensor | None, str]
) -> dict[str, int]:
    """Bind every letter to one size and return the sizes; reject the first tensor that differs."""
    sizes = dict(known or {})
    for name, (t, axes) in named.items():
        if t is None:
            continue
        tensors(**{name: t})
        letters, shape = axes.split(), tuple(t.shape)
        want = [sizes.get(letter, letter) for letter in letters]
        for letter, size in zip(letters, shape, strict=False):
            sizes.setdefault(letter, size)
        if shape != tuple(sizes.get(letter) for letter in letters):
            bound = "" if want == letters else f" = {_tuple(want)}"
            raise ValueError(f"{name} must be {_tuple(letters)}{bound}, got shape {shape}")
    return sizes


def tensors(**named: Tensor) -> None:
    """Reject arguments that are not tensors, such as lists, NumPy arrays and None."""
    for name, t in named.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")


def width(x: Tensor, d: int) -> None:
    """Reject an x whose last axis does not have size d."""
    tensors(x=x)
    if x.ndim == 0 or x.shape[-1] != d:
        raise ValueError(f"x must be (..., d) with d = {d}, got shape {tuple(x.shape)}")


def dtypes(allowed: Collection[torch.dtype], /, **named: Tensor | None) -> None:
    """Reject tensors of another dtype."""
    for name, t in named.items():
        if t is None:
            continue
        tensors(**{name: t})
        if t.dtype not in allowed:
            listed = " or ".join(dict.fromkeys(map(str, allowed)))
            raise ValueError(f"{name} must be {listed} here, got {t.dtype}")


def floating(**named: Tensor | torch.dtype | None) -> None:
    """Reject tensors, or dtypes, that are not floating-point."""
    for name, t in named.items():
        if t is None:
            continue
        if not isinstance(t, torch.dtype):
            tensors(**{name: t})
        dtype = t if isinstance(t, torch.dtype) else t.dtype
        if not dtype.is_floating_point:
            raise ValueError(f"{name} must be floating-point, got {dtype}")


def entries(interval: str, /, **named: Tensor | None) -> None:
    """Reject tensors with an entry outside an interval such as "[0, inf)", or NaN."""
    if not values_can_be_read():
        return
    for name, t in named.items():
        if t is not None and t.numel() and not t.is_meta:
            low, high = (end.item() for end in t.detach().aminmax())
            if not (_inside(low, interval) and _inside(high, interval)):
                raise ValueError(
                    f"{name} must be in {interval} everywhere, got entries in [{low:g}, {high:g}]"
                )


def values_can_be_read() -> bool:
    """Return whether tensors have values now: not while torch compiles or transforms a function."""
    if torch.compiler.is_compiling():
        return False
    return not torch._C._are_functorch_transforms_active()


def sizes(least: int = 1, /, **named: int | None) -> None:
    """Reject sizes that are not whole numbers of at least 1, or of at least another number."""
    for name, size in named.items():
        if size is not None and (not isinstance(size, Integral) or isinstance(size, bool)):
            raise TypeError(f"{name} must be a whole number, got {size!r}")
        if size is not None and size < least:
            raise ValueError(f"{name} must be at least {least}, got {size}")


def numbers(interval: str, /, **named: float | int) -> None:
    """Reject numbers outside an interval such as "(0, 1]", or NaN."""
    for name, value in named.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not _inside(value, interval):
            raise ValueError(f"{name} must be a number in {interval}, got {value}")


def plain_numbers(config: Any) -> None:
    """Replace the NumPy numbers in a frozen dataclass by Python numbers, as JSON requires."""
    for name, value in vars(config).items():
        object.__setattr__(config, name, _plain(value))


def multiple(**pair: int) -> None:
    """Reject a first number that is not a multiple of the second."""
    (name, a), (divisor, b) = pair.items()
    if b < 1 or a % b:
        raise ValueError(f"{name} = {a} must be a multiple of {divisor} = {b}")


def choice(options: Any, /, **named: Any) -> None:
    """Reject a value that is not one of the options, a Literal or a tuple."""
    options = options if isinstance(options, tuple) else get_args(options)
    for name, value in named.items():
        if value not in options:
            raise ValueError(
                f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}"
            )


def padding_mask(known: dict[str, int], mask: Tensor | None) -> None:
    """Reject a padding mask that is not boolean (b, l)."""
    dtypes([torch.bool], padding_mask=mask)
    shapes(known, padding_mask=(mask, "b l"))


def mixer_call(x: Tensor, d: int, position_ids: Tensor, mask: Tensor | None) -> None:
    """Reject shapes, dtypes and devices that no sequence mixer of width d can take."""
    tensors(x=x, position_ids=position_ids)
    known = shapes({"d": d}, x=(x, "b l d"))
    dtypes(INDICES, position_ids=position_ids)
    shapes(known, position_ids=(position_ids, "b l"))
    padding_mask(known, mask)
    for name, t in dict(position_ids=position_ids, padding_mask=mask).items():
        if t is not None and t.device != x.device:
            raise ValueError(f"{name} must be on {x.device} as x is, got a tensor on {t.device}")


def fits_weights(x: Tensor, projection: nn.Module) -> None:
    """Reject an x that a layer's first projection cannot multiply: another dtype, or no values.

    Autocast casts x itself. A quantised projection has no floating-point weights to compare with,
    and one whose weights are offloaded has them on the meta device until it is called.
    """
    weight = next(projection.parameters(), None)
    if weight is None or weight.dtype not in FLOATS:
        return
    if x.is_meta and not weight.is_meta:
        raise ValueError(f"x must be on {weight.device} as the weights are, got a tensor on meta")
    if x.dtype != weight.dtype and not (x.dtype in FLOATS and _autocasts(x.device)):
        raise ValueError(f"x must be {weight.dtype} as the weights are, got {x.dtype}")


def token_ids(vocab_size: int, **named: Tensor) -> None:
    """Reject ids that are not integers (b, l) in [0, vocab_size)."""
    for name, ids in named.items():
        tensors(**{name: ids})
        dtypes(INTEGERS, **{name: ids})
        shapes(**{name: (ids, "b l")})
        entries(f"[0, {vocab_size})", **{name: ids})


def _autocasts(device):
    available = torch.amp.is_autocast_available(device.type)
    return available and torch.is_autocast_enabled(device.type)


def _plain(value):
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _tuple(parts):
    parts = [str(part) for part in parts]
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def _inside(value, interval):
    low, high = map(float, interval[1:-1].split(","))
    above = low <= value if interval[0] == "[" else low < value
    below = value <= high if interval[-1] == "]" else value < high
    return above and below
