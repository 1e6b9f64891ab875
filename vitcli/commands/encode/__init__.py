"""What does this encoder make of my images, layer by layer?"""
