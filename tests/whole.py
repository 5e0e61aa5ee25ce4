"""The names of config, presets, model and budget in one module, for tests of several."""

from cheems_ref.budget import (
    CacheBytes,
    Flops,
    Parameters,
    activation_bytes,
    cache_bytes,
    count_flops,
    count_parameters,
    fit_d_ff,
    step_bytes,
    training_bytes,
    training_memory,
)
from cheems_ref.config import LAYERS, SEQUENCE_MIXERS, ModelConfig, expand_pattern, preset
from cheems_ref.model import (
    Block,
    CausalLM,
    ModelCache,
    RotaryTable,
    Sampling,
    generate,
    sample,
    stream,
)
from cheems_ref.presets import PRESETS

# fmt: off
__all__ = [
    "LAYERS", "PRESETS", "SEQUENCE_MIXERS", "Block", "CacheBytes", "CausalLM", "Flops",
    "ModelCache", "ModelConfig", "Parameters", "RotaryTable", "Sampling", "activation_bytes",
    "cache_bytes", "count_flops", "count_parameters", "expand_pattern", "fit_d_ff", "generate",
    "preset", "sample", "step_bytes", "stream", "training_bytes", "training_memory",
]
