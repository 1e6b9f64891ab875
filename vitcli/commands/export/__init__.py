"""How do I write an encoder for another program?"""
