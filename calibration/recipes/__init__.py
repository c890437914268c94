"""Makes whole sets with one command: networks, labels and INT8."""
