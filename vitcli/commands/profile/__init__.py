"""Where does an encoder's time go on this machine?"""
