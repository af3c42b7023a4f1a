"""The version of relaxlite, in one place: packaging reads it from here too."""

__version__ = "0.1.0"

STEP_VERSION = 1
"""Of the way in which the compiled step of a language model is called: inputs, pools, what they mean
(frontend/llm/step.py makes it, llm/compiled_engine.py calls it). Whoever changes one of these counts this up."""
