"""From parsed options (`parser`) to settings: the model, the training, the device."""

import argparse
import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import torch

from cheems_lab.parser import BYTES, PATTERN
from cheems_lab.processes import started_by_torchrun
from cheems_ref.config import LAYERS, ModelConfig, preset
from cheems_ref.train import TrainConfig, default_device

FIELDS = {field.name: field for field in dataclasses.fields(ModelConfig)}


def letters() -> str:
    """Return the letters of a pattern for a help text, in columns of three."""
    cells = [f"{letter} {layer.name}" for letter, layer in LAYERS.items()]
    rows = [cells[i : i + 3] for i in range(0, len(cells), 3)]
    return "\n".join("  " + "".join(f"{cell:<28}" for cell in row).rstrip() for row in rows)


def fields() -> str:
    """Return the fields of a model for a help text: default, meaning, and who uses it."""
    lines = ["fields of --set, with their defaults (a preset has its own) and who uses them:"]
    for name, field in FIELDS.items():
        if name == "vocab_size":
            continue
        default = PATTERN if name == "pattern" else field.default
        by = by_letters(name)
        lines.append(f"  {f'{name}={default}':<22} {field.metadata['meaning']}{by and f' ({by})'}")
    return "\n".join(lines)


def users(field: str) -> dict[str, tuple[str, str] | None]:
    """Return the letters whose layers take a field, each with its condition.

    {"I": ("inner", "ssd")} says that layer I uses it where the field `inner` is "ssd"; a condition
    is None if the letter always uses the field. An empty dict means every model does.
    """
    only = FIELDS[field].metadata["only"]
    return {key: only.get(key) for key, layer in LAYERS.items() if field in layer.fields.values()}


def is_used(field: str, config: ModelConfig) -> bool:
    """Return whether a model of this configuration depends on a field."""
    found = users(field)
    if not found:
        return True
    conditions = [condition for letter, condition in found.items() if letter in config.pattern]
    return any(only is None or getattr(config, only[0]) == only[1] for only in conditions)


def by_letters(name: str) -> str:
    """Return the letters that use a field, in words: "S; I with inner=ssd"; "" for all models."""
    by_condition: dict[tuple[str, str] | None, list[str]] = {}
    for letter, only in users(name).items():
        by_condition.setdefault(only, []).append(letter)
    return "; ".join(
        ", ".join(found) + (f" with {only[0]}={only[1]}" if only else "")
        for only, found in by_condition.items()
    )


# --- from options to settings --------------------------------------------------------------------


def model_config(a: argparse.Namespace, *, vocab_size: int | None = BYTES) -> ModelConfig:
    """Return the configuration that --preset or --pattern and --set describe.

    Args:
        a: the options.
        vocab_size: of the model, instead of a preset's; None to let --set choose it.

    Raises:
        ValueError, TypeError: an invalid field, or one that the pattern does not use.
    """
    if a.preset and a.pattern:
        raise ValueError("give --preset or --pattern, not both; --set changes single numbers")
    if a.pattern and any(name == "pattern" for name, _ in a.set):
        raise ValueError("give --pattern or --set pattern=..., not both")
    base = preset(a.preset) if a.preset else ModelConfig(pattern=a.pattern or PATTERN)
    config = with_fields(base, dict(a.set), vocab_size)
    check_used(dict(a.set), config)
    return config


def with_fields(
    base: ModelConfig, given: dict[str, Any], vocab_size: int | None = BYTES
) -> ModelConfig:
    """Return a configuration with some fields changed; vocab_size as in `model_config`."""
    if vocab_size is not None:
        if "vocab_size" in given:
            raise ValueError(f"vocab_size: a model of this command reads bytes, it is {BYTES}")
        given = given | {"vocab_size": vocab_size}
    return dataclasses.replace(base, **given)


def check_used(names: Iterable[str], *configs: ModelConfig, option: str = "--set") -> None:
    """Raise ValueError for a field that none of the models uses.

    Args:
        names: of the given fields.
        configs: of the models.
        option: the one that gives the fields, for the message.
    """
    for name in names:
        if not any(is_used(name, config) for config in configs):
            patterns = ", ".join(dict.fromkeys(config.pattern for config in configs))
            by = by_letters(name)
            raise ValueError(f"{option} {name} has no effect on {patterns}: it is for {by}")


def training_options(a: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of `TrainConfig` that were given."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    return {name: value for name, value in vars(a).items() if name in names and value is not None}


def device(a: argparse.Namespace) -> torch.device:
    """Return the device that --device names, or the fastest there is; of several GPUs one each."""
    name = a.device or default_device().type
    if name == "cuda" and started_by_torchrun() > 1:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    found = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        found += [kind, *(f"{kind}:{i}" for i in range(torch.accelerator.device_count()))]
    if name not in found:
        raise ValueError(f"--device {name} cannot be used here; there is {', '.join(found)}")
    return torch.device(name)
