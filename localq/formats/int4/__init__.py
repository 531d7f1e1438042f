"""4-bit integers with scales per group: AWQ and GPTQ."""
