"""Files of Protobuf: their compilation to descriptors, the text of a descriptor, and its normalized form."""
