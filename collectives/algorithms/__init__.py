"""The collectives written out, from send and receive alone."""
