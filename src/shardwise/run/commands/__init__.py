"""The work of the commands as functions with keyword arguments; ``shardwise.run`` exports them."""
