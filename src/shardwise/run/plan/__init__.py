"""What a training run needs, by arithmetic alone: bytes of each rank, bytes between ranks, before anything is started.

The formulas are those of ``docs/accounting.md``, whose tests hold the page and these functions to what is measured.
"""
