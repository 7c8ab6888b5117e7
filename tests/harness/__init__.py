"""What tests of parallel code stand on: a pool of ranks, and the comparisons they all make.

``plugin`` teaches pytest the mark ``ranks``, ``pool`` owns the processes, ``worker`` is what runs in each of them,
``report`` puts a failure into words, and ``parity`` compares tensors.
"""
