"""Where and by how much do two encoders differ?"""
