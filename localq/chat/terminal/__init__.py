"""What every terminal front end shares. Torch-free."""
