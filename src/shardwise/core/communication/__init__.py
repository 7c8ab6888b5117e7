"""Communication between ranks: out-of-place collectives, and the moves between layouts built on them."""
