"""Converters of ai.onnx.ml, the operators of classical models: trees, linear models, feature transformers, labels."""

from __future__ import annotations

from relaxlite.frontend.onnx.ml import (  # noqa: F401  (each registers its converters)
    features,
    linear,
    mapping,
    trees,
)
