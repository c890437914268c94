"""Makes whole sets by one command: networks, labels and INT8."""
