"""The plan of a training run, by arithmetic alone: bytes of each rank and bytes between ranks, before a start.

The formulas are those of ``docs/memory.md``, whose tests hold the page and these functions to what is measured.
"""
