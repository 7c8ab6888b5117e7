"""What ``gpu.py`` measures: each function takes the device and sizes, and returns rows of its table."""
