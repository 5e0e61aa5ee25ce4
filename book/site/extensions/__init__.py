"""What Sphinx is taught: links between chapters, the reference, the table of claims."""
