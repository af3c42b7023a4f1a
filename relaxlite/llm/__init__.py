"""Compiled language models at run time: text in, text out. How they are made: frontend/llm.

engine.py       what generation needs of a compiled model
evaluate.py     perplexity, and the distance from another model
"""
