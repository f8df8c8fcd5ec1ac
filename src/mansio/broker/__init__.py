"""What a broker does, independent of any protocol."""
