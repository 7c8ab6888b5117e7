"""The measurements of ``gpu.py``: each function takes the device and sizes, and returns rows of the table."""
