"""Runs each notebook and stores its outputs and figures."""
