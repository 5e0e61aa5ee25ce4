"""The slides: what each shows, how large its type is, and the HTML."""
