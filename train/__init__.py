"""How the draft learns: batches, one optimizer step, the loop, checkpoints, and the pipeline around them."""
