"""Binary-coding quantization of whole models."""
