"""How sharp is attention, and where does it look?"""
