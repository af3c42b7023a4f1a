"""Importer of language models: checkpoints (GGUF files, Hugging Face folders) become IR modules.

config.py       the hyperparameters that distinguish decoders, as data; architectures/: one file for each family
checkpoint.py   hyperparameters, named weights, tokenizer; quantized.py: blocked weights
read.py         reading either format: gguf_*.py, pre_tokenizers.py; hf_folder.py, hf_*.py
quantize.py     quantization of float weights into blocks
layers.py       the layers that all decoders share, as graph operators; step.py: the step over a paged KV cache
"""
