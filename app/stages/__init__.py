"""The stages of the graph: Decoder, Classifier, Combiner, and the operator's own functions."""
