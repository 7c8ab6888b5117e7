"""Trials at the start of an exact run: does this machine keep the bits that exact mode relies on?"""
