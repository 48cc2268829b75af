"""What a draft is worth: acceptance, speed and losslessness, measured, with intervals and a verdict."""
