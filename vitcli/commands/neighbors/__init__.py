"""Which images are nearest to this one?"""
