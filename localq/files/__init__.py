"""Models on the hub and on the disk: catalogue, formats' facts, folders, downloads. Torch-free."""
