"""The arithmetic of exact mode: results have the same bits at every number of ranks.

``sum_in_parts`` enables it for a group before its layers are created. Tree sums are in ``core.communication.trees``.
"""

from shardwise.exact.strategies import sum_in_parts as sum_in_parts
