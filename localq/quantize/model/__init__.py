"""The model while it is quantized: source, calibration stream, statistics."""
