"""Loading: devices, places, weights."""
