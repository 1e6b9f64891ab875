"""What a long run over many images needs beside the encoder: no torch in here.

The inputs as a sorted list on disk, worker processes that decode, parts that are written whole,
and a manifest that says which job a folder belongs to.
"""
