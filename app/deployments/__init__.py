"""The stages of the graph as Ray Serve runs them: Gateway, Decoder, Classifier, Combiner."""
