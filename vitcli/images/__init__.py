"""Images: from files and folders to what an encoder reads. The limits of what is read."""

MAX_PIXELS = 178_956_970
"""Pixels of an image: where Pillow itself begins to refuse, 2**30 / 3 bytes of RGB, halved."""
TIMEOUT_S = 60.0
"""Seconds in which an image must be decoded."""
MEMORY_BYTES = 4 * 2**30
"""Address space of a process that decodes."""
