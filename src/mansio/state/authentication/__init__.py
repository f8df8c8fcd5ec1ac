"""Authentication of clients without I/O: SCRAM, PLAIN, the SASL session of a connection, names of certificates."""
