"""Vision part of a model as data: what its files say of its tower, and what an image costs.

A family is one `VisionFamily` (`fields.py`): the published names of its tensors, and for each field of the
result (`config.py`) a value, the key that has it, or a rule. It stands by how an image becomes patches:

- `llava.py`: SigLIP and CLIP, whose images or tiles all have the size of the tower;
- `tiles.py`: others that cut large images into tiles;
- `pixel_limits.py`: images keep their shape within limits of pixels (Qwen, GLM);
- `native_size.py`: images keep their shape within other limits: edges, patches, tokens.

`families.py` has the list by `model_type`, reads folders and checks tensors; `layout.py` has the sizes,
rows and texts of images.
"""
