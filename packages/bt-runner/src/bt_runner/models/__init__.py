"""Models: what they are made of, their weights, and the layers that run them."""
