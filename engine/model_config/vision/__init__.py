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

_PARTS = {
    "a language model that reads images in layers with cross-attention": "BlipForConditionalGeneration "
    "IdeficsForVisionText2Text MllamaForConditionalGeneration",
    "a Q-Former between tower and language model": "Blip2ForConditionalGeneration "
    "InstructBlipForConditionalGeneration InstructBlipVideoForConditionalGeneration",
    "Q-Formers over windows, and features for layers in the middle of the language model": "Granite4Vision"
    "ForConditionalGeneration",
    "features of inner layers under a pixel shuffle": "GraniteDoclingForConditionalGeneration",
    "queries that attend to patches": "AriaForConditionalGeneration Idefics2ForConditionalGeneration "
    "Kosmos2ForConditionalGeneration Kosmos2_5ForConditionalGeneration Molmo2ForConditionalGeneration",
    "tokens of images": "ChameleonForConditionalGeneration Emu3ForConditionalGeneration",
    "convolutions that shrink the result of the tower": "Step3p7ForConditionalGeneration",
    "a tower of convolutions": "FastVlmForConditionalGeneration Gemma3nForConditionalGeneration",
    "the encoder of SAM, with windows and relative positions": "DeepseekOcr2ForConditionalGeneration "
    "DeepseekVLHybridForConditionalGeneration GotOcr2ForConditionalGeneration "
    "UnlimitedOcrForConditionalGeneration",
    "images that are padded to a square with their mean color": "DeepseekVLForConditionalGeneration "
    "JanusForConditionalGeneration",
    "RoPE with four axes": "HunYuanVLForConditionalGeneration",
    "positions of slices on a canvas": "MiniCPMV4_7ForConditionalGeneration",
    "a tower with windows that other layers join": "MuseGlimmerForConditionalGeneration",
    "a tower of the Perception Encoder": "PerceptionLMForConditionalGeneration",
    "names of a checkpoint that makes images too": "Cosmos3EdgeForConditionalGeneration "
    "Cosmos3OmniForConditionalGeneration",
    "towers of LanguageBind": "VideoLlavaForConditionalGeneration",
    "attention in both directions within the prompt": "GitForCausalLM PaliGemmaForConditionalGeneration",
    "an encoder beside the decoder": "Florence2ForConditionalGeneration Pix2StructForConditionalGeneration "
    "PPFormulaNetForConditionalGeneration T5Gemma2ForConditionalGeneration UdopForConditionalGeneration "
    "VisionEncoderDecoderModel",
    "blocks of tokens that are denoised together": "DiffusionGemmaForBlockDiffusion",
    "an encoder of proteins": "EvollaForProteinText2Text",
    "actions of a robot as output": "PI0ForConditionalGeneration",
    "classes as output": "ShieldGemma2ForImageClassification",
}
MISSING_PARTS = {name: part for part, names in _PARTS.items() for name in names.split()}
"""Parts that models which see need and that are missing here, by the class in their config.json."""
