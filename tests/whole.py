"""The names of config, presets, model and budget in one module, for tests of several."""

from cheems_ref import budget, config, model, presets

for room in (presets, config, model, budget):
    globals().update({name: value for name, value in vars(room).items() if name[:2] != "__"})
