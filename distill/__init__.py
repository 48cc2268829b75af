"""What the draft learns: prompts, the target's own answers and distributions, losses, and the draft itself."""
