"""The transformer: rotary positions, attention, MLP, layer and block, each split over the tensor-parallel group."""
