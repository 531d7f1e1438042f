"""Conditions of a measurement: `conditions.py` lists them, `power.py` reads energy and throttling by NVML.

Printed with every result of `bench` and `eval`. Open `conditions.py` first.
"""
