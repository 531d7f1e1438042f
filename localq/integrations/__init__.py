"""The kernels under other people's models. Importing this package loads nothing."""
