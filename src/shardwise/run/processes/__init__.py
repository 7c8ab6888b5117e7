"""The processes of a run: devices, network, heartbeats, signals."""
