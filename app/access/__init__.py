"""API keys and the files of TLS, as text: of the service and of its callers."""
