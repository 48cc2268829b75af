"""The decoder: speculative and plain decoding of a pair, and the trace every number rests on."""
