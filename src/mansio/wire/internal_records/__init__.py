"""Records of internal topics and embedded protocols."""
