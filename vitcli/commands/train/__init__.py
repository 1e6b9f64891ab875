"""Train an encoder on images, or on synthetic shapes."""
