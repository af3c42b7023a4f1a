"""Checkpoints of language models (GGUF files, Hugging Face folders) as modules.

config.py       what tells architectures apart, as data; architectures/: one file for each
checkpoint.py   hyperparameters, named weights, tokenizer; quantized.py: weights in blocks of few bits
read.py         gguf_*.py, pre_tokenizers.py; hf_folder.py, hf_*.py
quantize.py     float weights into blocks
layers.py       the layers that all share, as graph operators; dense.py: a model without a cache
"""
