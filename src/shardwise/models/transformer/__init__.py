"""The transformer: rotary positions, attention, MLP, layer and block, split over the tensor-parallel group."""
