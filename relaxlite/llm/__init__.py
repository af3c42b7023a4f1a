"""Compiled language models at run time: text in, text out. How they are made: frontend/llm.

engine.py            what generation needs of a compiled model
compiled_engine.py   the engine of a compiled step over a paged cache of keys and values
"""
