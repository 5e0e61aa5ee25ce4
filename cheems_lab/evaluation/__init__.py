"""Tasks for lm-evaluation-harness, and how a run is evaluated on them."""
