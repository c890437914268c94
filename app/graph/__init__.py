"""The inference graph: a request's way through Decoder, members and Combiner."""
