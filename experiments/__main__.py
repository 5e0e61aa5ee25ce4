"""`python -m experiments`."""

from experiments.runner import main

main()
