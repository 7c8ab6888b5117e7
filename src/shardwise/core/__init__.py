"""Groups of ranks, communication, shards, random streams and files: every other room stands on this one."""
