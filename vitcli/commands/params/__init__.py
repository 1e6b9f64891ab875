"""Where are an encoder's parameters, operations and bytes?"""
