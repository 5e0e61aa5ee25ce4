"""The web site: pages for Sphinx, its settings and extensions, and the interactive pages."""
