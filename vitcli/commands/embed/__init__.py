"""How do I turn a folder of images into embeddings?"""
