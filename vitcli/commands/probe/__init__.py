"""How good are these embeddings on my labeled images?"""
