"""Using the models of `cheems_ref`: training runs, checkpoints, several processes, transformers,
evaluation, and the `cheems` command.
"""
