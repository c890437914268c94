"""Images on disk, with and without labels."""
