"""What fits a card, and how fast it runs. Torch-free."""
