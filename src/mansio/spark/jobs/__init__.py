"""The jobs of `mansio pipeline`, one file each, each also a function."""
