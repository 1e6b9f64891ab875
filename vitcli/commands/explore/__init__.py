"""What does the encoder see where I point?"""
