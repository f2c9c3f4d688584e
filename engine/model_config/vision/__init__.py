"""Vision part of a model as data: what its files say of its tower, and what an image costs."""
