"""localq: chat with the largest language model that one consumer NVIDIA GPU can hold.

Importing the package does nothing and costs nothing; it only knows its version.
"""

__version__ = "0.1.0"
