"""What the importers of ONNX and PyTorch models share: constructs of relaxlite that neither format has."""
