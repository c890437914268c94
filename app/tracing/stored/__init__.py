"""Reading the spans that were kept on disk: traces, their waterfall, and Jaeger's JSON."""
