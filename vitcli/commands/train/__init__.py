"""Does it train?"""
