"""The HAProxy that Serve starts: what is changed in its configuration, and the command for it."""
