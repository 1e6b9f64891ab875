"""Ways to run an encoder: eager, compiled, ONNX Runtime."""

ENGINES = ("eager", "compile", "onnx")
OPSET = 20
"""The ONNX operator set of exported graphs: the first with GELU and LayerNorm as operators."""
