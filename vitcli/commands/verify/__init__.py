"""Does this checkpoint give its own library's numbers here?"""
