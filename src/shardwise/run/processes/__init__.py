"""A process as one of the ranks of a run: devices, network, heartbeats, signals."""
