"""What is made from the notebooks: outputs, site, slides, editions, and the map of the claims."""
