"""Which presets and checkpoint families are there?"""
