"""Process groups, communication, shards, random streams and files; every other room builds on this one."""
