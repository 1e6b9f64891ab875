"""Ways to run an encoder: eager, compiled, ONNX Runtime."""

ENGINES = ("eager", "compile", "onnx")
