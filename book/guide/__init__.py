"""The lecturer's guide: its pages, and what fills in their minutes and links."""
