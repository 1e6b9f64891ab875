"""One file a command: config in, result out. Nothing here prints."""
